"""x against itself: which rank computes which pairs of rows, and what it keeps and sends."""

from __future__ import annotations

from collections import Counter
from itertools import accumulate, combinations, product
from typing import Any

import pytest
import torch

from megabatch import similarity
from megabatch.similarity import engine, settings
from megabatch.similarity.distributed import gathered, halves, ring, schedule
from megabatch.similarity.distributed.comm import P2PExchange
from tests.gathering import gathering_up_to
from tests.similarity.distributed import test_gradients
from tests.similarity.distributed.processes import World, on_devices, on_processes
from tests.similarity.distributed.test_grid import received_bytes
from tests.similarity.distributed.test_statistics_ring import D, compare, some_ids
from tests.similarity.distributed.transfers import grid_of, recorded, ring_in_chunks_of

GRIDS = [(rows, columns) for rows, columns in product(range(1, 7), range(1, 7))]


def positions(rows: int, columns: int, sizes: list[int]) -> list[halves.GridPosition]:
    """Every rank's position, row by row, with shards of these sizes."""
    found = []
    for r, c in product(range(rows), range(columns)):
        bounds = list(accumulate(sizes[r * columns : (r + 1) * columns], initial=0))
        own = ring.Ring(None, r, rows, [0] * rows, "a test")  # type: ignore[arg-type]
        found.append(halves.GridPosition(own, sizes[c::columns], bounds, c, r * columns + c))
    return found


def computed(
    position: halves.GridPosition, columns: int, starts: list[int], size: int
) -> Counter[Any]:
    """The pairs of rows that a rank computes beside its own triangle, in chunks of `size`."""
    pairs: Counter[Any] = Counter()
    first = starts[position.ring.rank * columns]
    route = schedule.symmetric(position.ring.n)
    for chunks in ring.rounds_of(position.sizes, size):
        for step in range(route.steps):
            owner = position.ring.owner(step)
            begin = starts[owner * columns + position.column] + chunks[owner].start
            for rows, cols in halves.blocks(position, step, chunks[owner]):
                for i, j in product(range(rows.start, rows.stop), range(cols.start, cols.stop)):
                    pairs[frozenset((first + i, begin + j))] += 1
    return pairs


@pytest.mark.parametrize(("rows", "columns"), GRIDS)
def test_each_pair_of_rows_is_computed_once(rows: int, columns: int) -> None:
    n = rows * columns
    for sizes in ([2] * n, [(5 * k + 1) % 4 for k in range(n)]):
        starts = list(accumulate(sizes, initial=0))
        found: Counter[Any] = Counter()
        for position in positions(rows, columns, sizes):
            found += computed(position, columns, starts, 2)
        owner = [rank for rank, size in enumerate(sizes) for _ in range(size)]
        apart = [p for p in combinations(range(sum(sizes)), 2) if owner[p[0]] != owner[p[1]]]
        assert found == Counter(map(frozenset, apart))


@pytest.mark.parametrize(("rows", "columns"), GRIDS)
def test_all_ranks_compute_as_much(rows: int, columns: int) -> None:
    n = rows * columns
    sizes, starts = [4] * n, [4 * k for k in range(n + 1)]
    counts = [
        computed(position, columns, starts, 3).total()
        for position in positions(rows, columns, sizes)
    ]
    assert counts == [8 * (n - 1)] * n  # (n - 1) / 2 blocks of 16 pairs


@on_devices(2, 4, 6)
def test_results_and_gradients(world: World) -> None:
    """In float64, to 1e-11; an empty shard, or no room for the shared rows, leaves a ring."""
    n = world.size
    for columns in {2: (1, 2), 4: (0, 2, 4), 6: (2, 3)}[n]:
        for sizes in ([3] * n, [9, 1, 4, 2, 1, 5][:n], [0, 4, 0, 1, 3, 0][:n]):
            ids = (some_ids(sum(sizes)),) * 2
            with grid_of(columns):
                compare(world, sizes)
                compare(world, sizes, ids=ids, needs=(True, False, False))
                compare(world, sizes, needs=(False, False, True))
                with ring_in_chunks_of(1 << 20):
                    compare(world, sizes, ids=ids)


@on_processes(2, 3, 4, 6)
def test_saved_features(world: World) -> None:
    """As many as fit; those of a grid of one row are too many from three ranks on."""
    x, ids = torch.randn(3, 4, dtype=torch.float64, requires_grad=True), some_ids(3)

    def found() -> tuple[torch.Tensor, torch.Tensor]:
        rows, _ = similarity.split_logsumexp(x, ids=ids)
        total = rows.negative + rows.positive_sum
        return total.detach(), torch.autograd.grad(total.square().sum(), x)[0]

    with ring_in_chunks_of(1 << 20):
        wanted = found()
    for columns in (n for n in range(world.size + 1) if n == 0 or world.size % n == 0):
        with grid_of(columns):
            for a, b in zip(found(), wanted, strict=True):
                torch.testing.assert_close(a, b, rtol=0, atol=1e-11)


@on_processes(4)
def test_chunks_of_several_rounds(world: World) -> None:
    before = settings.set_chunk(2 * D * 8)
    try:
        for sizes in ([5] * 4, [6, 1, 5, 3]):
            for columns in (0, 2):
                with grid_of(columns):
                    compare(world, sizes)
                    compare(world, sizes, ids=(some_ids(sum(sizes)),) * 2)
    finally:
        settings.set_chunk(before)


@on_processes(4)
def test_gradient_caching_on_a_grid(world: World) -> None:
    with grid_of(2):
        for sizes in ([3] * 4, [4, 1, 2, 3]):
            compared = test_gradients.under_ddp, test_gradients.cached
            test_gradients.compare(world, *compared, sizes)


@on_processes(6)
def test_what_travels(world: World) -> None:
    """Each rank receives 8 d m [(C - 1) + R // 2] bytes in bfloat16, 24 in float64.

    Features that fit are saved for the backward pass.
    """
    m, d = 4, 16
    for columns, saves in ((0, False), (0, True), (2, False), (3, False), (2, True), (3, True)):
        shards = 6 // columns // 2 + columns - 1 if columns else 3
        for dtype, each in ((torch.bfloat16, 8), (torch.float64, 24)):
            x = torch.randn(m, d, dtype=dtype, requires_grad=True)
            each = each - x.element_size() if saves else each
            with (
                grid_of(columns),
                gathering_up_to(4 * x.nbytes - (not saves)),
                pytest.MonkeyPatch.context() as patch,
            ):
                received = received_bytes(patch)
                around = received_around(patch)
                similarity.split_logsumexp(x)[0].negative.sum().backward()
            # Statistics are vectors: a state and an upstream of two numbers a row each.
            statistics = 2 * 2 * (4 if dtype == torch.bfloat16 else 8) * m * shards
            assert sum(received) + sum(around) == each * d * m * shards + statistics


def received_around(patch: pytest.MonkeyPatch) -> list[int]:
    """A list that receives the bytes that this rank gets in each exchange with a neighbour."""
    received: list[int] = []
    add = P2PExchange.add

    def count(self: P2PExchange, *arguments: Any) -> torch.Tensor:
        incoming = add(self, *arguments)
        received.append(incoming.nbytes)
        return incoming

    patch.setattr(P2PExchange, "add", count)
    return received


@on_processes(2)
def test_with_saved_features_its_own_columns_hide_the_last_transfer(world: World) -> None:
    x = torch.randn(4, 12, requires_grad=True)
    total = similarity.split_logsumexp(x)[0].negative.sum()
    events: list[str] = []
    add_strip = engine.add_strip

    def compute(tiles: Any, *arguments: Any) -> None:
        events.append("own" if tiles.symmetric else "others'")
        add_strip(tiles, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        for name in ("start", "wait"):
            patch.setattr(P2PExchange, name, recorded(events, name, getattr(P2PExchange, name)))
        patch.setattr(engine, "add_strip", compute)
        total.backward()
    assert events == ["start", "wait", "start", "others'", "wait", "start", "own", "wait"]


@pytest.mark.parametrize(("limit", "shards"), [(3 * 48, 3), (3 * 48 - 1, 0), (0, 0)])
def test_shards_that_are_saved(limit: int, shards: int) -> None:
    x = torch.empty(3, 4)
    assert gathered.saved_shards(x, 4, True, limit) == shards
    assert gathered.saved_shards(x, 3, False, limit) == shards
    assert gathered.saved_shards(torch.empty(3, 5), 3, False, 1 << 20) == 0
    assert gathered.saved_shards(x[:0], 3, False, 1 << 20) == 0
