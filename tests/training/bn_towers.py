"""Towers with batch normalisation, trained by several processes and by one with all rows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.nn.functional import all_reduce

from megabatch.data import Batch
from megabatch.training import TrainConfig, batch_norm
from megabatch.training.trainer import Trainer
from megabatch.training.world import World
from tests.training.synthetic import CONFIG, batch_of

MICRO, PER_RANK, STEPS = 4, 12, 4


class BnTowers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.visual = nn.Sequential(
            nn.Conv2d(1, 8, 5, stride=4),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.Conv2d(8, 8, 3),
            nn.BatchNorm2d(8),
            nn.Flatten(),
            nn.Linear(8 * 5 * 5, 16),
        )
        self.text = nn.Sequential(nn.EmbeddingBag(16_384, 16), nn.BatchNorm1d(16))
        self.logit_scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, image: Tensor | None, text: Tensor | None) -> dict[str, Tensor | None]:
        return {
            "image_features": None
            if image is None
            else F.normalize(self.visual(image.float() / 255), dim=-1),
            "text_features": None if text is None else F.normalize(self.text(text), dim=-1),
            "logit_scale": self.logit_scale.exp(),
        }


class PlainSync(nn.BatchNorm2d):
    """What torch.nn.SyncBatchNorm computes, which it does on GPUs only; of equal shares."""

    def _check_input_dim(self, input: Tensor) -> None:
        pass

    def forward(self, input: Tensor) -> Tensor:
        axes = [axis for axis in range(input.ndim) if axis != 1]
        count = input.numel() // input.shape[1] * dist.get_world_size()
        mean = all_reduce(input.sum(axes)) / count
        shape = [-1 if axis == 1 else 1 for axis in range(input.ndim)]
        centred = input - mean.view(shape)
        variance = all_reduce(centred.square().sum(axes)) / count
        if self.track_running_stats:
            with torch.no_grad():
                self.running_mean.lerp_(mean, self.momentum)
                self.running_var.lerp_(variance * count / (count - 1), self.momentum)
                self.num_batches_tracked += 1
        normal = centred * (variance + self.eps).rsqrt().view(shape)
        return normal * self.weight.view(shape) + self.bias.view(shape)


def plain_sync(module: nn.Module, world: World) -> nn.Module:
    for name, child in module.named_children():
        if isinstance(child, nn.modules.batchnorm._BatchNorm):
            new = PlainSync(child.num_features)
            new.load_state_dict(child.state_dict())
            setattr(module, name, new)
        else:
            plain_sync(child, world)
    return module


def config_of(size: int, micro: int, **changes: Any) -> TrainConfig:
    return replace(CONFIG, global_batch_size=PER_RANK * size, micro_batch_size=micro, **changes)


def trained(config: TrainConfig, world: World, rows: Tensor) -> tuple[list[float], Trainer]:
    torch.manual_seed(0)
    trainer = Trainer(config, BnTowers(), world.device, STEPS, world)
    losses = []
    for step in range(STEPS):
        batch = batch_of(step, config.global_batch_size)
        share = Batch(batch.images[rows], batch.texts[rows], batch.indices[rows])
        losses.append(trainer.train_step(share)["loss"])
    return losses, trainer


def on_ranks(world: World, parallel: str) -> tuple[list[float], dict[str, Tensor]]:
    """Losses, and on rank 0 the weights, of a run over all processes."""
    mine = torch.arange(world.rank * PER_RANK, (world.rank + 1) * PER_RANK)
    config = config_of(world.size, MICRO, use_bn_sync=True, parallel=parallel)
    plain = world.device.type == "cpu"
    how = plain_sync if plain else batch_norm.synchronise
    with mock.patch("megabatch.training.trainer.synchronise", how):
        losses, trainer = trained(config, world, mine)
    return losses, trainer.weights()


def alone(device: torch.device, size: int) -> tuple[list[float], dict[str, Tensor]]:
    """The same of one process, whose micro-batches are those of all processes together."""
    rows = torch.arange(size * PER_RANK).view(size, PER_RANK // MICRO, MICRO)
    order = rows.transpose(0, 1).flatten()
    losses, trainer = trained(config_of(size, MICRO * size), World(device), order)
    return losses, trainer.weights()
