"""Global means, ids and shared parameters over several processes."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist

from megabatch.similarity.distributed.means import (
    global_mean,
    log_mean_exp,
    mean_row,
    pair_ids,
    replicated,
    sum_over_ranks,
)
from tests.similarity.distributed.processes import World, on_devices, on_processes, shard_sizes


def mean_over_ranks(value: torch.Tensor) -> torch.Tensor:
    value = value.detach().clone()
    dist.all_reduce(value)
    return value / dist.get_world_size()


@on_devices(2, 3, 4)
def test_the_mean_over_ranks_is_the_global_mean(world: World) -> None:
    for sizes in shard_sizes(world.size):
        whole = torch.randn(sum(sizes), dtype=torch.float64)
        weights = torch.rand_like(whole)
        for w, truth in (
            (None, whole.mean()),
            (weights, (weights * whole).sum() / weights.sum()),
        ):
            values = world.shard(whole, sizes).clone().requires_grad_()
            share = global_mean(values, None, None if w is None else world.shard(w, sizes))
            torch.testing.assert_close(mean_over_ranks(share), truth)
            share.backward()
            factors = torch.ones_like(whole) if w is None else w
            expected = world.size * factors / factors.sum()
            torch.testing.assert_close(values.grad, world.shard(expected, sizes))


@on_devices(2, 3)
def test_log_mean_exp(world: World) -> None:
    for sizes in shard_sizes(world.size):
        values = 500 * torch.randn(sum(sizes), dtype=torch.float64)
        truth = values.logsumexp(0) - math.log(len(values))
        torch.testing.assert_close(log_mean_exp(world.shard(values, sizes), None), truth)


@on_devices(2, 3)
def test_no_row_anywhere_is_an_error_on_every_process(world: World) -> None:
    with pytest.raises(ValueError, match="texts: expected at least one row over all processes"):
        global_mean(torch.empty(0), None, name="texts")


@on_devices(2)
def test_no_weight_anywhere_is_zero(world: World) -> None:
    values = torch.randn(3 * world.rank, requires_grad=True)
    share = global_mean(values, None, torch.zeros(3 * world.rank))
    share.backward()
    assert share == 0
    assert values.grad.eq(0).all()


@on_processes(2)  # on a GPU the mean is NaN
def test_weights_on_one_process_only_are_an_error(world: World) -> None:
    weights = torch.ones(2) if world.rank else None
    with pytest.raises(ValueError, match=r"weights: expected on all ranks or on none.* 1 of 2"):
        global_mean(torch.ones(2), None, weights)


@on_devices(2, 3)
def test_local_means_stay_local(world: World) -> None:
    assert global_mean(torch.full((2,), float(world.rank)), "local") == world.rank
    assert replicated(torch.ones(()), "local").item() == 1
    assert mean_row(torch.full((2, 1), float(world.rank)), "local") == world.rank
    assert pair_ids(2, "local").tolist() == [0, 1]


@on_devices(2, 3, 4)
def test_mean_row_and_its_gradient(world: World) -> None:
    for sizes in shard_sizes(world.size):
        whole = torch.randn(sum(sizes), 3, dtype=torch.float64, requires_grad=True)
        weights = torch.rand(sum(sizes), dtype=torch.float64)
        upstream = torch.randn(world.size, 3, dtype=torch.float64)
        for w in (None, weights):
            x = world.shard(whole, sizes).detach().clone().requires_grad_()
            mine = mean_row(x, None, None if w is None else world.shard(w, sizes))
            truth = mean_row(whole, "local", w)
            torch.testing.assert_close(mine, truth)
            (gradient,) = torch.autograd.grad(truth @ upstream.sum(0), whole)
            (mine @ upstream[world.rank]).backward()
            torch.testing.assert_close(x.grad, world.shard(gradient, sizes))


@on_devices(2, 3, 4)
def test_ids_are_given_once(world: World) -> None:
    mine = pair_ids(3, None)
    table = [torch.empty_like(mine) for _ in range(world.size)]
    dist.all_gather(table, mine)
    everything = torch.cat(table)
    assert everything.unique().numel() == 3 * world.size
    assert everything.min() == 0
    assert everything.max() < 1 << 62


@on_devices(3)
def test_replicated_averages_gradients_once_or_twice(world: World) -> None:
    for shape in ((), (1,)):
        p = torch.ones(shape, requires_grad=True)
        once = replicated(p, None)
        value = once + replicated(once, None)
        assert once.shape == shape
        assert torch.equal(once, p)
        (value * world.rank).sum().backward()
        torch.testing.assert_close(p.grad, torch.full(shape, 2.0))  # mean of 0, 2 and 4


@on_devices(2)
def test_sum_over_ranks(world: World) -> None:
    x = torch.tensor([1.0 + world.rank, 5.0], requires_grad=True)
    total = sum_over_ranks(x, None)
    assert total.tolist() == [3, 10]
    (total * (world.rank + 1)).sum().backward()
    assert x.grad.tolist() == [3, 3]


@on_devices(2)
def test_compiles(world: World) -> None:
    def value(x: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
        ids = pair_ids(x.shape[0], None, device=x.device)
        rows = x * replicated(p, None) - mean_row(x[:, None], None) + (ids >= 0)
        return global_mean(rows, None) + global_mean(rows, None, torch.ones(x.shape[0]))

    x, p = torch.arange(3.0), torch.tensor(2.0, requires_grad=True)
    compiled = torch.compile(value, backend="aot_eager", fullgraph=True)(x, p)
    torch.testing.assert_close(compiled, value(x, p))
    compiled.backward()
