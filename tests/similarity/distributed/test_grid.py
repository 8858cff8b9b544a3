"""Grids of ranks: hosts and what they transfer; meshes. `test_reductions` and `test_losses` compare
results."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from typing import Any
from weakref import WeakKeyDictionary

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

from megabatch import ClipLoss, GradientCache, similarity, torch_internals
from megabatch.similarity.distributed import control, schedule
from megabatch.similarity.distributed.comm import group_name
from megabatch.similarity.distributed.schedule import Ranks
from tests.gradient_cache.parallel import batches_of, gradients, new_model, on_one_process
from tests.similarity.distributed import test_losses
from tests.similarity.distributed.comparison import D, double
from tests.similarity.distributed.processes import World, on_devices, on_processes
from tests.similarity.distributed.transfers import received_bytes, transferring

CPU = torch.device("cpu")


@on_processes(4)
def test_meshes(world: World) -> None:
    """One dimension or one rank; another mesh is an error."""
    mesh = init_device_mesh("cpu", (2, 2, 1), mesh_dim_names=("a", "b", "c"))
    x, y = double(3, D), double(3, D)
    with pytest.raises(ValueError, match=r"a mesh of one dimension, got 3; None is the group of"):
        similarity.logsumexp(x, y, group=mesh)
    line, one = mesh["b"], mesh["c"]
    alone, _ = similarity.logsumexp(x, y, group="local")
    wanted, _ = similarity.logsumexp(x, y, group=line.get_group())
    for group, truth in ((line, wanted), (one, alone)):
        found, _ = similarity.logsumexp(x, y, group=group)
        torch.testing.assert_close(found, truth, rtol=0, atol=1e-12)


def hybrid(model: Any, mesh: DeviceMesh) -> Any:
    for part in (model.image, model.text, model):
        fully_shard(part, mesh=mesh)
    return model


@on_processes(4)
def test_gradient_caching_under_hsdp(world: World) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    for sizes, cached in product(([4] * 4, [5, 1, 2, 3]), (True, False)):
        own, whole = batches_of(world.rank, sizes)
        truth, wanted = on_one_process([whole])
        model, loss = hybrid(new_model(), mesh), ClipLoss()
        with transferring(columns=2):
            value = GradientCache(model, loss, 2)(*own) if cached else loss(*model(*own))
            value.backward()
        mean = value.detach().clone()
        dist.all_reduce(mean)
        torch.testing.assert_close(mean / world.size, truth, rtol=0, atol=1e-10)
        for name, gradient in gradients(model).items():
            torch.testing.assert_close(gradient, wanted[name], rtol=0, atol=1e-10)


@on_processes(6)
def test_what_travels(world: World) -> None:
    """Each rank receives 8 d m [(R - 1) + (C - 1)] bytes in bfloat16, 24 in float64.

    If the features of all ranks would fit, those of the grid are saved for the backward pass. x
    against itself takes no grid.
    """
    m, d = 4, 16
    for columns, saves, symmetric in product((2, 3), (False, True), (False, True)):
        shards = 5 if symmetric else 6 // columns - 1 + columns - 1
        for dtype, each in ((torch.bfloat16, 8), (torch.float64, 24)):
            x, y = (torch.randn(m, d, dtype=dtype, requires_grad=True) for _ in range(2))
            each = each - x.element_size() if saves else each
            with transferring(columns=columns, rounds=6 * x.nbytes - (not saves)) as patch:
                received = received_bytes(patch)
                if symmetric:
                    similarity.split_logsumexp(x)[0].negative.sum().backward()
                else:
                    sum(map(torch.sum, similarity.logsumexp(x, y))).backward()
            # Statistics are vectors: a state and an upstream of two numbers a row each.
            statistics = 2 * 2 * (4 if dtype == torch.bfloat16 else 8) * m * shards
            assert sum(received) == each * d * m * shards + statistics


# --- hosts ----------------------------------------------------------------------------------------


@contextmanager
def on_hosts(names: str) -> Iterator[None]:
    """Rank by rank, as if it were on the host of that name."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(control.channel(dist.group.WORLD, CPU), "hosts", list(names))
        patch.setattr(schedule, "_grids", WeakKeyDictionary())
        yield


@pytest.mark.parametrize(
    ("names", "on_each"), [("aabb", 2), ("abab", 0), ("aab", 0), ("a", 1), ("abc", 1)]
)
def test_ranks_per_host(names: str, on_each: int) -> None:
    assert schedule.ranks_per_host(tuple(names)) == on_each


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
    assert schedule.columns_for(number, ranks, most) == columns


@on_processes(4)
def test_ranks_of_one_host_share_rows(world: World) -> None:
    group = dist.group.WORLD
    with pytest.MonkeyPatch.context() as patch:
        for holder, name in ((control, "_channels"), (schedule, "_grids")):
            patch.setattr(holder, name, WeakKeyDictionary())
        patch.setattr(control, "_host", lambda: f"host {world.rank // 2}")
        channel = control.channel(group, CPU)
        assert isinstance(channel, control.GlooChannel)
        assert channel.hosts == ["host 0"] * 2 + ["host 1"] * 2
        found = schedule.grid_groups(group_name(None), [[3] * 4] * 2, 4, CPU)
        assert found is not None
        rows, cols = found
        assert dist.get_process_group_ranks(rows) == [world.rank // 2 * 2 + i for i in (0, 1)]
        assert dist.get_process_group_ranks(cols) == [world.rank % 2, world.rank % 2 + 2]
        assert found == schedule.grid_groups(group_name(None), [[3] * 4] * 2, 4, CPU)
        timeouts = {
            torch_internals.backend_timeout(torch_internals.group_backend(each, CPU))
            for each in (group, *found)
        }
        assert len(timeouts) == 1
        test_losses.compare(world, [3] * 4, test_losses.clip)


@on_processes(4)
def test_the_schedule_of_a_call(world: World) -> None:
    x, pair = torch.randn(3, D), dist.new_group([0, 1])

    def columns(sizes: list[int] | None = None, name: str = "", symmetric: bool = False) -> int:
        name, sizes = name or group_name(None), sizes or [3] * 4
        return len(Ranks(name, [sizes] * 2, "a test", x, symmetric).rows.sizes)

    similarity.logsumexp(x, x)
    assert columns() == 1  # one host
    with on_hosts("aabb"):
        assert columns() == columns([1, 2, 3, 4]) == 2
        assert columns([3, 3, 0, 3]) == columns(symmetric=True) == 1
        with transferring(columns=0):
            assert columns() == 1
        if world.rank < 2:
            assert columns([3, 3], group_name(pair)) == 1
        # Two ranks' rows are gathered at once, or none are shared.
        row = D * 4
        for limit, shared in ((2 * 3 * row, 2), (2 * 3 * row - 1, 1), (0, 1)):
            with transferring(rounds=limit):
                assert columns() == shared
    with on_hosts("aaab"):
        assert columns() == 1


@on_devices(4)
def test_losses_on_two_hosts(world: World) -> None:
    similarity.logsumexp(torch.ones(1, D), torch.ones(1, D))  # makes the channel
    with on_hosts("aabb"):
        for loss in (test_losses.clip, test_losses.sig_lip):
            test_losses.compare(world, [2, 5, 3, 1], loss)
