"""Layers have numbers, and towers can be locked."""

from __future__ import annotations

import open_clip
import pytest
from torch import nn

from megabatch.errors import UsageError
from megabatch.models import create
from megabatch.models.layers import (
    Tower,
    layer_ids,
    lock,
    locked_towers,
    set_modes,
    tower_parameters,
)
from tests.models.tiny import TINY


@pytest.mark.parametrize(
    ("vision", "expected"),
    [
        (
            {"layers": 3, "width": 16, "head_width": 8, "patch_size": 8, "image_size": 16},
            {
                "visual.conv1.weight": (0, 4),
                "visual.positional_embedding": (0, 4),
                "visual.ln_pre.bias": (0, 4),
                "visual.transformer.resblocks.2.attn.in_proj_weight": (3, 4),
                "visual.ln_post.weight": (4, 4),
                "visual.proj": (4, 4),
            },
        ),
        (
            {"layers": [1, 1, 1, 1], "width": 8, "image_size": 32},
            {
                "visual.conv3.weight": (0, 5),
                "visual.bn1.weight": (0, 5),
                "visual.layer1.0.conv1.weight": (1, 5),
                "visual.layer4.0.downsample.0.weight": (4, 5),
                "visual.attnpool.positional_embedding": (5, 5),
                "visual.attnpool.c_proj.weight": (5, 5),
            },
        ),
        (
            {"timm_model_name": "test_vit", "timm_pool": "", "timm_proj": "linear"},
            {
                "visual.trunk.patch_embed.proj.weight": (0, 8),
                "visual.trunk.blocks.0.attn.qkv.weight": (1, 8),
                "visual.head.proj.weight": (8, 8),
            },
        ),
    ],
)
def test_layers_of_open_clips_towers(
    vision: dict[str, object], expected: dict[str, tuple[int, int]]
) -> None:
    text = {"context_length": 8, "vocab_size": 60, "width": 16, "heads": 2, "layers": 2}
    model = open_clip.CLIP(embed_dim=16, vision_cfg=vision, text_cfg=text)
    ids = layer_ids(model)
    assert ids.keys() == {name for name, _ in model.named_parameters()} - {"logit_scale"}
    if "timm_model_name" in vision:  # how many layers is the library's matter
        last = ids["visual.head.proj.weight"][1]
        expected = {name: (min(layer, last), last) for name, (layer, _) in expected.items()}
    assert {name: ids[name] for name in expected} == expected
    assert ids["token_embedding.weight"] == (0, 3)
    assert ids["transformer.resblocks.1.ln_2.weight"] == (2, 3)
    assert ids["text_projection"] == ids["ln_final.weight"] == (3, 3)


def test_a_tower_without_numbers_has_no_layers() -> None:
    assert layer_ids(create("glyph-small").module) == {}
    assert layer_ids(nn.Linear(2, 2)) == {}


@pytest.mark.parametrize("model", [TINY, "glyph-small"])
@pytest.mark.parametrize(("tower", "other"), [("image", "text"), ("text", "image")])
def test_a_locked_tower_and_nothing_else(model: str, tower: Tower, other: Tower) -> None:
    module = create(model).module
    lock(module, tower)
    towers = tower_parameters(module)
    names = {name for name, _ in module.named_parameters()} - {"logit_scale"}
    assert towers["image"].keys() | towers["text"].keys() == names
    assert not any(p.requires_grad for p in towers[tower].values())
    assert all(p.requires_grad for p in towers[other].values())
    assert module.logit_scale.requires_grad
    assert locked_towers(module) == {tower}


def test_the_last_groups_stay_unlocked_as_open_clip_counts_them() -> None:
    module = create(TINY).module
    lock(module, "image", unlocked=1)
    unlocked = {n for n, p in tower_parameters(module)["image"].items() if p.requires_grad}
    assert unlocked == {"visual.proj"}
    lock(module, "text", unlocked=2)
    unlocked = {n for n, p in tower_parameters(module)["text"].items() if p.requires_grad}
    assert {"text_projection", "ln_final.weight"} <= unlocked
    assert "token_embedding.weight" not in unlocked
    assert locked_towers(module) == set()


def test_only_wholly_locked_towers_are_in_evaluation_mode() -> None:
    module = create(TINY).module.eval()
    assert all(part.training for part in set_modes(module).modules())
    lock(module, "text", unlocked=1)
    assert all(part.training for part in set_modes(module).modules())
    lock(module, "text")
    set_modes(module)
    assert module.training
    assert module.visual.training
    assert not any(part.training for part in module.transformer.modules())
    lock(module, "image")
    assert not any(part.training for part in set_modes(module).visual.modules())


def test_a_model_that_cannot_be_locked_says_so() -> None:
    with pytest.raises(UsageError, match="--lock-image: expected a model whose first tower is"):
        lock(nn.ModuleDict({"images": nn.Linear(2, 2)}), "image")
    with pytest.raises(UsageError, match="nothing of the image tower stays locked"):
        lock(create(TINY).module, "image", unlocked=99)
    with pytest.raises(UsageError, match="--lock-text: this model's towers are locked as a whole"):
        lock(create("glyph-small").module, "text", unlocked=1)
