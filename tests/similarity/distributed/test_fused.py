"""The fused kernels over several processes against one process, in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from megabatch import similarity
from megabatch.similarity import backends
from megabatch.similarity.distributed import gathered
from tests.similarity.distributed.processes import World, on_devices
from tests.similarity.distributed.test_statistics_ring import leaf
from tests.similarity.distributed.transfers import grid_of, ring_in_chunks_of

pytest.importorskip("triton")

ROWS = 120  # of all ranks, in one tile, since the interpreter is slow
D = 20  # no multiple of 8, so that features are padded before transfers


def value(sides: tuple[similarity.Split, similarity.Split | None], weights: Tensor) -> Tensor:
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
    for sizes, self_similar, numbers, piece, own_first, columns in (
        ([60, 60], False, None, None, 61, 0),  # gathered
        ([60, 60], False, ids, None, 60, 0),
        ([40, 80], False, None, None, 1, 0),
        ([40, 80], False, ids, 60 * 24 * 2, 1, 0),
        ([40, 80], True, ids, 60 * 24 * 2, 1, 0),
        ([40, 80], False, ids, None, 1, 2),  # a grid whose ranks share rows
        ([60, 60], False, None, None, 1, 1),  # and columns
    ):
        whole, local = [leaf(x), leaf(y)], [leaf(world.shard(t, sizes)) for t in (x, y)]
        scales = [leaf(torch.tensor(10.0)) for _ in range(2)]
        pairs, own = "paired", "paired"
        if numbers is not None:
            shard = world.shard(numbers, sizes)
            pairs = numbers if self_similar else (numbers, numbers)
            own = shard if self_similar else (shard, shard)
        with (
            pytest.MonkeyPatch.context() as patch,
            ring_in_chunks_of(piece),
            grid_of(columns),
        ):
            patch.setattr(backends, "uses_kernels", lambda x: True)
            patch.setattr(gathered, "LARGE", own_first)
            truth = similarity.split_logsumexp(
                whole[0], None if self_similar else whole[1], scales[0], ids=pairs, group="local"
            )
            mine = similarity.split_logsumexp(
                local[0], None if self_similar else local[1], scales[1], ids=own
            )
            value(truth, weights).backward()
            value(mine, weights.split(sizes, dim=1)[world.rank]).backward()
        for got, want in zip(mine, truth, strict=True):
            for a, b in zip(got, want, strict=True):
                torch.testing.assert_close(a, world.shard(b, sizes), rtol=2e-6, atol=2e-5)
        for a, b in zip(local, whole, strict=True):
            if b.grad is not None:
                wanted = world.shard(b.grad, sizes).float()
                error = (a.grad.float() - wanted).norm(dim=1)
                assert (error <= 2e-3 * wanted.norm(dim=1) + 1e-7).all()
        mean = scales[0].grad / world.size
        torch.testing.assert_close(scales[1].grad, mean, rtol=2e-3, atol=1e-6)


@on_devices(2)
def test_the_sigmoid_loss(world: World) -> None:
    """Ranks agree on the scaling of float16 gradients though their weights differ."""
    x, y = (F.normalize(torch.randn(ROWS, D), dim=1).half() for _ in range(2))
    ids = torch.randint(-1, 40, (ROWS,))
    weights = torch.rand(ROWS)
    weights[:40] *= 1000
    for sizes, numbers, weight, piece, columns in (
        ([60, 60], None, None, None, 0),  # gathered
        ([60, 60], ids, weights, None, 0),
        ([40, 80], None, weights, None, 0),
        ([0, ROWS], ids, None, 60 * 24 * 2, 0),
        ([40, 80], ids, weights, 60 * 24 * 2, 0),
        ([40, 80], ids, weights, None, 2),  # a grid whose ranks share rows
        ([40, 80], None, None, None, 2),
    ):
        whole = [leaf(t) for t in (x, y, torch.tensor(10.0), torch.tensor(-3.0))]
        local = [leaf(world.shard(t.detach(), sizes)) for t in whole[:2]]
        local += [leaf(t.detach()) for t in whole[2:]]
        pairs = "paired" if numbers is None else (numbers, numbers)
        own = pairs if numbers is None else (world.shard(numbers, sizes),) * 2
        own_weight = None if weight is None else world.shard(weight, sizes)
        with (
            pytest.MonkeyPatch.context() as patch,
            ring_in_chunks_of(piece),
            grid_of(columns),
        ):
            patch.setattr(backends, "uses_kernels", lambda x: True)
            truth = similarity.softplus_sum(*whole, ids=pairs, weight=weight, group="local")
            mine = similarity.softplus_sum(*local, ids=own, weight=own_weight)
            (truth / ROWS).backward()
            (mine / ROWS).backward()
        total = mine.detach().clone()
        dist.all_reduce(total)
        torch.testing.assert_close(total, truth.detach(), rtol=1e-6, atol=0)
        for a, b in zip(local[:2], whole[:2], strict=True):
            wanted = world.shard(b.grad, sizes).float()
            error = (a.grad.float() - wanted).norm(dim=1)
            assert (error <= 2e-3 * wanted.norm(dim=1) + 1e-7).all()
        for a, b in zip(local[2:], whole[2:], strict=True):
            torch.testing.assert_close(a.grad, b.grad / world.size, rtol=2e-3, atol=1e-6)
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
