"""Groups on several hosts, and the grid that they are."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from weakref import WeakKeyDictionary

import pytest
import torch
import torch.distributed as dist

from megabatch import torch_internals
from megabatch.similarity.distributed import control, grid
from megabatch.similarity.distributed.comm import group_name
from megabatch.similarity.distributed.schedule import Ranks
from tests.similarity.distributed import test_losses, test_statistics
from tests.similarity.distributed.processes import World, on_devices, on_processes
from tests.similarity.distributed.test_statistics import D
from tests.similarity.distributed.transfers import gathered_in_rounds, grid_of


@contextmanager
def on_hosts(*names: str) -> Iterator[pytest.MonkeyPatch]:
    """Rank by rank, as if it were on the host of that name."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grid, "by_rank", lambda group, device: list(names[: group.size()]))
        patch.setattr(grid, "_grids", WeakKeyDictionary())
        yield patch


@pytest.mark.parametrize(
    ("names", "order", "on_each"),
    [("aabb", [0, 1, 2, 3], 2), ("abab", [0, 2, 1, 3], 2), ("aab", [0, 1, 2], 0), ("a", [0], 1)],
)
def test_ranks_host_by_host(names: str, order: list[int], on_each: int) -> None:
    assert grid.host_by_host(tuple(names)) == (order, on_each)


@pytest.mark.parametrize(
    ("number", "ranks", "most", "columns"),
    [
        (1, 8, 9999, 0),  # one host
        (2, 8, 9999, 8),
        (3, 8, 9999, 8),
        (4, 8, 9999, 16),  # 2 x 16: a host receives 8 + 8 shards, as 4 x 8 it would 24
        (128, 8, 64, 64),  # 16 x 64: 56 + 120
        (128, 8, 63, 32),
        (128, 8, 7, 0),
        (2, 1, 9999, 0),  # one row or one column, which gathering by all ranks is
        (5, 1, 9999, 0),
        (16, 1, 9999, 4),
    ],
)
def test_a_row_of_the_grid_is_whole_hosts(number: int, ranks: int, most: int, columns: int) -> None:
    assert grid.columns_for(number, ranks, most) == columns


@on_processes(4)
def test_hosts_are_exchanged_once(world: World) -> None:
    group, device = dist.group.WORLD, torch.device("cpu")
    assert len(set(grid.by_rank(group, device))) == 1
    with pytest.MonkeyPatch.context() as patch:
        for holder, name in ((control, "_channels"), (grid, "_hosts"), (grid, "_grids")):
            patch.setattr(holder, name, WeakKeyDictionary())
        patch.setattr(control, "sockets", lambda *_: None)  # out of reach
        assert len(set(grid.by_rank(group, device))) == 1  # told by Gloo
        patch.setattr(grid, "_hosts", WeakKeyDictionary())
        patch.setattr(grid, "_host", lambda: f"host {world.rank % 2}")
        names = grid.by_rank(group, device)
        assert names == ["host 0", "host 1"] * 2
        assert grid.by_rank(group, device) is names
        # Ranks of one host share rows.
        found = grid.grid_groups(group_name(None), [[3] * 4] * 2, 4, device)
        assert found is not None
        assert dist.get_process_group_ranks(found.rows) == [world.rank % 2, world.rank % 2 + 2]
        assert dist.get_process_group_ranks(found.cols) == [world.rank // 2 * 2 + i for i in (0, 1)]
        timeouts = {
            torch_internals.backend_timeout(torch_internals.group_backend(each, device))
            for each in (group, *found)
        }
        assert len(timeouts) == 1
        test_statistics.compare(world, [3] * 4, [3] * 4)


@on_processes(4)
def test_the_schedule_of_a_call(world: World) -> None:
    x, pair = torch.randn(3, D), dist.new_group([0, 1])

    def columns(sizes: list[int] | None = None, name: str = "") -> int:
        ranks = Ranks(name or group_name(None), [sizes or [3] * 4] * 2, "a test", x)
        return len(ranks.rows.sizes)

    assert columns() == 1  # one host
    with on_hosts(*"aabb"):
        assert columns() == columns([1, 2, 3, 4]) == 2
        assert columns([3, 3, 0, 3]) == 1
        with grid_of(0):
            assert columns() == 1
        if world.rank < 2:
            assert columns([3, 3], group_name(pair)) == 1
        # Two ranks' rows are gathered at once, or none are shared.
        row = D * 4
        for limit, shared in ((2 * 3 * row, 2), (2 * 3 * row - 1, 1), (0, 1)):
            with gathered_in_rounds(limit):
                assert columns() == shared
    with on_hosts(*"aaab"):
        assert columns() == 1


@on_devices(4)
def test_losses_on_two_hosts(world: World) -> None:
    with on_hosts(*"aabb"):
        for loss in (test_losses.clip, test_losses.info_nce, test_losses.sig_lip):
            test_losses.compare(world, [2, 5, 3, 1], loss)
