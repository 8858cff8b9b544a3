"""One tower out of a file, and the other as it was."""

from __future__ import annotations

import json
from pathlib import Path

import open_clip
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from megabatch.errors import UsageError
from megabatch.models import ModelOptions, create
from megabatch.models.layers import Tower
from megabatch.models.tower_weights import load_tower
from tests.models.tiny import CONFIG, TINY


def state(seed: int) -> dict[str, Tensor]:
    torch.manual_seed(seed)
    found: dict[str, Tensor] = create(TINY).module.state_dict()
    return found


def split(names: set[str]) -> tuple[set[str], set[str]]:
    image = {name for name in names if name.startswith("visual.")}
    return image, names - image - {"logit_scale"}


def changed(module: nn.Module, before: dict[str, Tensor]) -> set[str]:
    return {n for n, v in module.state_dict().items() if not torch.equal(v, before[n])}


@pytest.mark.parametrize("tower", ["image", "text"])
@pytest.mark.parametrize("alone", [True, False])
def test_a_whole_models_file_or_a_towers_own(tower: Tower, alone: bool, tmp_path: Path) -> None:
    path = tmp_path / "weights.safetensors"
    given = state(1)
    image, text = split(set(given))
    if alone:
        names = image if tower == "image" else text
        given = {name: given[name] for name in names}
        save_file({n.removeprefix("visual."): v for n, v in given.items()}, path)
    else:
        save_file(given, path)
    before = state(2)
    module = create(TINY).module
    module.load_state_dict(before)
    load_tower(module, tower, path)
    mine = image if tower == "image" else text
    assert all(torch.equal(module.state_dict()[name], given[name]) for name in mine)
    random = {name for name in mine if given[name].dim() > 1}  # gains start alike everywhere
    assert random <= changed(module, before) <= mine


def test_a_text_tower_from_a_model_that_keeps_it_apart_and_back(tmp_path: Path) -> None:
    config = json.loads(CONFIG.read_text())
    torch.manual_seed(1)
    apart = open_clip.CustomTextCLIP(**config)
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
    torch.manual_seed(1)
    given, module = (open_clip.CLIP(embed_dim=16, vision_cfg=vision, text_cfg=text) for _ in "ab")
    trunk = {**given.visual.trunk.state_dict(), "head.weight": torch.zeros(10, 3)}
    save_file(trunk, tmp_path / "timm.safetensors")
    before = {name: value.clone() for name, value in module.state_dict().items()}
    load_tower(module, "image", tmp_path / "timm.safetensors")
    names = changed(module, before)
    assert "visual.trunk.blocks.0.attn.qkv.weight" in names
    assert all(name.startswith("visual.trunk.") for name in names)


def test_positions_are_resized(tmp_path: Path) -> None:
    save_file(state(1), tmp_path / "weights.safetensors")
    options = ModelOptions(force_image_size=64, force_context_length=8)
    module = create(TINY, options=options).module
    for tower in ("image", "text"):
        load_tower(module, tower, tmp_path / "weights.safetensors")  # type: ignore[arg-type]
    assert torch.equal(module.visual.proj, state(1)["visual.proj"])
    assert module.visual.positional_embedding.shape == (65, 16)


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
    with pytest.raises(UsageError, match="there is no file"):
        load_tower(create(TINY).module, "text", tmp_path / "absent.pt")
