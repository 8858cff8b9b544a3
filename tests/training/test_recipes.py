"""Whole short runs of recipes: stopped half-way and continued they end in the same files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from megabatch.config.file import to_dict
from megabatch.models import ModelOptions, create
from megabatch.models.towers import tower_of
from megabatch.training import load_config, train
from tests.models.tiny import TINY
from tests.training.conftest import MakeConfig

RECIPES: dict[str, dict[str, Any]] = {
    "lamb, bf16, partly locked image": {
        **{"opt": "lamb", "ema_decay": 0.9, "lr": 2e-3},
        **{"precision": "bf16", "loss": "infonce", "infonce_margin": 0.1},
        **{"lock_image": True, "lock_image_unlocked_groups": 1},
    },
    "adafactor, locked text": {
        **{"opt": "adafactor", "loss": "siglip", "ema_decay": 0.5},
        **{"lr_scheduler": "wsd", "lr_cooldown": 3, "lock_text": True},
        **{"force_patch_dropout": 0.25, "force_context_length": 8},
    },
    "sgd, fp16": {"opt": "sgd", "loss": "dcl", "matryoshka_dims": (8, 16), "precision": "fp16"},
}


@pytest.mark.parametrize("name", RECIPES)
def test_a_run_continued_from_its_checkpoint_is_the_uninterrupted_one(
    name: str, make_config: MakeConfig, tmp_path: Path
) -> None:
    recipe = {"steps": 6, "checkpoint_every": 3, "keep_checkpoints": 9, **RECIPES[name]}
    straight, other = tmp_path / "straight", tmp_path / "other"
    assert train(make_config(straight, **recipe)) == 0
    # The other one's newest checkpoint is that of step 3, as if it had been killed after it.
    other.mkdir()
    (other / "checkpoints").mkdir()
    kept = other / "checkpoints/step-00000003"
    (straight / "checkpoints" / kept.name).rename(kept)
    (other / "config.toml").write_text((straight / "config.toml").read_text())
    assert train(make_config(other, resume=True, **recipe)) == 0
    files = ["model.safetensors"] + ["model-ema.safetensors"] * ("ema_decay" in recipe)
    for file in files:
        assert (straight / file).read_bytes() == (other / file).read_bytes(), file
    # Three steps changed the towers that are not locked as a whole, no others.
    early, late = (load_file(run / "model.safetensors") for run in (kept, straight))
    changed = {tower_of(n) for n in late if "logit" not in n and not torch.equal(late[n], early[n])}
    assert changed == {"image"} if "lock_text" in recipe else {"image", "text"}
    trained = load_file(straight / files[-1])
    config = load_config(straight / "config.toml")
    assert config == make_config(straight, torchcompile=False, **recipe)
    module = create(TINY, options=ModelOptions.of(to_dict(config))).module
    module.load_state_dict(trained)  # what evaluation does
