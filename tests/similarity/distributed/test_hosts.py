"""Groups on several hosts: which grid they are, and that other shards are gathered."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from weakref import WeakKeyDictionary

import pytest
import torch
import torch.distributed as dist

from megabatch import similarity, torch_internals
from megabatch.similarity import settings
from megabatch.similarity.distributed import control, grid_groups, hosts
from megabatch.similarity.distributed.comm import P2PExchange, group_name
from megabatch.similarity.distributed.grid import Grid, choose
from megabatch.similarity.distributed.ranks import Ranks
from tests.similarity.distributed import test_losses, test_statistics_ring
from tests.similarity.distributed.processes import World, on_devices, on_processes
from tests.similarity.distributed.test_statistics_ring import D, some_ids
from tests.similarity.distributed.transfers import (
    bytes_sent,
    gathered_in_rounds,
    grid_of,
    ring_in_chunks_of,
)


@contextmanager
def on_hosts(*names: str) -> Iterator[pytest.MonkeyPatch]:
    """Rank by rank, as if it were on the host of that name."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hosts, "by_rank", lambda group, device: list(names[: group.size()]))
        patch.setattr(grid_groups, "_known", WeakKeyDictionary())
        yield patch


@pytest.mark.parametrize(
    ("names", "order", "on_each"),
    [("aabb", [0, 1, 2, 3], 2), ("abab", [0, 2, 1, 3], 2), ("aab", [0, 1, 2], 0), ("a", [0], 1)],
)
def test_ranks_host_by_host(names: str, order: list[int], on_each: int) -> None:
    assert hosts.in_order(tuple(names)) == (order, on_each)


@pytest.mark.parametrize(
    ("number", "ranks", "most", "columns"),
    [
        (1, 8, 9999, 0),  # one host
        (2, 8, 9999, 8),
        (3, 8, 9999, 8),
        (4, 8, 9999, 16),  # 2 x 16: a host receives 8 + 8 shards, as 4 x 8 it would 24
        (128, 8, 64, 64),  # 16 x 64: 56 + 120
        (128, 8, 63, 32),
        (128, 8, 8, 8),
        (128, 8, 7, 0),
        (2, 1, 9999, 0),  # one row or one column, which gathering by all ranks is
        (5, 1, 9999, 0),
        (16, 1, 9999, 4),
    ],
)
def test_a_row_of_the_grid_is_whole_hosts(number: int, ranks: int, most: int, columns: int) -> None:
    assert hosts.columns_for(number, ranks, most) == columns


@pytest.mark.parametrize(
    ("number", "ranks", "columns"),
    [
        (1, 8, 0),
        (2, 8, 8),
        (4, 8, 8),  # 4 x 8: a host receives 16 shards, as 2 x 16 also
        (128, 8, 64),  # 16 x 64: 56 + 64
        (16, 1, 2),  # 8 x 2: 1 + 4
    ],
)
def test_columns_of_x_against_itself_reach_half_of_the_rows(
    number: int, ranks: int, columns: int
) -> None:
    assert hosts.columns_for(number, ranks, 9999, symmetric=True) == columns


@on_processes(4)
def test_hosts_are_exchanged_once(world: World) -> None:
    group, device = dist.group.WORLD, torch.device("cpu")
    assert len(set(hosts.by_rank(group, device))) == 1
    with pytest.MonkeyPatch.context() as patch:
        for holder, name in ((control, "_channels"), (hosts, "_known"), (grid_groups, "_known")):
            patch.setattr(holder, name, WeakKeyDictionary())
        patch.setattr(control, "sockets", lambda *_: None)  # out of reach
        assert len(set(hosts.by_rank(group, device))) == 1  # told by Gloo
        patch.setattr(hosts, "_known", WeakKeyDictionary())
        patch.setattr(hosts, "_own", lambda: f"host {world.rank % 2}")
        names = hosts.by_rank(group, device)
        assert names == ["host 0", "host 1"] * 2
        assert hosts.by_rank(group, device) is names
        # Ranks of one host share rows.
        found = grid_groups.find(group_name(None), device, most=4)
        assert found is not None
        assert dist.get_process_group_ranks(found.rows) == [world.rank % 2, world.rank % 2 + 2]
        assert dist.get_process_group_ranks(found.cols) == [world.rank // 2 * 2 + i for i in (0, 1)]
        timeouts = {
            torch_internals.backend_timeout(torch_internals.group_backend(each, device))
            for each in (group, *found)
        }
        assert len(timeouts) == 1
        test_statistics_ring.compare(world, [3] * 4, [3] * 4)


@on_processes(4)
def test_the_schedule_of_a_call(world: World) -> None:
    x, pair = torch.randn(3, D), dist.new_group([0, 1])

    def chosen(sizes: list[int] | None = None, symmetric: bool = False, name: str = "") -> type:
        both = [sizes or [3] * 4] * 2
        return type(choose(name or group_name(None), both, "a test", x, symmetric))

    assert chosen() is Ranks  # one host
    with on_hosts(*"aabb"):
        assert chosen() is chosen([1, 2, 3, 4]) is Grid
        assert chosen([3, 3, 0, 3]) is Ranks
        assert chosen(symmetric=True) is Grid
        assert chosen([3, 3, 0, 3], symmetric=True) is Ranks
        with grid_of(0):
            assert chosen() is Ranks
        if world.rank < 2:
            assert chosen([3, 3], name=group_name(pair)) is Ranks
        # Two ranks' rows are gathered at once, or all ranks' in rounds.
        row = D * 4
        for limit, kind in ((2 * 3 * row, Grid), (2 * 3 * row - 1, Ranks), (0, Ranks)):
            with gathered_in_rounds(limit):
                assert chosen() is chosen(symmetric=True) is kind
    with on_hosts(*"aaab"):
        assert chosen() is Ranks


@on_devices(2, 3, 4)
def test_no_ring_between_hosts(world: World) -> None:
    """Unequal shards are gathered, also in rounds."""
    unequal = [2, 7, 0, 3][: world.size]
    with on_hosts(*"abab") as patch, grid_of(0):
        patch.setattr(P2PExchange, "start", lambda self: pytest.fail("a single transfer"))
        for sizes in ([7] * world.size, unequal, [5, 2, 3, 6][: world.size]):
            ids = some_ids(sum(sizes)), some_ids(sum(sizes))
            for limit in (settings.DEFAULT_GATHER, world.size * 3 * D * 8):
                with gathered_in_rounds(limit):
                    test_statistics_ring.compare(world, sizes, sizes)
                    test_statistics_ring.compare(world, sizes, sizes, ids=ids)
                    needs = False, False, True
                    test_statistics_ring.compare(world, sizes, sizes, needs=needs)
        sizes = [1, 2, 3, 4][: world.size]
        x, y = (world.shard(torch.randn(sum(sizes), D), sizes) for _ in range(2))
        found = similarity.topk(x, y, 3)
    for a, b in zip(found, similarity.topk(x, y, 3), strict=True):
        torch.testing.assert_close(a, b)


@on_processes(3)
def test_a_bound_of_zero_uses_the_ring_between_hosts_too(world: World) -> None:
    with on_hosts(*"abc") as patch, ring_in_chunks_of(1 << 20):
        sent = bytes_sent(patch)
        similarity.logsumexp(torch.randn(3, D), torch.randn(3, D))
    assert sent


@on_devices(4)
def test_every_loss_on_two_hosts(world: World) -> None:
    with on_hosts(*"aabb"):
        for loss in test_losses.LOSSES:
            test_losses.compare(world, [2, 5, 0, 1], loss)
