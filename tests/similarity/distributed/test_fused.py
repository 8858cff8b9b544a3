"""The fused kernels around the ring, in Triton's interpreter, against the same on one process."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megabatch import similarity
from megabatch.similarity import sweep
from tests.similarity.distributed.processes import World, on_processes
from tests.similarity.distributed.test_statistics_ring import leaf, pieces_of

pytest.importorskip("triton")

D = 20  # no multiple of 8: what travels is padded


def value(sides: tuple[similarity.Split, similarity.Split | None], weights: Tensor) -> Tensor:
    """A number that depends on every part of every row differently; `weights` (6, rows)."""
    parts = [part for side in sides if side is not None for part in side[:3]]
    total = torch.zeros(())
    for part, weight in zip(parts, weights, strict=True):
        total = total + (part.masked_fill(part == -torch.inf, 0) * weight).sum()
    return total


@on_processes(2)
def test_fused_kernels(world: World) -> None:
    """Sums of different units must not meet, nor float16 gradients of different ranges."""
    x, y = (F.normalize(torch.randn(200, D), dim=1).half() for _ in range(2))
    x[:70] *= 4
    ids = torch.randint(-1, 20, (200,))
    weights = torch.rand(6, 200) * 1e-3
    weights[:, 70:] /= 100
    for sizes, self_similar, numbers, piece in (
        ([100, 100], False, None, None),  # gathered
        ([70, 130], False, None, None),
        ([70, 130], False, ids, 60 * 24 * 2),
        ([70, 130], True, ids, 60 * 24 * 2),
    ):
        whole, local = [leaf(x), leaf(y)], [leaf(world.shard(t, sizes)) for t in (x, y)]
        scales = [leaf(torch.tensor(10.0)) for _ in range(2)]
        pairs, own = "paired", "paired"
        if numbers is not None:
            shard = world.shard(numbers, sizes)
            pairs = numbers if self_similar else (numbers, numbers)
            own = shard if self_similar else (shard, shard)
        with pytest.MonkeyPatch.context() as patch, pieces_of(piece):
            patch.setattr(sweep, "fused_available", lambda x: True)
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
