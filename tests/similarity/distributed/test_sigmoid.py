"""The sigmoid loss's sum on several processes against one with all rows, in float64."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megabatch import losses
from megabatch.similarity import backends, softplus_sum
from tests.similarity.distributed.processes import World, on_devices, shard_sizes
from tests.similarity.distributed.test_statistics import ROUNDS, leaf, some_ids
from tests.similarity.distributed.transfers import gathered_in_rounds, received_bytes

D = 5
ALL = (True, True, True, True)


def compare(
    world: World,
    rows: list[int],
    columns: list[int],
    ids: tuple[Tensor, Tensor] | None = None,
    weight: Tensor | None = None,
    needs: tuple[bool, ...] = ALL,
) -> None:
    x, y = (torch.randn(sum(s), D, dtype=torch.float64) for s in (rows, columns))
    numbers = [torch.tensor([value], dtype=torch.float64) for value in (2.0, -1.0)]
    whole = [leaf(t, need) for t, need in zip((x, y, *numbers), needs, strict=True)]
    shards = world.shard(x, rows), world.shard(y, columns), *numbers
    local = [leaf(t, need) for t, need in zip(shards, needs, strict=True)]
    own = "paired"
    if ids is not None:
        own = (world.shard(ids[0], rows), world.shard(ids[1], columns))
    own_weight = None if weight is None else world.shard(weight, rows)

    truth = softplus_sum(*whole, ids=ids or "paired", weight=weight, group="local")
    mine = softplus_sum(*local, ids=own, weight=own_weight)
    total = mine.detach().clone()
    dist.all_reduce(total)
    torch.testing.assert_close(total, truth.detach(), rtol=0, atol=1e-11)
    truth.backward()
    mine.backward()
    for a, b, s in zip(local[:2], whole[:2], (rows, columns), strict=True):
        if b.grad is not None:
            torch.testing.assert_close(a.grad, world.shard(b.grad, s), rtol=0, atol=1e-11)
    for a, b in zip(local[2:], whole[2:], strict=True):
        if b.grad is not None:
            torch.testing.assert_close(a.grad, b.grad / world.size, rtol=0, atol=1e-11)


def compare_options(world: World, sizes: list[int]) -> None:
    """Compare with ids and weights, and without."""
    ids = (some_ids(sum(sizes)), some_ids(sum(sizes)))
    compare(world, sizes, sizes)
    compare(world, sizes, sizes, ids, torch.rand(sum(sizes), dtype=torch.float64))
    compare(world, sizes, sizes, ids, needs=(True, False, True, True))
    compare(world, sizes, sizes, needs=(False, False, True, True))


@on_devices(2, 3)
def test_sums_and_gradients(world: World) -> None:
    for sizes in ([7] * world.size, *shard_sizes(world.size)):
        for size in ROUNDS:
            with gathered_in_rounds(size):
                compare_options(world, sizes)


@on_devices(3)
def test_other_numbers_of_columns_than_of_rows(world: World) -> None:
    compare(world, [2, 0, 3], [4, 1, 0], (some_ids(5), some_ids(5)))


@on_devices(2)
def test_frozen_inputs(world: World) -> None:
    for number in range(1, 15):
        compare(world, [3, 2], [3, 2], needs=tuple(bool(number >> bit & 1) for bit in range(4)))


@on_devices(2)
def test_processes_that_use_the_sum_differently_get_nan(world: World) -> None:
    x, y = (torch.randn(3, D, requires_grad=True) for _ in range(2))
    (softplus_sum(x, y, 1.0, 0.0) * (world.rank + 1)).backward()
    assert y.grad.isnan().all()
    assert x.grad.isfinite().all()


@on_devices(2)
def test_one_process_without_any_weight(world: World) -> None:
    """Its rows do not count, but its columns are negatives of the other process's rows."""
    x, y = (torch.randn(6, D, dtype=torch.float64) for _ in range(2))
    weights = torch.tensor([0.0, 0.0, 0.0, 1.0, 2.0, 3.0])
    whole, local = leaf(y), leaf(world.shard(y, [3, 3]))
    losses.SigLipLoss(group="local")(x, whole, 1.0, 0.0, weights=weights).backward()
    mine = losses.SigLipLoss()
    mine(world.shard(x, [3, 3]), local, 1.0, 0.0, weights=world.shard(weights, [3, 3])).backward()
    torch.testing.assert_close(local.grad / 2, world.shard(whole.grad, [3, 3]))


@on_devices(3)
def test_bytes_received(world: World) -> None:
    """Bytes per row: features 2 d, gradients 4 d; for the kernels both are padded to d = 16."""
    pytest.importorskip("triton")
    rows, d = 7, 10
    for fused, width in ((False, d), (True, 16)):
        x, y = (torch.randn(rows, d).bfloat16().requires_grad_() for _ in range(2))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(backends, "uses_kernels", lambda x, fused=fused: fused)
            received = received_bytes(patch)
            value = softplus_sum(x, y, 1.0, 0.0)
            assert received == [2 * rows * width * 2, 2 * rows * width * 4]
            value.backward()
            assert len(received) == 2


@on_devices(2)
def test_compiles_as_one_node(world: World) -> None:
    def value(x: Tensor, y: Tensor, scale: Tensor) -> Tensor:
        return softplus_sum(x, y, scale, -1.0)

    inputs = [torch.randn(3, D), torch.randn(3, D), torch.tensor(2.0)]
    mine, theirs = [[leaf(t) for t in inputs] for _ in range(2)]
    compiled = torch.compile(value, backend="aot_eager", fullgraph=True)(*mine)
    eager = value(*theirs)
    torch.testing.assert_close(compiled, eager)
    compiled.backward()
    eager.backward()
    for a, b in zip(mine, theirs, strict=True):
        torch.testing.assert_close(a.grad, b.grad)
