"""A grid of ranks against the dense matrix of one process, in float64."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from megabatch import similarity
from tests.similarity.distributed import test_sigmoid_ring, test_statistics_ring
from tests.similarity.distributed.processes import World, on_devices

some_ids = test_statistics_ring.some_ids
D = 5


@contextmanager
def grid_of(columns: int) -> Iterator[None]:
    before = similarity.set_grid(columns)
    try:
        yield
    finally:
        similarity.set_grid(before)


def shapes(world: World) -> list[int]:
    """Numbers of columns of grids of these ranks."""
    return {4: [2, 1, 4], 6: [2, 3]}[world.size]


@on_devices(4, 6)
def test_log_sum_exps(world: World) -> None:
    compare, sizes = test_statistics_ring.compare, [3] * world.size
    both = some_ids(sum(sizes)), some_ids(sum(sizes))
    for columns in shapes(world):
        with grid_of(columns):
            compare(world, sizes, sizes)
            compare(world, sizes, sizes, ids=both)
            compare(world, sizes, sizes, ids=both, sides="rows", needs=(True, False, True))
            compare(world, sizes, sizes, needs=(False, True, False))
            ceiling = torch.randn(sum(sizes), dtype=torch.float64)
            compare(world, sizes, sizes, ids=both, ceiling=ceiling, guided=True)


@on_devices(4, 6)
def test_sigmoid(world: World) -> None:
    compare, sizes = test_sigmoid_ring.compare, [3] * world.size
    ids = some_ids(sum(sizes)), some_ids(sum(sizes))
    weight = torch.rand(sum(sizes), dtype=torch.float64)
    for columns in shapes(world):
        with grid_of(columns):
            compare(world, sizes, sizes)
            compare(world, sizes, sizes, ids, weight)
