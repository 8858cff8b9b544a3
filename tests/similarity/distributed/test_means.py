"""Global means, ids and shared parameters, alone and over several processes."""

from __future__ import annotations

import math
from functools import partial
from itertools import product

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megabatch.similarity.distributed.means import (
    global_mean,
    log_mean_exp,
    mean_row,
    pair_ids,
    replicated,
    sum_over_ranks,
)
from tests.similarity.distributed.processes import World, on_devices, on_processes, shard_sizes


def mean_over_ranks(value: Tensor) -> Tensor:
    value = value.detach().clone()
    dist.all_reduce(value)
    return value / dist.get_world_size()


# --- alone ----------------------------------------------------------------------------------------


def test_alone() -> None:
    values, weights = torch.tensor([1.0, 2.0, 6.0]), torch.tensor([1.0, 0.0, 3.0])
    assert global_mean(values, None) == 3
    assert global_mean(values, "local", weights) == 19 / 4
    x, weights = torch.randn(5, 3, dtype=torch.float64), torch.rand(5, dtype=torch.float64)
    torch.testing.assert_close(mean_row(x, None), x.mean(0))
    torch.testing.assert_close(mean_row(x, None, weights), weights @ x / weights.sum())
    assert mean_row(x.half(), None).dtype == torch.float32
    assert not mean_row(x[:0], None).any()
    assert not mean_row(x, None, 0 * weights).any()
    assert pair_ids(3, None).tolist() == [0, 1, 2]
    assert replicated(values, None) is values


def test_log_mean_exp_of_large_values() -> None:
    mean = log_mean_exp(torch.tensor([1000.0, 1000.0 + math.log(3)], requires_grad=True), None)
    torch.testing.assert_close(mean, torch.tensor(1000 + math.log(2)))
    assert not mean.requires_grad
    assert log_mean_exp(torch.tensor([0.0, torch.nan]), None).isnan()


def test_bad_group() -> None:
    one = torch.ones(2, 2)
    for call in (partial(global_mean, one[0]), partial(mean_row, one), partial(pair_ids, 2)):
        with pytest.raises(TypeError, match="group"):
            call("all")
    with pytest.raises(TypeError, match="group"):
        replicated(one, "all")


# --- over several processes -----------------------------------------------------------------------


@on_devices(2, 3)
def test_the_mean_over_ranks_is_the_global_mean(world: World) -> None:
    for sizes, weighted in product(shard_sizes(world.size), (False, True)):
        whole = torch.randn(sum(sizes), dtype=torch.float64)
        factors = torch.rand_like(whole) if weighted else torch.ones_like(whole)
        values = world.shard(whole, sizes).clone().requires_grad_()
        share = global_mean(values, None, world.shard(factors, sizes) if weighted else None)
        truth = (factors * whole).sum() / factors.sum()
        torch.testing.assert_close(mean_over_ranks(share), truth)
        share.backward()
        expected = world.size * factors / factors.sum()
        torch.testing.assert_close(values.grad, world.shard(expected, sizes))
        log_mean = (500 * whole).logsumexp(0) - math.log(len(whole))
        torch.testing.assert_close(log_mean_exp(500 * values, None), log_mean)


@on_devices(2, 3)
def test_no_row_anywhere_is_an_error_on_every_process(world: World) -> None:
    for group in (None, "local"):
        with pytest.raises(ValueError, match=r"texts: expected at least one row over all.*got 0"):
            global_mean(torch.empty(0), group, name="texts")


@on_devices(2)
def test_no_weight_anywhere_is_zero(world: World) -> None:
    for group, n in ((None, 3 * world.rank), ("local", 0), ("local", 3)):
        values = torch.randn(n, requires_grad=True)
        share = global_mean(values, group, torch.zeros(n))
        share.backward()
        assert share == 0
        assert values.grad.eq(0).all()


@on_processes(2)  # on a GPU the mean is NaN
def test_weights_on_one_process_only_are_an_error(world: World) -> None:
    weights = torch.ones(2) if world.rank else None
    with pytest.raises(ValueError, match=r"weights: expected on all ranks or on none.* 1 of 2"):
        global_mean(torch.ones(2), None, weights)


@on_devices(2)
def test_local_means_stay_local(world: World) -> None:
    assert global_mean(torch.full((2,), float(world.rank)), "local") == world.rank
    assert replicated(torch.ones(()), "local").item() == 1
    assert mean_row(torch.full((2, 1), float(world.rank)), "local") == world.rank
    assert pair_ids(2, "local").tolist() == [0, 1]


@on_devices(2, 3)
def test_mean_row_and_its_gradient(world: World) -> None:
    for sizes, weighted in product(shard_sizes(world.size), (False, True)):
        whole = torch.randn(sum(sizes), 3, dtype=torch.float64, requires_grad=True)
        weights = torch.rand(sum(sizes), dtype=torch.float64) if weighted else None
        upstream = torch.randn(world.size, 3, dtype=torch.float64)
        x = world.shard(whole, sizes).detach().clone().requires_grad_()
        mine = mean_row(x, None, None if weights is None else world.shard(weights, sizes))
        truth = mean_row(whole, "local", weights)
        torch.testing.assert_close(mine, truth)
        (gradient,) = torch.autograd.grad(truth @ upstream.sum(0), whole)
        (mine @ upstream[world.rank]).backward()
        torch.testing.assert_close(x.grad, world.shard(gradient, sizes))


@on_devices(2, 3)
def test_ids_are_given_once(world: World) -> None:
    mine = pair_ids(3, None)
    table = [torch.empty_like(mine) for _ in range(world.size)]
    dist.all_gather(table, mine)
    everything = torch.cat(table)
    assert everything.unique().numel() == 3 * world.size
    assert everything.min() == 0
    assert everything.max() < 1 << 62


@on_devices(3)
def test_gradients_of_all_ranks(world: World) -> None:
    """`replicated` averages them, once or twice; those of a sum are summed."""
    for shape in ((), (1,)):
        p = torch.ones(shape, requires_grad=True)
        once = replicated(p, None)
        value = once + replicated(once, None)
        assert once.shape == shape
        assert torch.equal(once, p)
        (value * world.rank).sum().backward()
        torch.testing.assert_close(p.grad, torch.full(shape, 2.0))  # mean of 0, 2 and 4
    x = torch.tensor([1.0 + world.rank, 5.0], requires_grad=True)
    total = sum_over_ranks(x, None)
    assert total.tolist() == [6, 15]
    (total * (world.rank + 1)).sum().backward()
    assert x.grad.tolist() == [6, 6]


@on_devices(2)
def test_compiles(world: World) -> None:
    def value(x: Tensor, p: Tensor) -> Tensor:
        ids = pair_ids(x.shape[0], None, device=x.device)
        rows = x * replicated(p, None) - mean_row(x[:, None], None) + (ids >= 0)
        return global_mean(rows, None) + global_mean(rows, None, torch.ones(x.shape[0]))

    x, p = torch.arange(3.0), torch.tensor(2.0, requires_grad=True)
    compiled = torch.compile(value, backend="aot_eager", fullgraph=True)(x, p)
    torch.testing.assert_close(compiled, value(x, p))
    compiled.backward()
