"""What is said of batch normalisation."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn

from megabatch.models import create
from megabatch.models.layers import lock, set_modes
from megabatch.training import TrainConfig
from megabatch.training.batch_norm import batch_norms, explanation
from megabatch.training.world import World

ALONE = World(torch.device("cpu"))
FOUR = World(torch.device("cuda"), 0, 4)
CONFIG = TrainConfig(model="RN50", global_batch_size=4096, micro_batch_size=512)


def test_what_is_told() -> None:
    module = nn.Sequential(nn.BatchNorm2d(8), nn.Sequential(nn.BatchNorm2d(8), nn.BatchNorm1d(16)))
    assert "(3 layers). It normalises over 512 pairs at a time: --micro-batch-size" in explanation(
        module, CONFIG, ALONE
    )
    several = explanation(module, replace(CONFIG, micro_batch_size=2048), FOUR)
    assert "1,024 pairs at a time on each process alone, and keeps rank 0's" in several
    assert explanation(create("glyph-small").module, CONFIG, ALONE) == ""


def test_a_locked_tower_normalises_by_what_it_remembers() -> None:
    module = create("RN50").module
    assert len(batch_norms(module)) == 55
    lock(module, "image")
    assert not batch_norms(set_modes(module))
