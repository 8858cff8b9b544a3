"""Files of weights, those that are read and those that are refused."""

from __future__ import annotations

import json
import os
from pathlib import Path

import open_clip
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from megabatch.errors import UsageError
from megabatch.models import ModelOptions, create
from tests.docs.pages import blocks
from tests.models.tiny import CONFIG, TINY


@pytest.fixture(scope="module")
def theirs() -> dict[str, Tensor]:
    torch.manual_seed(1)
    state: dict[str, Tensor] = open_clip.create_model(TINY).state_dict()
    return state


def assert_holds(module: nn.Module, state: dict[str, Tensor]) -> None:
    torch.testing.assert_close(module.state_dict(), state, rtol=0, atol=0)


def test_a_checkpoint_of_open_clips_trainer(theirs: dict[str, Tensor], tmp_path: Path) -> None:
    path = tmp_path / "epoch_32.pt"
    for prefix in ("", "module."):
        state = {prefix + name: value for name, value in theirs.items()}
        torch.save({"epoch": 3, "name": "x", "state_dict": state, "optimizer": {"state": {}}}, path)
        assert_holds(create(TINY, pretrained=path).module, theirs)


def test_a_folder_that_open_clip_saved(theirs: dict[str, Tensor], tmp_path: Path) -> None:
    """Like open_clip.push_to_hf_hub, without a tokenizer, since open_clip has its own."""
    config = {"model_cfg": json.loads(CONFIG.read_text()), "preprocess_cfg": {"size": 32}}
    (tmp_path / "open_clip_config.json").write_text(json.dumps(config))
    path = tmp_path / "open_clip_model.safetensors"
    save_file(theirs, path)
    towers = create(f"local-dir:{tmp_path}")
    assert_holds(towers.module, theirs)
    assert towers.embed_dim == 16
    assert towers.tokenizer("a text").shape == (1, 16)
    with pytest.raises(UsageError, match="has its own weights"):
        create(f"local-dir:{tmp_path}", pretrained=tmp_path)
    for given in (tmp_path, path):  # its activation and its pixels may be others than the name's
        with pytest.raises(UsageError, match=f"of its own; expected --model local-dir:{tmp_path}"):
            create(TINY, pretrained=given)
    path.unlink()  # without weights they are random
    assert not torch.equal(
        create(f"local-dir:{tmp_path}").module.visual.proj, theirs["visual.proj"]
    )
    (tmp_path / "open_clip_config.json").write_text("[]")
    with pytest.raises(UsageError, match=r"open_clip_config\.json cannot be used"):
        create(f"local-dir:{tmp_path}")


def test_a_folder_of_a_run(theirs: dict[str, Tensor], tmp_path: Path) -> None:
    save_file(theirs, tmp_path / "model.safetensors")
    assert_holds(create(TINY, pretrained=tmp_path).module, theirs)
    with pytest.raises(UsageError, match="does not hold the weights of glyph-small"):
        create("glyph-small", pretrained=tmp_path)
    state, path = create("glyph-small").module.state_dict(), tmp_path / "weights.pt"
    torch.save(state, path)
    assert_holds(create("glyph-small", pretrained=path).module, state)
    with pytest.raises(UsageError, match=f"--pretrained {path}: open_clip cannot build {TINY}"):
        create(TINY, pretrained=path)


def test_one_towers_weights_by_the_recipe(
    theirs: dict[str, Tensor], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    tower = {n.removeprefix("visual."): v for n, v in theirs.items() if n.startswith("visual.")}
    save_file(tower, "tower.safetensors")
    exec(blocks("docs/recipes.md", "python")[0].replace("ViT-B-32", TINY), {})
    found = create(TINY, pretrained="start.safetensors").module
    assert_holds(found.visual, tower)
    assert not torch.equal(found.token_embedding.weight, theirs["token_embedding.weight"])


def test_other_sizes_resize_the_positions(theirs: dict[str, Tensor], tmp_path: Path) -> None:
    path = tmp_path / "weights.safetensors"
    save_file(theirs, path)
    options = ModelOptions(
        force_image_size=64, force_context_length=8, force_patch_dropout=0.0, init_logit_scale=1.0
    )
    towers = create(TINY, pretrained=path, options=options)
    state = towers.module.state_dict()
    assert state["visual.positional_embedding"].shape == (1 + (64 // 8) ** 2, 16)
    assert state["positional_embedding"].shape == (8, 16)
    assert torch.equal(state["visual.proj"], theirs["visual.proj"])
    assert state["logit_scale"] == theirs["logit_scale"]  # a start is no override
    assert isinstance(towers.module.visual.patch_dropout, nn.Identity)
    assert towers.tokenizer("a text").shape == (1, 8)
    images = torch.zeros(2, 3, 64, 64)
    assert towers.module(images, towers.tokenizer(["a", "b"]))["image_features"].shape == (2, 16)


@pytest.mark.parametrize("name", [TINY, "glyph-small"])
def test_the_bias_of_a_sigmoid_loss(name: str, tmp_path: Path) -> None:
    without, with_bias = tmp_path / "clip.safetensors", tmp_path / "siglip.safetensors"
    state = create(name).module.state_dict()
    save_file(state, without)
    save_file({**state, "logit_bias": torch.tensor(-7.0)}, with_bias)
    siglip = ModelOptions.of({"loss": "siglip"})
    assert create(name, pretrained=without, options=siglip).module.logit_bias.item() == -10
    assert create(name, pretrained=with_bias, options=siglip).module.logit_bias.item() == -7
    assert create(name, pretrained=with_bias).module.logit_bias.item() == -7  # nothing is lost


def test_files_and_folders_that_are_refused(theirs: dict[str, Tensor], tmp_path: Path) -> None:
    path = tmp_path / "weights.pt"
    for given, missing in ((tmp_path, r"model\.safetensors"), (path, r"weights\.pt")):
        with pytest.raises(UsageError, match=f"there is no file .*{missing}"):
            create(TINY, pretrained=given)
    torch.save({"state_dict": {"a": torch.zeros(1)}, "args": tmp_path}, path)
    with pytest.raises(UsageError, match=r"weights\.pt cannot be used: it holds more than tensors"):
        create(TINY, pretrained=path)
    save_file(theirs, tmp_path / "half.safetensors")
    torch.save(theirs, tmp_path / "half.pt")
    torch.save(torch.zeros(2), path)
    for given in (path, tmp_path / "half.pt", tmp_path / "half.safetensors"):
        if given != path:
            os.truncate(given, 5000)
        with pytest.raises(UsageError, match=f"{given} cannot be used: "):
            create(TINY, pretrained=given)
