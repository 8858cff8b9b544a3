"""OpenCLIP's models as OpenCLIP loads them, and its ViTs as transformers' `CLIPModel`."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import open_clip
import pytest
import torch
import torch.nn.functional as F

from megabatch.errors import UsageError
from megabatch.export import export_run
from megabatch.models import Towers, create
from tests.export.runs import change_json, pictures, reports, write_run
from tests.models.tiny import TINY, TINY_UNMASKED, changed
from tests.models.tiny_bert import save_tiny_bert

TEXTS = [
    "a photo of a cat",
    "",
    "It's 2 o'clock -- isn't it?",
    "Ünïcode 北京 🙂",
    "many words " * 20,
]


def assert_same(folder: Path, towers: Towers) -> Any:
    """Tokens, and features of images and texts, equal those of the model; returns OpenCLIP's."""
    name = f"local-dir:{folder}"
    model, _, transform = open_clip.create_model_and_transforms(name)
    model.eval()
    tokens = open_clip.get_tokenizer(name)(TEXTS)
    assert torch.equal(tokens, towers.tokenizer(TEXTS))
    ours = torch.stack([towers.eval_transform(picture) for picture in pictures()])
    theirs = torch.stack([transform(picture) for picture in pictures()])
    assert ours.dtype == torch.uint8  # which the tower normalises, with the run's mean
    with torch.no_grad():
        expected = towers.module(ours, tokens)
        for found, features in (
            (model.encode_image(theirs, normalize=True), "image_features"),
            (model.encode_text(tokens, normalize=True), "text_features"),
        ):
            torch.testing.assert_close(found, expected[features], atol=1e-6, rtol=0)
    assert torch.equal(model.logit_scale, towers.module.logit_scale)
    return model


@pytest.mark.parametrize("name", [TINY, TINY_UNMASKED])
def test_open_clip_gives_the_runs_embeddings(tmp_path: Path, name: str) -> None:
    towers = write_run(tmp_path / "run", name)
    assert export_run(tmp_path / "run", to="openclip", output=tmp_path / "out") == []
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        "open_clip_config.json",
        "open_clip_model.safetensors",
    }
    assert assert_same(tmp_path / "out", towers).logit_bias is None
    file = tmp_path / "out" / "open_clip_model.safetensors"
    model, *_ = open_clip.create_model_and_transforms(name, pretrained=str(file))
    torch.testing.assert_close(model.state_dict(), towers.module.state_dict())


def test_the_runs_sizes_and_bias_go_along(tmp_path: Path) -> None:
    changes: dict[str, Any] = {"force_image_size": 16, "force_context_length": 12}
    towers = write_run(tmp_path / "run", TINY, loss="siglip", force_patch_dropout=0.25, **changes)
    export_run(tmp_path / "run", to="openclip", output=tmp_path / "out")
    model = assert_same(tmp_path / "out", towers)
    assert torch.equal(model.logit_bias, towers.module.logit_bias)
    stored = json.loads((tmp_path / "out" / "open_clip_config.json").read_text())
    assert stored["model_cfg"]["vision_cfg"]["patch_dropout"] == 0.25


def test_a_size_that_open_clip_cannot_load_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    timm = {"timm_model_name": "test_vit", "timm_pool": "", "timm_proj": "linear"}
    name = changed(monkeypatch, {"vision_cfg": {**timm, "image_size": 160}})
    write_run(tmp_path / "own", name, force_image_size=160)
    export_run(tmp_path / "own", to="openclip", output=tmp_path / "out")
    write_run(tmp_path / "other", name, force_image_size=96)
    with pytest.raises(UsageError, match=r"--force-image-size 96, but OpenCLIP .* own size, 160"):
        export_run(tmp_path / "other", to="openclip", output=tmp_path / "none")
    assert not (tmp_path / "none").exists()


def test_a_hugging_face_text_tower_takes_its_tokenizer_along(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoder = str(save_tiny_bert(tmp_path / "bert"))
    text = {"hf_model_name": encoder, "hf_tokenizer_name": encoder, "context_length": 12}
    pooling = {"hf_proj_type": "linear", "hf_pooler_type": "mean_pooler"}
    towers = write_run(tmp_path / "run", changed(monkeypatch, {"text_cfg": {**text, **pooling}}))
    [note] = export_run(tmp_path / "run", to="openclip", output=tmp_path / "out")
    assert note == f"OpenCLIP reads the configuration of {encoder} from the hub or its local cache"
    assert_same(tmp_path / "out", towers)


# --- as transformers' CLIPModel -------------------------------------------------------------------


def read(folder: Path) -> tuple[Any, Any]:
    """The model and its processor, with nothing reported on the weights."""
    transformers = pytest.importorskip("transformers")
    with reports() as logged:
        model = transformers.CLIPModel.from_pretrained(folder)
        processor = transformers.CLIPProcessor.from_pretrained(folder)
    assert not [line for line in logged if "LOAD REPORT" in line or "newly initialized" in line]
    return model, processor


def same_pixels(towers: Towers, processor: Any) -> torch.Tensor:
    """The pictures, normalised by the model; by the processor they are nearly the same."""
    pixels = processor(images=pictures(), return_tensors="pt")["pixel_values"]
    ours = torch.stack([towers.eval_transform(picture) for picture in pictures()])
    normalised: torch.Tensor = towers.module.visual.pixel_normalization(ours)
    torch.testing.assert_close(pixels, normalised, atol=0.1, rtol=0)  # filters round differently
    return normalised


@pytest.mark.parametrize("quick", [False, True])
def test_transformers_gives_the_runs_embeddings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quick: bool
) -> None:
    shape = {"layers": 2, "mlp_ratio": 3.0}
    name = changed(
        monkeypatch,
        {"model": {"quick_gelu": quick}, "vision_cfg": shape, "text_cfg": {**shape, "heads": 4}},
    )
    towers = write_run(tmp_path / "run", name, force_image_size=16, force_context_length=12)
    [note] = export_run(tmp_path / "run", to="huggingface", output=tmp_path / "out")
    assert note.startswith("OpenCLIP's tokenizer also repairs texts")
    model, processor = read(tmp_path / "out")
    texts = processor.tokenizer(TEXTS, padding="max_length", truncation=True, return_tensors="pt")
    tokens, mask = towers.tokenizer(TEXTS), texts["attention_mask"].bool()
    assert tokens.shape == texts["input_ids"].shape == (5, 12)
    assert torch.equal(mask, torch.arange(12) <= tokens.argmax(1, keepdim=True))
    assert torch.equal(texts["input_ids"][mask], tokens[mask])
    normalised = same_pixels(towers, processor)
    with torch.no_grad():
        expected = towers.module(normalised, tokens)
        found = model(**texts, pixel_values=normalised)
    close = functools.partial(torch.testing.assert_close, atol=1e-6, rtol=0)
    close(found.image_embeds, expected["image_features"])
    close(found.text_embeds, expected["text_features"])
    assert torch.equal(model.logit_scale, towers.module.logit_scale)
    again = create(f"hf:{tmp_path / 'out'}")  # and megabatch trains on from it
    text = again.module.eval().encode_text(again.tokenizer(TEXTS))
    close(F.normalize(text, dim=-1), expected["text_features"])


def test_a_folders_preprocessing_goes_along_and_comes_back(tmp_path: Path) -> None:
    write_run(tmp_path / "first", TINY)
    export_run(tmp_path / "first", to="openclip", output=tmp_path / "folder")
    path = tmp_path / "folder" / "open_clip_config.json"
    other: dict[str, Any] = {"interpolation": "bilinear", "resize_mode": "squash"}
    other |= {"mean": [0.5] * 3, "std": [0.25] * 3}
    change_json(path, preprocess_cfg=other)
    run = tmp_path / "run"
    towers = write_run(run, f"local-dir:{path.parent}", loss="siglip")
    export_run(run, to="openclip", output=tmp_path / "out")
    assert json.loads((tmp_path / "out" / path.name).read_text())["preprocess_cfg"] == other
    assert_same(tmp_path / "out", towers)
    again = create(f"local-dir:{tmp_path / 'out'}")  # and megabatch trains on from it
    torch.testing.assert_close(again.module.state_dict(), towers.module.state_dict())
    note, _ = export_run(run, to="huggingface", output=tmp_path / "clip")
    assert note.startswith("CLIPModel has no logit bias: the run's, ")
    same_pixels(towers, read(tmp_path / "clip")[1])
    change_json(path, preprocess_cfg={**other, "resize_mode": "longest"})
    with pytest.raises(UsageError, match="has resize_mode 'longest', which CLIPModel"):
        export_run(run, to="huggingface", output=tmp_path / "none")


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"vision_cfg": {"layers": [1, 1, 1, 1]}}, r"vision_cfg.layers \[1, 1, 1, 1\]"),
        (
            {"vision_cfg": {"timm_model_name": "test_vit", "timm_pool": "", "image_size": 160}},
            "vision_cfg.timm_model_name 'test_vit', vision_cfg.timm_pool ''",
        ),
        (
            {"text_cfg": {"act_kwargs": {"approximate": "tanh"}}},
            "text_cfg.act_kwargs {'approximate': 'tanh'}",
        ),
        ({}, "custom_text True, text_cfg.no_causal_mask True, text_cfg.pool_type 'last'"),
    ],
)
def test_what_clip_model_cannot_have_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], named: str
) -> None:
    name = changed(monkeypatch, changes) if changes else TINY_UNMASKED
    write_run(tmp_path / "run", name)
    with pytest.raises(UsageError, match=f"^--to huggingface: {name} has {named}, which CLIPModel"):
        export_run(tmp_path / "run", to="huggingface", output=tmp_path / "out")
    assert not (tmp_path / "out").exists()
