"""Whole short runs of recipes: stopped half-way and continued they end in the same files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from megabatch.config.file import to_dict
from megabatch.models import ModelOptions, create
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
    (straight / "checkpoints/step-00000003").rename(other / "checkpoints/step-00000003")
    (other / "config.toml").write_text((straight / "config.toml").read_text())
    assert train(make_config(other, resume=True, **recipe)) == 0
    files = ["model.safetensors"] + ["model-ema.safetensors"] * ("ema_decay" in recipe)
    for file in files:
        assert (straight / file).read_bytes() == (other / file).read_bytes(), file
    trained = load_file(straight / files[-1])
    config = load_config(straight / "config.toml")
    assert config == make_config(straight, torchcompile=False, **recipe)
    module = create(TINY, options=ModelOptions.of(to_dict(config))).module
    module.load_state_dict(trained)  # what evaluation does


def test_a_locked_tower_leaves_a_run_as_it_came(make_config: MakeConfig, tmp_path: Path) -> None:
    path = tmp_path / "start.safetensors"
    torch.manual_seed(7)
    start = create(TINY).module.state_dict()
    save_file(start, path)
    changes = {"lock_image": True, "pretrained": path, "steps": 3}
    assert train(make_config(tmp_path / "run", **changes)) == 0
    after = load_file(tmp_path / "run" / "model.safetensors")
    changed = {name for name, value in after.items() if not torch.equal(value, start[name])}
    assert changed
    assert not any(name.startswith("visual.") for name in changed)
