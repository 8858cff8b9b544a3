"""Files of weights of a model or of one tower, those that are read and those that are refused."""

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
from megabatch.models import ModelOptions, create, weights
from megabatch.models.towers import Tower, tower_of
from megabatch.models.weights import load_tower
from tests.models.tiny import CONFIG, TINY


@pytest.fixture(scope="module")
def theirs() -> dict[str, Tensor]:
    torch.manual_seed(1)
    state: dict[str, Tensor] = open_clip.create_model(TINY).state_dict()
    return state


def assert_holds(module: nn.Module, state: dict[str, Tensor]) -> None:
    found = module.state_dict()
    assert found.keys() == state.keys()
    assert all(torch.equal(found[name], value) for name, value in state.items())


@pytest.mark.parametrize("prefix", ["", "module."])
def test_a_checkpoint_of_open_clips_trainer(
    prefix: str, theirs: dict[str, Tensor], tmp_path: Path
) -> None:
    path = tmp_path / "epoch_32.pt"
    state = {prefix + name: value for name, value in theirs.items()}
    torch.save({"epoch": 32, "name": "x", "state_dict": state, "optimizer": {"state": {}}}, path)
    assert weights.load(path).keys() == theirs.keys()
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
    (tmp_path / "open_clip_config.json").write_text("[]")
    with pytest.raises(UsageError, match=r"open_clip_config\.json cannot be used"):
        create(f"local-dir:{tmp_path}")


def test_a_folder_of_a_run(theirs: dict[str, Tensor], tmp_path: Path) -> None:
    save_file(theirs, tmp_path / "model.safetensors")
    (tmp_path / "config.toml").write_text("")
    assert_holds(create(TINY, pretrained=tmp_path).module, theirs)
    with pytest.raises(UsageError, match="does not hold the weights of glyph-small"):
        create("glyph-small", pretrained=tmp_path)
    state = create("glyph-small").module.state_dict()
    torch.save(state, tmp_path / "weights.pt")
    assert_holds(create("glyph-small", pretrained=tmp_path / "weights.pt").module, state)


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
    for tower in ("image", "text"):
        load_tower(towers.module, tower, path)  # type: ignore[arg-type]
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


class Anything:
    """An object that is not a tensor."""


def test_files_and_folders_that_are_refused(theirs: dict[str, Tensor], tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"there is no file .*model\.safetensors"):
        create(TINY, pretrained=tmp_path)
    path = tmp_path / "weights.pt"
    torch.save({"state_dict": {"a": torch.zeros(1)}, "args": Anything()}, path)
    with pytest.raises(UsageError, match=r"weights\.pt holds more than tensors"):
        create(TINY, pretrained=path)
    torch.save(torch.zeros(2), path)
    with pytest.raises(UsageError, match="no tensors that can be read"):
        create(TINY, pretrained=path)
    torch.save(theirs, path)
    os.truncate(path, 5000)
    with pytest.raises(UsageError, match=r"weights\.pt has no tensors that can be read"):
        create(TINY, pretrained=path)


# One tower's weights.


def state(seed: int) -> dict[str, Tensor]:
    torch.manual_seed(seed)
    found: dict[str, Tensor] = create(TINY).module.state_dict()
    return found


def changed(module: nn.Module, before: dict[str, Tensor]) -> set[str]:
    return {n for n, v in module.state_dict().items() if not torch.equal(v, before[n])}


@pytest.mark.parametrize("tower", ["image", "text"])
@pytest.mark.parametrize("alone", [True, False])
def test_a_whole_models_file_or_a_towers_own(tower: Tower, alone: bool, tmp_path: Path) -> None:
    given, before = state(1), state(2)
    own = {n for n in given if n != "logit_scale" and tower_of(n) == tower}
    saved = {n.removeprefix("visual."): given[n] for n in own} if alone else given
    save_file(saved, tmp_path / "weights.safetensors")
    module = create(TINY).module
    module.load_state_dict(before)
    load_tower(module, tower, tmp_path / "weights.safetensors")
    assert all(torch.equal(module.state_dict()[name], given[name]) for name in own)
    random = {name for name in own if given[name].dim() > 1}  # gains start alike everywhere
    assert random <= changed(module, before) <= own


def test_a_text_tower_from_a_model_that_keeps_it_apart_and_back(tmp_path: Path) -> None:
    apart = open_clip.CustomTextCLIP(**json.loads(CONFIG.read_text()))
    save_file(apart.state_dict(), tmp_path / "apart.safetensors")
    module = create(TINY).module
    load_tower(module, "text", tmp_path / "apart.safetensors")
    assert torch.equal(module.token_embedding.weight, apart.text.token_embedding.weight)
    assert torch.equal(module.text_projection, apart.text.text_projection)
    save_file(state(3), tmp_path / "together.safetensors")
    load_tower(apart, "text", tmp_path / "together.safetensors")
    assert torch.equal(apart.text.token_embedding.weight, state(3)["token_embedding.weight"])


def test_a_timm_trunk_leaves_the_projection(tmp_path: Path) -> None:
    vision = {"timm_model_name": "test_vit", "timm_pool": "", "timm_proj": "linear"}
    text = {"context_length": 8, "vocab_size": 60, "width": 16, "heads": 2, "layers": 1}
    given, module = (open_clip.CLIP(embed_dim=16, vision_cfg=vision, text_cfg=text) for _ in "ab")
    trunk = {**given.visual.trunk.state_dict(), "head.weight": torch.zeros(10, 3)}
    save_file(trunk, tmp_path / "timm.safetensors")
    before = {name: value.clone() for name, value in module.state_dict().items()}
    load_tower(module, "image", tmp_path / "timm.safetensors")
    names = changed(module, before)
    assert "visual.trunk.blocks.0.attn.qkv.weight" in names
    assert all(name.startswith("visual.trunk.") for name in names)


def test_what_does_not_fit_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "weights.safetensors"
    given = state(1)
    del given["visual.proj"]
    save_file(given, path)
    with pytest.raises(UsageError, match=r"lacks 1 of the .*visual\.proj"):
        load_tower(create(TINY).module, "image", path)
    given["visual.proj"] = torch.zeros(3, 3)
    save_file(given, path)
    with pytest.raises(UsageError, match=r"is of another tower: .*size mismatch"):
        load_tower(create(TINY).module, "image", path)
