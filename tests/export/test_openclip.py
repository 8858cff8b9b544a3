"""Models as OpenCLIP loads them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import open_clip
import pytest
import torch

from megabatch.errors import UsageError
from megabatch.export import export_run
from megabatch.models import Towers, create
from megabatch.training.checkpoint import save_tensors
from tests.export.runs import change_json, pictures, write_run
from tests.models.tiny import TINY, TINY_UNMASKED
from tests.models.tiny_bert import save_tiny_bert

TEXTS = ["a photo of a cat", "", "many words " * 20]


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


def test_the_weights_also_load_by_name(tmp_path: Path) -> None:
    towers = write_run(tmp_path / "run", TINY)
    export_run(tmp_path / "run", to="openclip", output=tmp_path / "out")
    file = tmp_path / "out" / "open_clip_model.safetensors"
    model, *_ = open_clip.create_model_and_transforms(TINY, pretrained=str(file))
    for key, value in model.state_dict().items():
        assert torch.equal(value, towers.module.state_dict()[key]), key


def test_the_runs_sizes_and_bias_go_along(tmp_path: Path) -> None:
    changes: dict[str, Any] = {"force_image_size": 16, "force_context_length": 12}
    towers = write_run(tmp_path / "run", TINY, loss="siglip", force_patch_dropout=0.25, **changes)
    export_run(tmp_path / "run", to="openclip", output=tmp_path / "out")
    model = assert_same(tmp_path / "out", towers)
    assert torch.equal(model.logit_bias, towers.module.logit_bias)
    stored = json.loads((tmp_path / "out" / "open_clip_config.json").read_text())
    assert stored["model_cfg"]["vision_cfg"]["patch_dropout"] == 0.25


def test_a_size_that_open_clip_cannot_load_is_refused(tmp_path: Path) -> None:
    text = {"context_length": 8, "vocab_size": 60, "width": 16, "heads": 2, "layers": 1}
    vision = {"timm_model_name": "test_vit", "timm_pool": "", "timm_proj": "linear"}
    model = {"embed_dim": 16, "vision_cfg": {**vision, "image_size": 160}, "text_cfg": text}
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "open_clip_config.json").write_text(json.dumps({"model_cfg": model}))
    save_tensors(open_clip.CLIP(**model).state_dict(), folder / "open_clip_model.safetensors")
    write_run(tmp_path / "own", f"local-dir:{folder}", force_image_size=160)
    export_run(tmp_path / "own", to="openclip", output=tmp_path / "out")
    write_run(tmp_path / "other", f"local-dir:{folder}", force_image_size=96)
    with pytest.raises(
        UsageError, match=r"with --force-image-size 96, but OpenCLIP builds .* own size, 160"
    ):
        export_run(tmp_path / "other", to="openclip", output=tmp_path / "none")
    assert not (tmp_path / "none").exists()


def test_a_folders_preprocessing_goes_along_and_comes_back(tmp_path: Path) -> None:
    write_run(tmp_path / "first", TINY)
    export_run(tmp_path / "first", to="openclip", output=tmp_path / "folder")
    path = tmp_path / "folder" / "open_clip_config.json"
    other = {"mean": [0.5] * 3, "std": [0.25] * 3}
    other |= {"interpolation": "bilinear", "resize_mode": "squash"}
    change_json(path, preprocess_cfg=other)
    towers = write_run(tmp_path / "second", f"local-dir:{tmp_path / 'folder'}")
    export_run(tmp_path / "second", to="openclip", output=tmp_path / "out")
    written = json.loads((tmp_path / "out" / "open_clip_config.json").read_text())
    assert written["preprocess_cfg"] == other
    assert_same(tmp_path / "out", towers)
    again = create(f"local-dir:{tmp_path / 'out'}")  # and megabatch trains on from it
    for key, value in again.module.state_dict().items():
        assert torch.equal(value, towers.module.state_dict()[key]), key


def test_a_hugging_face_text_tower_takes_its_tokenizer_along(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoder = str(save_tiny_bert(tmp_path / "bert"))
    config = open_clip.get_model_config(TINY)
    text = {"hf_model_name": encoder, "hf_tokenizer_name": encoder, "context_length": 12}
    config["text_cfg"] = {**text, "hf_proj_type": "linear", "hf_pooler_type": "mean_pooler"}
    monkeypatch.setitem(open_clip.factory._MODEL_CONFIGS, "tiny-bert", config)
    towers = write_run(tmp_path / "run", "tiny-bert")
    [note] = export_run(tmp_path / "run", to="openclip", output=tmp_path / "out")
    assert note == f"OpenCLIP reads the configuration of {encoder} from the hub or its local cache"
    assert_same(tmp_path / "out", towers)
