"""Losses on several processes against one process with the whole batch, in float64."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from megabatch import losses
from megabatch.similarity import global_mean, logsumexp, paired, replicated
from megabatch.similarity.distributed.comm import rank_and_size
from tests.similarity.distributed import comparison
from tests.similarity.distributed.comparison import double
from tests.similarity.distributed.processes import World, on_devices, on_processes
from tests.similarity.distributed.transfers import transferring

D = 6


def dcl(group: object, x: Tensor, y: Tensor, scale: Tensor, *_: Tensor) -> Tensor:
    weighted = losses.DCLLoss(1.0, sigma=0.5, group=group)(x, y, temperature=1 / scale)
    return weighted + losses.DCLLoss(1.0, group=group)(x, y, x + y, temperature=1 / scale)


def sincere(
    group: object, x: Tensor, y: Tensor, scale: Tensor, ids: Tensor, weights: Tensor
) -> Tensor:
    """The sum of both averages: of all rows, and with references."""
    rows, loss = torch.cat([x, y]), losses.SincereLoss(1.0, group=group)
    pairs = losses.SincereLoss(1.0, average="pairs", group=group)
    return loss(rows, ids.repeat(2), temperature=1 / scale) + pairs(
        x, ids, y, ids, temperature=scale
    )


def sig_lip_soft_labels(
    group: object, x: Tensor, y: Tensor, scale: Tensor, ids: Tensor, weights: Tensor
) -> Tensor:
    names = ("image_features", "text_features", "logit_scale", "logit_bias")
    others = x.detach()[:, :4].sin(), y.detach()[:, 2:].cos()  # of a width of their own
    teacher = zip(names, (*others, 2.0, -1.0), strict=True)
    options: dict[str, Any] = {f"dist_{name}": value for name, value in teacher}
    return losses.SigLipLoss(group=group)(x, y, scale, -scale, weights=weights, **options)


def log_q(
    group: object, x: Tensor, y: Tensor, scale: Tensor, ids: Tensor, weights: Tensor
) -> Tensor:
    loss = losses.InfoNCELoss(1.0, margin=0.3, group=group)
    corrections = {"log_q": 9 * weights, "log_q_negatives": -5 * weights}
    return loss(x, y, x + y, ids=ids, temperature=1 / scale, **corrections)


def custom(group: object, x: Tensor, y: Tensor, scale: Tensor, *_: Tensor) -> Tensor:
    """A loss that uses its scale elsewhere, too."""
    scale = replicated(scale, group)
    rows, _ = logsumexp(x, y, scale, sides="rows", group=group)
    return global_mean(rows - paired(x, y, scale) + 0.1 * scale.log() ** 2, group)


def clip(group: object, x: Tensor, y: Tensor, scale: Tensor, *_: Tensor) -> Tensor:
    return losses.ClipLoss(group=group)(x, y, scale)


def sig_lip(
    group: object, x: Tensor, y: Tensor, scale: Tensor, ids: Tensor, weights: Tensor
) -> Tensor:
    return losses.SigLipLoss(group=group)(x, y, scale, -scale, ids=ids, weights=weights)


def compare(world: World, sizes: list[int], loss: Callable[..., Tensor]) -> None:
    """Compare shares of the loss and their gradients with the whole batch's.

    The averaging of DDP and FSDP divides by the number of processes.
    """

    def share(group: object, *tensors: Tensor) -> Sequence[Tensor]:
        return [loss(group, *tensors) / rank_and_size(group)[1]]

    n = sum(sizes)
    inputs: list[tuple[Tensor, comparison.Sizes]] = [
        *((F.normalize(double(n, D), dim=1), sizes) for _ in range(2)),
        # Of shape (1,), which FSDP2 requires; losses use it outside the engine as well.
        (torch.tensor([5.0], dtype=torch.float64), None),
        (torch.randint(-1, 3, (n,)), sizes),
        (torch.rand(n, dtype=torch.float64), sizes),
    ]
    comparison.compare(world, share, inputs, [None], frozen="4")


@on_devices(3, 4)
def test_losses_that_are_no_random_cases(world: World) -> None:
    with transferring(columns=2 * (world.size == 4)):
        for sizes in ([2, 6, 4, 1], [5, 0, 4, 3]):
            for loss in (dcl, sincere, sig_lip_soft_labels, log_q, custom):
                compare(world, sizes[: world.size], loss)


@on_processes(2)
def test_another_default_device(world: World) -> None:
    """Tensors of the handshake stay on the CPU, whatever the default device."""
    local = [double(3, D).requires_grad_(), double(3, D).requires_grad_(), double(3).abs()]
    scale = torch.tensor(5.0, dtype=torch.float64)
    for loss in (losses.ClipLoss(), lambda *a, **w: losses.SigLipLoss()(*a, -scale, **w)):
        for weights in (None, local[2]):
            plain = loss(*local[:2], scale, weights=weights)
            expected = torch.autograd.grad(plain, local[:2])
            with torch.device("meta"):
                value = loss(*local[:2], scale, weights=weights)
                found = torch.autograd.grad(value, local[:2])
            assert torch.equal(value, plain)
            assert all(map(torch.equal, found, expected))


@on_devices(2, 3)
def test_an_empty_batch_everywhere_is_an_error_on_every_process(world: World) -> None:
    x = torch.empty(0, D, requires_grad=True)
    with pytest.raises(ValueError, match="image_features: expected at least one row"):
        losses.ClipLoss()(x, x, 1.0)


@on_processes(2)
def test_distributed_tensors_are_refused_and_their_parts_are_taken(world: World) -> None:
    """A parameter that FSDP2 shards, outside of the model's forward, and features."""
    mesh = init_device_mesh("cpu", (world.size,))
    x, y = torch.randn(2, 6, 4, dtype=torch.float64)
    scale: Any = distribute_tensor(torch.ones(1, dtype=torch.float64), mesh, [Shard(0)])
    scale.requires_grad_()
    rows: Any = distribute_tensor(x, mesh, [Shard(0)])
    part = world.shard(y, [3] * 2)
    loss = losses.ClipLoss()
    with pytest.raises(TypeError, match=r"logit_scale: .* DTensor; pass logit_scale.full_tensor"):
        loss(part, part, scale.exp())
    with pytest.raises(TypeError, match=r"image_features: expected a tensor of this process, got"):
        loss(rows, part, 3.0)
    loss(rows.to_local(), part, scale.exp().full_tensor()).backward()
    whole = torch.ones(1, dtype=torch.float64, requires_grad=True)
    losses.ClipLoss(group="local")(x, y, whole.exp()).backward()
    torch.testing.assert_close(scale.grad.full_tensor(), whole.grad, rtol=1e-12, atol=0)
