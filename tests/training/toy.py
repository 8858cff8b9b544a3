"""Two towers of a few blocks, in float64, and batches for them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megabatch.config.objective import create_objective
from megabatch.data import Batch
from megabatch.models import towers as models
from megabatch.models.padding import Lengths
from megabatch.training import TrainConfig, trainer
from megabatch.training.trainer import Trainer
from megabatch.training.world import World

WIDTH = 6
CPU = torch.device("cpu")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(self.norm(x)).tanh()


class Tower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.Sequential(Block(), Block(), Block())
        self.register_buffer("shift", torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return F.normalize(self.blocks(self.first(x) + self.shift), dim=-1)


class Toy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.visual, self.text = Tower(), Tower()
        self.logit_scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, image: Tensor | None, text: Tensor | None) -> dict[str, Tensor | None]:
        return {
            "image_features": None if image is None else self.visual(image),
            "text_features": None if text is None else self.text(text),
            "logit_scale": self.logit_scale.exp(),
        }


def toy() -> Toy:
    torch.manual_seed(0)
    return Toy().double()


def config_of(**changes: Any) -> TrainConfig:
    settings = {
        "micro_batch_size": 2,
        "precision": "fp32",
        "lr": 0.05,
        "warmup": 2,
        "device": "cpu",
    }
    return TrainConfig(output=Path("unused"), **{**settings, **changes})


def batch_of(seed: int, size: int = 8) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    images, texts = (
        torch.randn(size, WIDTH, generator=generator, dtype=torch.float64) for _ in range(2)
    )
    return Batch(images, texts, torch.arange(size))


def share_of(batch: Batch, sizes: list[int], rank: int) -> Batch:
    parts = (t.split(sizes)[rank] for t in (batch.images, batch.texts, batch.indices))
    return Batch(*parts)


def trainer_of(
    config: TrainConfig,
    world: World | None = None,
    steps: int = 10,
    module: nn.Module | None = None,
    lengths: Mapping[models.Tower, Lengths] | None = None,
) -> Trainer:
    """A trainer of all ranks or, without a world, of this process alone whatever group it is in."""
    before = trainer.create_objective
    if world is None:
        trainer.create_objective = lambda config: create_objective(config, group="local")
    try:
        return Trainer(config, toy() if module is None else module, CPU, steps, world, lengths)
    finally:
        trainer.create_objective = before
