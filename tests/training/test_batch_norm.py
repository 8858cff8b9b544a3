"""What is said of batch normalisation; how it computes is gradient caching's (test_state.py)."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn

from megabatch.models import create
from megabatch.models.towers import lock, set_modes
from megabatch.training import TrainConfig
from megabatch.training.batch_norm import batch_norms, explanation
from megabatch.training.world import World

CONFIG = TrainConfig(model="RN50", global_batch_size=4096, micro_batch_size=512)


def test_what_is_told() -> None:
    module, alone = nn.Sequential(nn.BatchNorm2d(8), nn.BatchNorm1d(16)), World(torch.device("cpu"))
    assert explanation(module, CONFIG, alone) == (
        "warning: RN50 has batch normalisation (2 layers). It normalises over 512 pairs at a time: "
        "--micro-batch-size changes what is learnt"
    )
    four = World(torch.device("cuda"), 0, 4)
    assert "1,024 pairs at a time on each process alone, and keeps rank 0's" in explanation(
        module, replace(CONFIG, micro_batch_size=2048), four
    )
    assert explanation(create("glyph-small").module, CONFIG, alone) == ""


def test_a_locked_tower_normalises_by_what_it_remembers() -> None:
    module = create("RN50").module
    assert len(batch_norms(module)) == 55
    lock(module, "image")
    assert not batch_norms(set_modes(module))
