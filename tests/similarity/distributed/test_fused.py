"""The fused kernels over several processes against one process, in Triton's interpreter."""

from __future__ import annotations

from typing import Any, TypeAlias

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from megabatch import similarity
from megabatch.similarity import backends
from megabatch.similarity.distributed import schedule
from tests.similarity.distributed.processes import World, on_devices
from tests.similarity.distributed.test_statistics import leaf
from tests.similarity.distributed.transfers import gathered_in_rounds, grid_of

pytest.importorskip("triton")

ROWS = 120  # of all ranks, in one tile, since the interpreter is slow
D = 20  # no multiple of 8, so that features are padded before transfers

Sides: TypeAlias = "tuple[similarity.Split, similarity.Split | None]"


def value(sides: Sides, weights: Tensor) -> Tensor:
    """A number that depends on every part of every row differently; `weights` (6, rows)."""
    parts = [part for side in sides if side is not None for part in side[:3]]
    total = torch.zeros(())
    for part, weight in zip(parts, weights, strict=True):
        total = total + (part.masked_fill(part == -torch.inf, 0) * weight).sum()
    return total


@on_devices(2)
def test_fused_kernels(world: World) -> None:
    """Ranks agree on the base of their sums and on the scaling of float16 gradients."""
    x, y = (F.normalize(torch.randn(ROWS, D), dim=1).half() for _ in range(2))
    x[:40] *= 4
    ids = torch.randint(-1, 20, (ROWS,))
    weights = torch.rand(6, ROWS) * 1e-3
    weights[:, 40:] /= 100
    wholes: dict[tuple[bool, bool], tuple[list[Tensor], Sides]] = {}
    for sizes, self_similar, numbers, size, own_first, columns in (
        ([60, 60], False, None, None, 61, 0),  # gathered
        ([60, 60], False, ids, None, 60, 0),
        ([40, 80], False, None, None, 1, 0),
        ([40, 80], False, ids, 2 * 60 * 24 * 2, 1, 0),
        ([40, 80], True, ids, 2 * 60 * 24 * 2, 1, 0),
        ([40, 80], False, ids, None, 1, 2),  # a grid whose ranks share rows
        ([60, 60], False, None, None, 1, 1),  # and columns
    ):
        with (
            pytest.MonkeyPatch.context() as patch,
            gathered_in_rounds(size),
            grid_of(columns),
        ):
            patch.setattr(backends, "uses_kernels", lambda x: True)
            patch.setattr(schedule, "LARGE", own_first)
            case = self_similar, numbers is not None
            if case not in wholes:  # one for all ways of transfer: the interpreter is slow
                wholes[case] = statistics(x, y, numbers, self_similar, weights, "local")
            whole, truth = wholes[case]
            shards = (t if t is None else world.shard(t, sizes) for t in (x, y, numbers))
            own_weights = weights.split(sizes, dim=1)[world.rank]
            local, mine = statistics(*shards, self_similar, own_weights, None)
        for got, want in zip(mine, truth, strict=True):
            for a, b in zip(got or (), want or (), strict=True):
                torch.testing.assert_close(a, world.shard(b, sizes), rtol=2e-6, atol=2e-5)
        assert_gradients_close(world, sizes, local, whole)


def statistics(
    x: Tensor, y: Tensor, ids: Tensor | None, self_similar: bool, weights: Tensor, group: Any
) -> tuple[list[Tensor], Sides]:
    """Leaves with their gradients (x, y, scale), and the log-sum-exps."""
    leaves = [leaf(x), leaf(y), leaf(torch.tensor(10.0))]
    pairs: Any = "paired"
    if ids is not None:
        pairs = ids if self_similar else (ids, ids)
    sides = similarity.split_logsumexp(
        leaves[0], None if self_similar else leaves[1], leaves[2], ids=pairs, group=group
    )
    value(sides, weights).backward()
    return leaves, sides


def assert_gradients_close(
    world: World, sizes: list[int], local: list[Tensor], whole: list[Tensor]
) -> None:
    """Those of rows to half precision, row by row; those of numbers are the mean over ranks."""
    for a, b in zip(local[:2], whole[:2], strict=True):
        if b.grad is not None:
            wanted = world.shard(b.grad, sizes).float()
            error = (a.grad.float() - wanted).norm(dim=1)
            assert (error <= 2e-3 * wanted.norm(dim=1) + 1e-7).all()
    for a, b in zip(local[2:], whole[2:], strict=True):
        torch.testing.assert_close(a.grad, b.grad / world.size, rtol=2e-3, atol=1e-6)


@on_devices(2)
def test_the_sigmoid_loss(world: World) -> None:
    """Ranks agree on the scaling of float16 gradients though their weights differ."""
    x, y = (F.normalize(torch.randn(ROWS, D), dim=1).half() for _ in range(2))
    ids = torch.randint(-1, 40, (ROWS,))
    weights = torch.rand(ROWS)
    weights[:40] *= 1000
    wholes: dict[tuple[bool, bool], tuple[list[Tensor], Tensor]] = {}
    for sizes, numbers, weight, size, columns in (
        ([60, 60], None, None, None, 0),  # gathered
        ([60, 60], ids, weights, None, 0),
        ([40, 80], None, weights, None, 0),
        ([0, ROWS], ids, None, 2 * 60 * 24 * 2, 0),
        ([40, 80], ids, weights, 2 * 60 * 24 * 2, 0),
        ([40, 80], ids, weights, None, 2),  # a grid whose ranks share rows
        ([40, 80], None, None, None, 2),
    ):
        case = numbers is not None, weight is not None
        with (
            pytest.MonkeyPatch.context() as patch,
            gathered_in_rounds(size),
            grid_of(columns),
        ):
            patch.setattr(backends, "uses_kernels", lambda x: True)
            if case not in wholes:
                wholes[case] = sigmoid_sum(x, y, numbers, weight, "local")
            whole, truth = wholes[case]
            shards = (t if t is None else world.shard(t, sizes) for t in (x, y, numbers, weight))
            local, total = sigmoid_sum(*shards, None)
        dist.all_reduce(total)
        torch.testing.assert_close(total, truth, rtol=1e-6, atol=0)
        assert_gradients_close(world, sizes, local, whole)
    # x needs no gradient and rank 0 has no rows of y: its part of the scale's gradient is 0.
    sides = (torch.arange(ROWS), torch.arange(ROWS))
    scales = [leaf(torch.tensor(10.0)) for _ in range(2)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backends, "uses_kernels", lambda x: True)
        similarity.softplus_sum(x, leaf(y), scales[0], -3.0, ids=sides, group="local").backward()
        rows, columns = world.shard(sides[0], [60, 60]), world.shard(sides[1], [0, ROWS])
        here = world.shard(x, [60, 60]), leaf(world.shard(y, [0, ROWS]))
        similarity.softplus_sum(*here, scales[1], -3.0, ids=(rows, columns)).backward()
    mean = scales[0].grad / world.size
    torch.testing.assert_close(scales[1].grad, mean, rtol=2e-3, atol=1e-6)


def sigmoid_sum(
    x: Tensor, y: Tensor, ids: Tensor | None, weight: Tensor | None, group: Any
) -> tuple[list[Tensor], Tensor]:
    """Leaves with the gradients of the mean (x, y, scale, bias), and the sum."""
    leaves = [leaf(t) for t in (x, y, torch.tensor(10.0), torch.tensor(-3.0))]
    pairs: Any = "paired" if ids is None else (ids, ids)
    total = similarity.softplus_sum(*leaves, ids=pairs, weight=weight, group=group)
    (total / ROWS).backward()
    return leaves, total.detach().clone()
