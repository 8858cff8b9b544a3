"""OpenCLIP's ViTs as transformers' `CLIPModel` loads them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import open_clip
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megabatch.errors import UsageError
from megabatch.export import export_run
from megabatch.models import create
from tests.export.runs import change_json, pictures, reports, write_run
from tests.models.tiny import TINY, TINY_UNMASKED

transformers: Any = pytest.importorskip("transformers")

TEXTS = [
    "a photo of a cat",
    "",
    "It's 2 o'clock -- isn't it?",
    "Ünïcode 北京 🙂",
    "many words " * 20,
]


def assert_equal(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=0)


def changed(monkeypatch: pytest.MonkeyPatch, changes: dict[str, dict[str, Any]]) -> str:
    """The name of a tiny architecture with some settings changed."""
    config = open_clip.get_model_config(TINY)
    for part, values in changes.items():
        (config if part == "model" else config[part]).update(values)
    monkeypatch.setitem(open_clip.factory._MODEL_CONFIGS, "changed", config)
    return "changed"


def read(folder: Path) -> tuple[Any, Any]:
    """The model and its processor, with nothing reported on the weights."""
    with reports() as logged:
        model = transformers.CLIPModel.from_pretrained(folder)
        processor = transformers.CLIPProcessor.from_pretrained(folder)
    assert not [line for line in logged if "LOAD REPORT" in line or "newly initialized" in line]
    return model, processor


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
    pixels = processor(images=pictures(), return_tensors="pt")["pixel_values"]
    ours = torch.stack([towers.eval_transform(picture) for picture in pictures()])
    normalised = towers.module.visual.pixel_normalization(ours)
    torch.testing.assert_close(pixels, normalised, atol=0.1, rtol=0)  # filters round differently
    with torch.no_grad():
        expected = towers.module(ours, tokens)
        found = model(**texts, pixel_values=normalised)
    assert_equal(found.image_embeds, expected["image_features"])
    assert_equal(found.text_embeds, expected["text_features"])
    assert torch.equal(model.logit_scale, towers.module.logit_scale)
    again = create(f"hf:{tmp_path / 'out'}")  # and megabatch trains on from it
    text = again.module.eval().encode_text(again.tokenizer(TEXTS))
    assert_equal(F.normalize(text, dim=-1), expected["text_features"])


def test_preprocessing_and_a_bias_of_a_folder(tmp_path: Path) -> None:
    write_run(tmp_path / "first", TINY)
    export_run(tmp_path / "first", to="openclip", output=tmp_path / "folder")
    other = {"mean": [0.5] * 3, "std": [0.25] * 3}
    other |= {"interpolation": "bilinear", "resize_mode": "squash"}
    path = tmp_path / "folder" / "open_clip_config.json"
    change_json(path, preprocess_cfg=other)
    towers = write_run(tmp_path / "run", f"local-dir:{tmp_path / 'folder'}", loss="siglip")
    note, _ = export_run(tmp_path / "run", to="huggingface", output=tmp_path / "out")
    assert note.startswith("CLIPModel has no logit bias: the run's, ")
    _, processor = read(tmp_path / "out")
    pixels = processor(images=pictures(), return_tensors="pt")["pixel_values"]
    ours = torch.stack([towers.eval_transform(picture) for picture in pictures()])
    normalised = towers.module.visual.pixel_normalization(ours)
    torch.testing.assert_close(pixels, normalised, atol=0.1, rtol=0)
    change_json(path, preprocess_cfg={**other, "resize_mode": "longest"})
    with pytest.raises(UsageError, match="has resize_mode 'longest', which CLIPModel"):
        export_run(tmp_path / "run", to="huggingface", output=tmp_path / "none")


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
