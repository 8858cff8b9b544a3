"""Layers have numbers, and towers can be locked."""

from __future__ import annotations

import pytest
from torch import nn

from megabatch.errors import UsageError
from megabatch.models import create
from megabatch.models.towers import Tower, lock, locked_towers, set_modes, tower_parameters
from tests.models.tiny import TINY


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
