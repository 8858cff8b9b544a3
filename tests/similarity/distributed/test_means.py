"""Global means, ids and shared parameters, alone and over several processes."""

from __future__ import annotations

import math
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from megabatch.similarity import (
    global_mean,
    log_mean_exp,
    mean_row,
    pair_ids,
    replicated,
    sum_over_ranks,
)
from megabatch.similarity.distributed.comm import rank_and_size
from tests.similarity.distributed.comparison import compare, double
from tests.similarity.distributed.processes import World, on_devices, on_processes, shard_sizes

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
    one = torch.ones(2, 2, requires_grad=True)
    calls: tuple[Any, ...] = global_mean, mean_row, replicated, log_mean_exp, sum_over_ranks
    for call in (*(partial(call, one[0]) for call in calls), partial(pair_ids, 2)):
        with pytest.raises(TypeError, match="group"):
            call("all")


# --- over several processes -----------------------------------------------------------------------


@on_devices(2, 3)
def test_means_over_all_rows(world: World) -> None:
    """The mean over ranks of `global_mean` is that of all rows; each rank's `mean_row` is, too."""

    def means(group: Any, values: Tensor, rows: Tensor, weights: Any) -> list[Tensor]:
        n = rank_and_size(group)[1]
        return [global_mean(values, group, weights) / n, mean_row(rows, group, weights) / n]

    for sizes, weighted in product(shard_sizes(world.size), (False, True)):
        n = sum(sizes)
        weights = torch.rand(n, dtype=torch.float64) if weighted else None
        inputs = (double(n), sizes), (double(n, 3), sizes), (weights, sizes)
        compare(world, means, inputs, [None, None], frozen="2")
        whole = 500 * double(n)
        mean = log_mean_exp(world.shard(whole, sizes), None)
        torch.testing.assert_close(mean, whole.logsumexp(0) - math.log(n))


@on_devices(2, 3)
def test_no_row_or_no_weight_anywhere(world: World) -> None:
    """No row is an error on every process; without any weight all is zero."""
    for group in (None, "local"):
        with pytest.raises(ValueError, match=r"texts: expected at least one row over all.*got 0"):
            global_mean(torch.empty(0), group, name="texts")
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


@on_devices(2, 3)
def test_local_means_stay_local_and_ids_are_given_once(world: World) -> None:
    assert global_mean(torch.full((2,), float(world.rank)), "local") == world.rank
    assert replicated(torch.ones(()), "local").item() == 1
    assert mean_row(torch.full((2, 1), float(world.rank)), "local") == world.rank
    assert pair_ids(2, "local").tolist() == [0, 1]
    assert pair_ids(3, None).tolist() == [(world.rank << 40) + i for i in range(3)]


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
