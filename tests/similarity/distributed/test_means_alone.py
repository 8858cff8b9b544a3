"""Global means, ids and shared parameters on one process; `test_means` tests several."""

from __future__ import annotations

import math

import pytest
import torch

from megabatch.similarity.distributed.means import (
    global_mean,
    log_mean_exp,
    mean_row,
    pair_ids,
    replicated,
)


def test_global_mean() -> None:
    values, weights = torch.tensor([1.0, 2.0, 6.0]), torch.tensor([1.0, 0.0, 3.0])
    assert global_mean(values, None) == 3
    assert global_mean(values, "local", weights) == 19 / 4
    with pytest.raises(ValueError, match=r"rows: expected at least one row.*got 0"):
        global_mean(values[:0], None, name="rows")


@pytest.mark.parametrize("n", [0, 3])
def test_global_mean_of_no_weight_is_zero(n: int) -> None:
    values = torch.ones(n, requires_grad=True)
    mean = global_mean(values, None, torch.zeros(n))
    mean.backward()
    assert mean == 0
    assert not values.grad.any()


def test_log_mean_exp() -> None:
    mean = log_mean_exp(torch.tensor([1000.0, 1000.0 + math.log(3)], requires_grad=True), None)
    torch.testing.assert_close(mean, torch.tensor(1000 + math.log(2)))
    assert not mean.requires_grad
    assert log_mean_exp(torch.tensor([0.0, torch.nan]), None).isnan()


def test_mean_row() -> None:
    x, weights = torch.randn(5, 3, dtype=torch.float64), torch.rand(5, dtype=torch.float64)
    torch.testing.assert_close(mean_row(x, None), x.mean(0))
    torch.testing.assert_close(mean_row(x, None, weights), weights @ x / weights.sum())
    assert mean_row(x.half(), None).dtype == torch.float32
    assert not mean_row(x[:0], None).any()
    assert not mean_row(x, None, 0 * weights).any()


def test_ids_and_parameters() -> None:
    assert pair_ids(3, None).tolist() == [0, 1, 2]
    scale = torch.tensor(2.0)
    assert replicated(scale, None) is scale


def test_bad_group() -> None:
    for call in (
        lambda: global_mean(torch.ones(2), "all"),
        lambda: mean_row(torch.ones(2, 2), "all"),
        lambda: pair_ids(2, "all"),
        lambda: replicated(torch.ones(2), "all"),
    ):
        with pytest.raises(TypeError, match="group"):
            call()
