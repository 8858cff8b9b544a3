"""A grid of ranks against the dense matrix of one process, in float64."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

from megabatch import ClipLoss, GradientCache, similarity
from megabatch.similarity import settings
from megabatch.similarity.distributed import grid
from megabatch.similarity.distributed.comm import rank_and_size
from tests.gradient_cache.parallel import batches_of, gradients, new_model, on_one_process
from tests.similarity.distributed import test_losses, test_sigmoid, test_statistics
from tests.similarity.distributed.processes import World, on_devices, on_processes
from tests.similarity.distributed.test_statistics import D, some_ids
from tests.similarity.distributed.transfers import gathered_in_rounds, grid_of, received_bytes

#: Numbers of columns of grids of so many ranks.
COLUMNS = {4: [2], 6: [3]}


def double(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64)


@on_devices(4, 6)
def test_every_option(world: World) -> None:
    n = world.size
    for columns in COLUMNS[n]:
        for sizes in ([3] * n, [2, 5, 3, 4, 1, 6][:n], [0, 4, 0, 1, 3, 0][:n]):
            with grid_of(columns):
                test_statistics.compare_options(world, sizes)
                test_sigmoid.compare_options(world, sizes)


@on_devices(2)
def test_a_single_row_or_column_of_ranks(world: World) -> None:
    for columns, sizes in product((1, 2), ([3, 3], [5, 2])):
        ids = some_ids(sum(sizes)), some_ids(sum(sizes))
        with grid_of(columns):
            test_statistics.compare(world, sizes, sizes, ids=ids)
            test_statistics.compare(world, sizes, ids=(ids[0], ids[0]))
            test_sigmoid.compare(world, sizes, sizes, ids, double(sum(sizes)).abs())


@on_devices(4)
def test_other_numbers_of_columns_than_of_rows(world: World) -> None:
    for rows, columns in (([2, 0, 3, 1], [4, 1, 0, 2]), ([2, 1, 3, 1], [4, 1, 1, 2])):
        with grid_of(2):
            ids = some_ids(sum(rows)), some_ids(sum(columns))
            test_statistics.compare(world, rows, columns, ids=ids)
            test_sigmoid.compare(world, rows, columns, ids)


@on_processes(6)
def test_a_sigmoid_sum_is_that_of_a_ranks_own_rows(world: World) -> None:
    x, y = double(4, D) + world.rank, double(4, D)
    alone = similarity.softplus_sum(x, y, 2.0, -1.0)
    with grid_of(3):
        torch.testing.assert_close(similarity.softplus_sum(x, y, 2.0, -1.0), alone)


@on_devices(4)
def test_every_loss_on_a_mesh(world: World) -> None:
    ranks = torch.arange(world.size).flip(0).view(2, world.size // 2).T  # an order of its own
    mesh = DeviceMesh(world.device, ranks)
    for loss in test_losses.LOSSES:
        test_losses.compare(world, [2, 5, 3, 4], loss, mesh)


@on_devices(4)
def test_rounds(world: World) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grid, "most_sharing", lambda *_: 4)
        for sizes in ([7] * 4, [7, 2, 0, 5]):
            ids = some_ids(sum(sizes)), some_ids(sum(sizes))
            for overlap in (True, False):
                before = settings.set_overlap(overlap)
                with grid_of(2), gathered_in_rounds(2 * 3 * D * 8):
                    test_statistics.compare(world, sizes, sizes)
                    test_statistics.compare(world, sizes, sizes, ids=ids)
                    test_sigmoid.compare(world, sizes, sizes, ids)
                settings.set_overlap(before)


@on_processes(4)
def test_upstream_gradients_that_only_one_rank_has(world: World) -> None:
    x, y = (double(3, D).requires_grad_() for _ in range(2))
    found = []
    for columns in (2, 0):
        with grid_of(columns):
            rows, cols = similarity.logsumexp(x, y)
            used = (cols.sum(), rows.sum(), 0 * rows.sum(), 0 * cols.sum())[world.rank]
            found.append(torch.autograd.grad(used, (x, y)))
    torch.testing.assert_close(*found, rtol=0, atol=1e-12)


@on_processes(4)
def test_ranks_and_top_k_go_over_the_whole_mesh(world: World) -> None:
    x, y, target = double(3, D), double(3, D), torch.arange(3) + 3 * world.rank
    mesh = init_device_mesh("cpu", (2, 2))
    assert rank_and_size(mesh) == (world.rank, 4)
    for found, wanted in (
        (similarity.ranks(x, y, target, group=mesh), similarity.ranks(x, y, target)),
        (similarity.topk(x, y, 5, group=mesh), similarity.topk(x, y, 5)),
    ):
        assert all(map(torch.equal, found, wanted))


@on_processes(6)
def test_meshes_of_other_shapes(world: World) -> None:
    """One dimension, one rank; three dimensions or a part of the ranks are an error."""
    mesh = init_device_mesh("cpu", (3, 2, 1), mesh_dim_names=("a", "b", "c"))
    x, y = double(3, D), double(3, D)
    with pytest.raises(ValueError, match="expected a mesh of 1 or 2 dimensions, got 3"):
        similarity.logsumexp(x, y, group=mesh)
    with pytest.raises(ValueError, match=r"expected a mesh of all 6 ranks, .* got one of 2 ranks"):
        similarity.logsumexp(x, y, group=mesh["b", "c"])
    line, one = mesh["b"], mesh["c"]
    alone, _ = similarity.logsumexp(x, y, group="local")
    wanted, _ = similarity.logsumexp(x, y, group=line.get_group())
    for group, truth in ((line, wanted), (one, alone)):
        found, _ = similarity.logsumexp(x, y, group=group)
        torch.testing.assert_close(found, truth, rtol=0, atol=1e-12)


@on_processes(4)
def test_ranks_whose_grids_differ(world: World) -> None:
    x = torch.randn(3, D)
    mesh = init_device_mesh("cpu", (2, 2))
    with grid_of(world.rank % 2), pytest.raises(ValueError, match=r"grid: never.*grid: 1 columns"):
        similarity.logsumexp(x, x)
    with pytest.raises(ValueError, match=r"rank 0: [^;]*mesh: 2 x 2; ranks 1, 2, 3: "):
        similarity.logsumexp(x, x, group=None if world.rank else mesh)


@on_processes(2)
def test_a_mesh_in_a_compiled_function(world: World) -> None:
    mesh = init_device_mesh("cpu", (1, 2))

    def value(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return ClipLoss(group=mesh)(x, y, 2.0)

    inputs = [torch.randn(3, D, dtype=torch.float64) for _ in range(2)]
    mine, theirs = ([t.clone().requires_grad_() for t in inputs] for _ in range(2))
    torch.compile(value, backend="aot_eager")(*mine).backward()
    value(*theirs).backward()
    for a, b in zip(mine, theirs, strict=True):
        torch.testing.assert_close(a.grad, b.grad)


def hybrid(model: Any, mesh: DeviceMesh) -> Any:
    for part in (model.image, model.text, model):
        fully_shard(part, mesh=mesh)
    return model


@on_processes(4)
def test_gradient_caching_under_hsdp(world: World) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    for sizes in ([4] * 4, [5, 1, 2, 3]):
        own, whole = batches_of(world.rank, sizes)
        truth, wanted = on_one_process([whole])
        for cached in (True, False):
            model = hybrid(new_model(), mesh)
            loss = ClipLoss(group=mesh)
            if cached:
                value = GradientCache(model, loss, 2, group=mesh)(*own)
            else:
                value = loss(*model(*own))
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
            with grid_of(columns), gathered_in_rounds(6 * x.nbytes - (not saves)) as patch:
                received = received_bytes(patch)
                if symmetric:
                    similarity.split_logsumexp(x)[0].negative.sum().backward()
                else:
                    sum(map(torch.sum, similarity.logsumexp(x, y))).backward()
            # Statistics are vectors: a state and an upstream of two numbers a row each.
            statistics = 2 * 2 * (4 if dtype == torch.bfloat16 else 8) * m * shards
            assert sum(received) == each * d * m * shards + statistics
