"""Gradients of whole models under DDP and FSDP2 against one process, in float64, to 1e-9."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from megabatch import GradientCache
from megabatch.losses import ClipLoss, NTXentLoss
from tests.similarity.distributed.processes import World, on_devices, shard_sizes

WIDTH, D = 5, 4


class Tower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, 6), nn.Linear(6, D)

    def forward(self, x: Tensor) -> Tensor:
        return F.normalize(self.second(self.first(x).tanh()), dim=-1)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.image, self.text = Tower(), Tower()
        self.scale = nn.Parameter(torch.tensor([1.5]))  # FSDP2 takes no 0-d parameter

    def forward(self, images: Tensor, texts: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.image(images), self.text(texts), self.scale.exp()


class Loss:
    """Two losses in one step, one of them weighted."""

    def __init__(self, group: object) -> None:
        self.clip, self.nt_xent = ClipLoss(group=group), NTXentLoss(0.5, group=group)

    def __call__(self, x: Tensor, y: Tensor, scale: Tensor, weights: Tensor) -> Tensor:
        weighted = self.clip(x, y, scale, weights=weights)
        return weighted + self.clip(x, y, scale) / 2 + self.nt_xent(x, y, temperature=1 / scale)


def new_model(frozen: bool) -> Model:
    torch.manual_seed(0)
    model = Model().double()
    model.text.requires_grad_(not frozen)
    return model


def under_ddp(model: Model) -> nn.Module:
    return DistributedDataParallel(model)


def under_fsdp(model: Model) -> nn.Module:
    mesh = init_device_mesh(next(model.parameters()).device.type, (dist.get_world_size(),))
    for module in (model.image, model.text, model):
        fully_shard(module, mesh=mesh)
    return model


def under_ddp_but_for_the_scale(model: Model) -> nn.Module:
    """Both towers are in DDP; the scale is a parameter whose gradient nothing averages."""
    model.image = DistributedDataParallel(model.image)  # type: ignore[assignment]
    if any(p.requires_grad for p in model.text.parameters()):
        model.text = DistributedDataParallel(model.text)  # type: ignore[assignment]
    return model


WRAPPERS = (under_ddp, under_fsdp, under_ddp_but_for_the_scale)


def uncached(
    model: nn.Module, loss: Loss, images: Tensor, texts: Tensor, weights: Tensor
) -> Tensor:
    value = loss(*model(images, texts), weights)
    value.backward()
    return value.detach()


def cached(model: nn.Module, loss: Loss, images: Tensor, texts: Tensor, weights: Tensor) -> Tensor:
    value = GradientCache(model, loss, 2)(images, texts, weights=weights)
    value.backward()
    return value.detach()


def gradients(model: nn.Module) -> dict[str, Tensor]:
    found = {}
    for name, parameter in model.named_parameters():
        gradient: Any = parameter.grad
        if gradient is not None:
            full = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
            found[name.replace("module.", "")] = full
    return found


def compare(
    world: World,
    wrap: Callable[[Model], nn.Module],
    step: Callable[..., Tensor],
    sizes: list[int],
    frozen: bool = False,
) -> None:
    torch.manual_seed(1)
    n = sum(sizes)
    batch = [torch.randn(n, WIDTH).double() for _ in range(2)]
    batch.append(torch.rand(n).double())
    truth = new_model(frozen)
    expected = uncached(truth, Loss("local"), *batch)

    model = wrap(new_model(frozen))
    value = step(model, Loss(None), *(world.shard(t, sizes) for t in batch))
    dist.all_reduce(value)
    torch.testing.assert_close(value / world.size, expected, rtol=0, atol=1e-9)
    found, wanted = gradients(model), gradients(truth)
    assert found.keys() == wanted.keys()
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, wanted[name], rtol=0, atol=1e-9)


def without_empty(sizes: Iterable[list[int]]) -> list[list[int]]:
    """Gradient caching refuses a batch without rows."""
    return [s for s in sizes if 0 not in s]


@on_devices(1, 2, 3)
def test_one_graph(world: World) -> None:
    for wrap in WRAPPERS:
        for sizes in shard_sizes(world.size):
            compare(world, wrap, uncached, sizes)


@on_devices(1, 3)
def test_gradient_caching(world: World) -> None:
    for wrap in WRAPPERS:
        for sizes in without_empty(shard_sizes(world.size)):
            compare(world, wrap, cached, sizes)


@on_devices(2)
def test_a_frozen_tower(world: World) -> None:
    for sizes in shard_sizes(world.size):
        compare(world, under_ddp, uncached, sizes, frozen=True)
        compare(world, under_ddp_but_for_the_scale, uncached, sizes, frozen=True)
    compare(world, under_ddp, cached, [3] * world.size, frozen=True)
