"""Log-sum-exps on several processes against the dense matrix of one, in float64."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from megabatch import ClipLoss, similarity
from megabatch.similarity import dense, settings
from megabatch.similarity.distributed import schedule
from tests.similarity.distributed.processes import World, on_devices, shard_sizes
from tests.similarity.distributed.transfers import gathered_in_rounds

D = 5
#: Bytes of a round: of one or two rows of each rank; None: all are gathered at once.
ROUNDS = (None, 6 * D * 8)

Sides = Sequence["similarity.Split | None"]


def leaf(tensor: Tensor, needs: bool = True) -> Tensor:
    return tensor.detach().clone().requires_grad_(needs)


def combined(sides: Sides, weights: list[Tensor]) -> Tensor:
    """A number that depends on every part of every row differently; `weights`: of each part."""
    total = torch.zeros((), dtype=torch.float64)
    for k, side in enumerate(sides):
        for part, weight in zip(side or (), weights[4 * k :], strict=False):
            total = total + (part.masked_fill(part == -torch.inf, 0) * weight).sum()
    return total


def compare(
    world: World,
    row_sizes: list[int],
    column_sizes: list[int] | None = None,
    *,
    ids: Any = "paired",
    ceiling: Tensor | None = None,
    guided: bool = False,
    sides: str = "both",
    needs: tuple[bool, bool, bool] = (True, True, True),
) -> None:
    """Compare results and gradients of shards with the whole batch's; no column sizes: y=None."""
    sizes = [row_sizes, column_sizes or row_sizes]
    features = [
        torch.randn(sum(s), D, dtype=torch.float64) for s in sizes[: 2 if column_sizes else 1]
    ]
    whole = [leaf(t, need) for t, need in zip(features, needs, strict=False)]
    local = [
        leaf(world.shard(t, s), need) for t, s, need in zip(features, sizes, needs, strict=False)
    ]
    scales = [leaf(torch.tensor(1.7, dtype=torch.float64), needs[2]) for _ in range(2)]
    weights = [torch.randn(sum(s), dtype=torch.float64) for s in sizes for _ in range(4)]
    own_ids, own_ceiling = ids, ceiling
    if not isinstance(ids, str):
        own_ids = tuple(world.shard(i, s) for i, s in zip(ids, sizes, strict=True))
    if ids == "paired" and not column_sizes:  # the dense function drops the diagonal itself
        ids = (torch.full((sum(row_sizes),), -1),) * 2
    if ceiling is not None:
        own_ceiling = world.shard(ceiling, row_sizes)
    guide = own_guide = None
    if guided:  # of another width
        guide = [torch.randn(sum(s), 3, dtype=torch.float64) for s in sizes]
        guide[1] = guide[1] if column_sizes else guide[0]
        own_guide = [world.shard(t, s) for t, s in zip(guide, sizes, strict=True)]

    expected: Sides = dense.split_logsumexp(
        *(whole if column_sizes else (whole[0], None)),
        scales[0],
        ids=ids,
        ceiling=ceiling,
        guide=guide,
    )
    y = local[1] if column_sizes else None
    if own_ids != "paired" and y is None and own_ceiling is None:
        own_ids = own_ids[0]
    results: Sides = similarity.split_logsumexp(
        local[0], y, scales[1], ids=own_ids, ceiling=own_ceiling, guide=own_guide, sides=sides
    )
    if sides == "rows":
        assert results[1] is None
        expected = (expected[0], None)
    for got, want, s in zip(results, expected, sizes, strict=True):
        for a, b in zip(got or (), want or (), strict=True):
            torch.testing.assert_close(a, world.shard(b, s), rtol=0, atol=1e-12)

    both = [sizes[0]] * 4 + [sizes[1]] * 4
    combined(results, [world.shard(w, s) for w, s in zip(weights, both, strict=True)]).backward()
    combined(expected, weights).backward()
    for a, b, s in zip(local, whole, sizes, strict=False):
        if b.grad is None:
            assert a.grad is None
        else:
            torch.testing.assert_close(a.grad, world.shard(b.grad, s), rtol=0, atol=1e-11)
    if needs[2]:  # each process gets the mean over all processes
        mean = scales[0].grad / world.size
        torch.testing.assert_close(scales[1].grad, mean, rtol=0, atol=1e-11)


def some_ids(n: int) -> Tensor:
    """Few distinct ids, so that they recur on other processes; some are negative."""
    return torch.randint(-1, 4, (n,))


def compare_options(world: World, sizes: list[int], columns: list[int] | None = None) -> None:
    """Compare with every kind of option, x against y and against itself."""
    n, rows = sum(columns or sizes), sum(sizes)
    ids, ceiling = (some_ids(rows), some_ids(n)), torch.randn(rows, dtype=torch.float64)
    guided: dict[str, Any] = {"ceiling": ceiling, "guided": True}
    if columns is not None:  # no row has a column of its own
        return compare(world, sizes, columns, ids=ids, **guided)
    for options in (
        {},
        {"ids": ids},
        {"ids": ids, "sides": "rows"},
        {"ids": ids, "ceiling": ceiling},
        {"ids": ids, **guided},
        {"sides": "rows", **guided},
        {"sides": "rows", "needs": (True, False, True)},
        {"needs": (False, True, True)},
        {"needs": (False, False, True)},
        {"needs": (True, False, False)},
    ):
        compare(world, sizes, sizes, **options)
    both = ids[0], ids[0]
    for options in (
        {},
        {"ids": both},
        {"ids": both, "needs": (True, False, False)},
        {"ceiling": ceiling},
        guided,
        {"needs": (False, False, True)},
    ):
        compare(world, sizes, **options)


@on_devices(2, 3)
def test_every_option(world: World) -> None:
    for sizes, size in product(shard_sizes(world.size), ROUNDS):
        with gathered_in_rounds(size):
            compare_options(world, sizes)


@on_devices(3)
def test_other_numbers_of_columns_than_of_rows(world: World) -> None:
    for rows, columns in (([2, 0, 3], [4, 1, 0]), ([0, 0, 5], [3, 3, 0])):
        compare_options(world, rows, columns)


@on_devices(2, 4)
def test_with_and_without_overlap(world: World) -> None:
    for sizes, overlap in product(([5] * world.size, [8] * world.size), (True, False)):
        before = settings.set_overlap(overlap)
        ids = (some_ids(sum(sizes)), some_ids(sum(sizes)))
        for size in (None, world.size * 3 * D * 8):
            with gathered_in_rounds(size):
                compare(world, sizes, sizes)
                compare(world, sizes, sizes, ids=ids)
                compare(world, [3] * world.size, sizes, ids=(some_ids(3 * world.size), ids[1]))
                compare(world, sizes, sizes, sides="rows", needs=(True, False, True))
        assert settings.set_overlap(before) is overlap


@on_devices(2)
def test_guides_that_differ_are_an_error_on_every_process(world: World) -> None:
    x, guide = torch.randn(3, D), torch.randn(3, 2 + world.rank)
    with pytest.raises(ValueError, match=r"rank 0: .*guide: width 2, float32.*guide: width 3"):
        similarity.split_logsumexp(x, x, ceiling=torch.zeros(3), guide=(guide, guide))


@on_devices(2)
def test_every_shard_empty(world: World) -> None:
    x = torch.empty(0, D, requires_grad=True)
    rows, columns = similarity.logsumexp(x, x)
    assert rows.shape == columns.shape == (0,)
    (rows.sum() + columns.sum()).backward()
    assert x.grad.shape == (0, D)


@on_devices(2, 3)
def test_own_columns_first(world: World) -> None:
    sizes, rows = [5] * world.size, [4] * world.size
    ids = (some_ids(sum(sizes)), some_ids(sum(sizes)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(schedule, "LARGE", 5)
        compare(world, sizes, sizes)
        compare(world, sizes, sizes, ids=ids, needs=(True, False, True))
        compare(world, rows, sizes, ids=(some_ids(sum(rows)), ids[1]))
        compare(world, sizes, sizes, sides="rows")


@on_devices(2, 3)
def test_the_number_of_rows_of_all_processes(world: World) -> None:
    x, y = torch.randn(world.rank + 1, D), torch.randn(5, D)
    ids = some_ids(len(x)), some_ids(5)
    assert similarity.split_stacks(x, y, 1.0, ids=ids).batch == world.size * (world.size + 1) // 2
    assert similarity.split_stacks(x, None, 1.0).batch == world.size * (world.size + 1) // 2
    assert similarity.split_stacks(x, y, 1.0, ids=ids, group="local").batch is None
    weights = torch.ones(4) if world.rank else None
    with pytest.raises(ValueError, match=r"rank 0: split_logsumexp, no weights, .*: .*, weights,"):
        ClipLoss()(torch.randn(4, D), torch.randn(4, D), 1.0, weights=weights)


@on_devices(2, 3)
def test_upstream_gradients_that_only_one_process_has(world: World) -> None:
    """A process whose loss used one side or none still takes part in the backward pass."""
    sizes = [4] * world.size
    x, y = (torch.randn(sum(sizes), D, dtype=torch.float64) for _ in range(2))
    whole, local = [leaf(x), leaf(y)], [leaf(world.shard(t, sizes)) for t in (x, y)]
    rows, columns = similarity.logsumexp(*local)
    used = (columns.sum(), rows.sum(), 0 * rows.sum())[world.rank]
    used.backward()
    rows, columns = dense.logsumexp(*whole)
    (columns[:4].sum() + rows[4:8].sum()).backward()
    for a, b in zip(local, whole, strict=True):
        torch.testing.assert_close(a.grad, world.shard(b.grad, sizes), rtol=0, atol=1e-12)


@on_devices(3)
def test_graphs_of_several_groups_at_once(world: World) -> None:
    """Two calls of all ranks, one of two ranks and one local; backward passes in reverse order."""
    pair = dist.new_group([0, 2])
    sizes = [3, 4, 2]
    x, y = (torch.randn(9, D, dtype=torch.float64) for _ in range(2))
    whole, local = [leaf(x), leaf(y)], [leaf(world.shard(t, sizes)) for t in (x, y)]
    parts = [t.split(sizes) for t in whole]
    some = [torch.cat([part[0], part[2]]) for part in parts]
    truth = [
        dense.logsumexp(*whole, 1.0)[0].sum(),
        dense.logsumexp(*whole, 2.0)[1].sum(),
        *(dense.logsumexp(part, other)[0].sum() for part, other in zip(*parts, strict=True)),
        dense.logsumexp(*some, 3.0)[1].sum(),
    ]
    mine = [
        similarity.logsumexp(*local, 1.0)[0].sum(),
        similarity.logsumexp(*local, 2.0, group=dist.group.WORLD)[1].sum(),
        similarity.logsumexp(*local, group="local")[0].sum(),
    ]
    if world.rank != 1:
        mine.append(similarity.logsumexp(*local, 3.0, group=pair)[1].sum())
    else:
        with pytest.raises(ValueError, match="member"):
            similarity.logsumexp(*local, group=pair)
    for value in reversed(mine):
        value.backward()
    sum(truth).backward()
    for a, b in zip(local, whole, strict=True):
        torch.testing.assert_close(a.grad, world.shard(b.grad, sizes), rtol=0, atol=1e-11)


@on_devices(2, 3)
def test_half_precision(world: World) -> None:
    """Ranks agree on the scaling of float16 gradients, whose sizes differ."""
    sizes = [7, 12, 5][: world.size]
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        x, y = (F.normalize(torch.randn(sum(sizes), 32), dim=1).to(dtype) for _ in range(2))
        whole, local = [leaf(x), leaf(y)], [leaf(world.shard(t, sizes)) for t in (x, y)]
        mine = similarity.logsumexp(*local, 20.0)
        truth = similarity.logsumexp(*whole, 20.0, group="local")
        for a, b in zip(mine, truth, strict=True):
            torch.testing.assert_close(a, world.shard(b, sizes), rtol=1e-6, atol=1e-5)
        sum(a.sum() * 1e-6 for a in mine).backward()
        sum(b.sum() * 1e-6 for b in truth).backward()
        for a, b in zip(local, whole, strict=True):
            rounding = torch.finfo(dtype).eps if dtype != torch.float16 else 0.05  # subnormal
            torch.testing.assert_close(
                a.grad, world.shard(b.grad, sizes), rtol=4 * rounding, atol=1e-7
            )


@on_devices(2)
def test_autocast_casts_before_transfers(world: World) -> None:
    x, y = (torch.randn(4, D) for _ in range(2))
    with torch.autocast(world.device, torch.bfloat16):
        rows, _ = similarity.logsumexp(x, y)
    assert rows.dtype == torch.float32
    halves = similarity.logsumexp(x.bfloat16(), y.bfloat16())[0]
    assert torch.equal(rows, halves)


@on_devices(3)
def test_a_nan_reaches_every_process(world: World) -> None:
    x, y = torch.randn(3, D), torch.randn(3, D)
    if world.rank == 1:
        y[2, 0] = torch.nan
    rows, columns = similarity.logsumexp(x, y)
    assert rows.isnan().all()
    assert columns.isnan().any() or world.rank != 1


@on_devices(2)
def test_compiles_as_one_node(world: World) -> None:
    def value(x: Tensor, y: Tensor, scale: Tensor) -> Tensor:
        rows, columns = similarity.split_logsumexp(x, y, scale)
        return rows.negative.sum() + columns.positive_sum.sum()

    inputs = [torch.randn(3, D), torch.randn(3, D), torch.tensor(2.0)]
    mine, theirs = [[leaf(t) for t in inputs] for _ in range(2)]
    compiled = torch.compile(value, backend="aot_eager", fullgraph=True)(*mine)
    eager = value(*theirs)
    torch.testing.assert_close(compiled, eager)
    compiled.backward()
    eager.backward()
    for a, b in zip(mine, theirs, strict=True):
        torch.testing.assert_close(a.grad, b.grad)
