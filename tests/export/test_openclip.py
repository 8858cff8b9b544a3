"""OpenCLIP's models as OpenCLIP loads them, and its ViTs as transformers' `CLIPModel`."""

from __future__ import annotations

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
from tests.export.runs import assert_near, change_json, pictures, transformers_model, write_run
from tests.models.tiny import TINY, TINY_UNMASKED, changed
from tests.models.tiny_bert import save_tiny_bert

transformers: Any = pytest.importorskip("transformers")

TEXTS = ["a photo", "", "It's 2 o'clock -- isn't it?", "Ünïcode 北京 🙂", "many words " * 20]
TIMM = {"timm_model_name": "test_vit", "timm_pool": "", "timm_proj": "linear", "image_size": 160}


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
        expected, (image, text, *_) = towers.module(ours, tokens), model(theirs, tokens)
    assert_near(image, expected["image_features"])
    assert_near(text, expected["text_features"])
    assert torch.equal(model.logit_scale, towers.module.logit_scale)
    return model


SETTINGS = {"loss": "siglip", "force_patch_dropout": 0.25, "force_image_size": 16}


@pytest.mark.parametrize(
    ("name", "settings"),
    [(TINY, {}), (TINY_UNMASKED, {}), (TINY, {**SETTINGS, "force_context_length": 12})],
)
def test_open_clip_gives_the_runs_embeddings(
    tmp_path: Path, name: str, settings: dict[str, Any]
) -> None:
    towers = write_run(tmp_path / "run", name, **settings)
    assert export_run(tmp_path / "run", to="openclip", output=tmp_path / "out") == []
    files = {path.name for path in (tmp_path / "out").iterdir()}
    assert files == {"README.md", "open_clip_config.json", "open_clip_model.safetensors"}
    model = assert_same(tmp_path / "out", towers)
    torch.testing.assert_close(model.state_dict(), towers.module.state_dict())
    stored = json.loads((tmp_path / "out" / "open_clip_config.json").read_text())
    assert not settings or stored["model_cfg"]["vision_cfg"]["patch_dropout"] == 0.25


def test_a_size_that_open_clip_cannot_load_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = changed(monkeypatch, {"vision_cfg": TIMM})
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


def same_pixels(towers: Towers, folder: Path) -> torch.Tensor:
    """The pictures, normalised by the model; the folder's processor gives nearly the same."""
    processor = transformers.AutoImageProcessor.from_pretrained(folder)
    pixels = processor(pictures(), return_tensors="pt")["pixel_values"]
    ours = torch.stack([towers.eval_transform(picture) for picture in pictures()])
    normalised: torch.Tensor = towers.module.visual.pixel_normalization(ours)
    torch.testing.assert_close(pixels, normalised, atol=0.1, rtol=0)  # filters round differently
    return normalised


@pytest.mark.parametrize("quick", [False, True])
def test_transformers_gives_the_runs_embeddings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quick: bool
) -> None:
    shape = {"layers": 2, "mlp_ratio": 3.0}
    towers_cfg = {"vision_cfg": shape, "text_cfg": {**shape, "heads": 4}}
    name = changed(monkeypatch, {"model": {"quick_gelu": quick}, **towers_cfg})
    towers = write_run(tmp_path / "run", name, force_image_size=16, force_context_length=12)
    [note] = export_run(tmp_path / "run", to="huggingface", output=tmp_path / "out")
    assert note.startswith("OpenCLIP's tokenizer also repairs texts")
    model = transformers_model(tmp_path / "out")
    tokenizer = transformers.CLIPProcessor.from_pretrained(tmp_path / "out").tokenizer
    texts = tokenizer(TEXTS, padding="max_length", truncation=True, return_tensors="pt")
    tokens, mask = towers.tokenizer(TEXTS), texts["attention_mask"].bool()
    assert tokens.shape == texts["input_ids"].shape == (5, 12)
    assert torch.equal(mask, torch.arange(12) <= tokens.argmax(1, keepdim=True))
    assert torch.equal(texts["input_ids"][mask], tokens[mask])
    normalised = same_pixels(towers, tmp_path / "out")
    with torch.no_grad():
        expected = towers.module(normalised, tokens)
        found = model(**texts, pixel_values=normalised)
    assert_near(found.image_embeds, expected["image_features"])
    assert_near(found.text_embeds, expected["text_features"])
    assert torch.equal(model.logit_scale, towers.module.logit_scale)
    again = create(f"hf:{tmp_path / 'out'}")  # and megabatch trains on from it
    text = again.module.eval().encode_text(again.tokenizer(TEXTS))
    assert_near(F.normalize(text, dim=-1), expected["text_features"])


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
    same_pixels(towers, tmp_path / "clip")
    change_json(path, preprocess_cfg={**other, "resize_mode": "longest"})
    with pytest.raises(UsageError, match="has resize_mode 'longest', which CLIPModel"):
        export_run(run, to="huggingface", output=tmp_path / "none")


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"vision_cfg": {"layers": [1, 1, 1, 1]}}, r"vision_cfg.layers \[1, 1, 1, 1\]"),
        ({"vision_cfg": TIMM}, "vision_cfg.timm_model_name 'test_vit', vision_cfg.timm_pool ''"),
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
