"""Losses under DDP, called with all outputs of an OpenCLIP model, its unused bias included."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from megabatch import losses
from tests.similarity.distributed.processes import World, on_processes

WIDTH, D, STEPS = 5, 4, 3
PAIRS = [("image", "text")]

Features = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


class Model(nn.Module):
    """Three towers, a scale, and a bias that cancels in a softmax."""

    def __init__(self) -> None:
        super().__init__()
        self.towers = nn.ModuleList(nn.Linear(WIDTH, D) for _ in range(3))
        self.scale = nn.Parameter(torch.tensor(1.0))
        self.bias = nn.Parameter(torch.tensor(-10.0))

    def forward(self, batch: Tensor) -> Features:
        image, text, audio = (tower(batch) for tower in self.towers)
        return image, text, audio, self.scale.exp(), self.bias


def clip(group: object, x: Tensor, y: Tensor, z: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
    return losses.ClipLoss(group=group)(x, y, scale, bias) + 0 * z.sum()


def sigmoid(group: object, x: Tensor, y: Tensor, z: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
    return losses.SigLipLoss(group=group)(x, y, scale, bias) + 0 * z.sum()


def modalities(
    group: object, x: Tensor, y: Tensor, z: Tensor, scale: Tensor, bias: Tensor
) -> Tensor:
    loss = losses.MultiModalLoss(PAIRS, normalize=True, group=group)
    return loss({"image": x, "text": y, "audio": z}, scale, bias)


def train(model: nn.Module, batch: Tensor, loss: Callable[..., Tensor], group: object) -> None:
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss(group, *model(batch)).backward()
        optimizer.step()


@on_processes(2)
def test_every_parameter_gets_a_gradient_in_every_step(world: World) -> None:
    batch = torch.randn(7, WIDTH, dtype=torch.float64)
    for loss in (clip, sigmoid, modalities):
        torch.manual_seed(0)
        alone = Model().double()
        parallel = Model().double()
        parallel.load_state_dict(alone.state_dict())
        train(alone, batch, loss, "local")
        train(DistributedDataParallel(parallel), world.shard(batch, [4, 3]), loss, None)
        for (name, a), b in zip(alone.named_parameters(), parallel.parameters(), strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-10, msg=f"{loss.__name__}: {name}")
        assert parallel.bias.grad is not None
        assert (parallel.bias.grad == 0) == (loss is not sigmoid)
        assert (parallel.bias.item() == -10.0) == (loss is not sigmoid)
