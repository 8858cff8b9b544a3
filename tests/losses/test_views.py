"""NTXentLoss and DCLLoss against their formulas."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import megabatch as mb
from megabatch.losses.terms import debiased
from megabatch.similarity import eager
from tests.losses.reference import (
    assert_equal,
    dcl_of_logits,
    debiased_ntxent_of_logits,
    leaves,
    ntxent_of_logits,
)
from tests.similarity.features import MAKERS

#: Some feature matrices have rows that are not of unit length.
pytestmark = pytest.mark.filterwarnings("ignore:.*lengths of rows")

SCALES = (0.01, 14.3, 100.0)


@pytest.mark.parametrize("views", [2, 3])
@pytest.mark.parametrize(
    ("loss", "formula"), [(mb.NTXentLoss(0.5), ntxent_of_logits), (mb.DCLLoss(0.5), dcl_of_logits)]
)
@pytest.mark.parametrize("maker", MAKERS)
def test_equals_the_papers_formula(maker: str, loss: Any, formula: Any, views: int) -> None:
    def truth(*values: Any) -> Tensor:
        x = torch.cat(values[:-1])
        return formula(values[-1] * x @ x.T, views)

    for scale in SCALES:
        given = [MAKERS[maker](7, 7, 5)[i % 2] for i in range(views)]
        assert_equal(lambda *v: loss(*v[:-1], temperature=1 / v[-1]), truth, *given, scale)


@pytest.mark.parametrize("tau_plus", [0.02, 0.3])
@pytest.mark.parametrize("maker", MAKERS)
def test_debiased(maker: str, tau_plus: float) -> None:
    """The formula of Chuang et al. 2020, with a learnt temperature."""
    loss = mb.NTXentLoss(0.5, tau_plus=tau_plus, normalize=True)

    def truth(x: Tensor, y: Tensor, s: Tensor) -> Tensor:
        z = F.normalize(torch.cat([x, y]))
        return debiased_ntxent_of_logits(s * z @ z.T, s, tau_plus)

    for scale in (0.01, 2.0, 14.3):
        x, y = MAKERS[maker](7, 7, 5)
        assert_equal(lambda x, y, s: loss(x, y, temperature=1 / s), truth, x, y, scale)


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("sigma", [0.02, 0.5])
def test_weighted_positives(sigma: float, normalize: bool) -> None:
    """The weights of lightly's DCLWLoss, over the whole batch."""
    first, second = MAKERS["learnt"](7, 7, 5)

    def truth(x: Tensor, y: Tensor, s: Tensor) -> Tensor:
        if normalize:
            x, y = F.normalize(x), F.normalize(y)
        weights = 2 - 7 * F.softmax((x * y).sum(1).detach() / sigma, dim=0)
        z = torch.cat([x, y])
        other = ~torch.eye(7, dtype=torch.bool).repeat(2, 2)
        negative = (s * z @ z.T).masked_fill(~other, -torch.inf).logsumexp(1)
        return (negative - weights.repeat(2) * s * (x * y).sum(1).repeat(2)).mean()

    loss = mb.DCLLoss(0.1, sigma=sigma, normalize=normalize)
    assert_equal(lambda x, y, s: loss(x, y, temperature=1 / s), truth, first, second, 10.0)
    large = torch.full((3, 2), 100.0)
    assert mb.DCLLoss(1.0, sigma=sigma)(large, large).isfinite()


def test_computes_half_of_the_matrix(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = []
    original = eager.forward_tile

    def counting(logits: Any, *rest: Any) -> None:
        sizes.append(logits.numel())
        original(logits, *rest)

    monkeypatch.setattr(eager, "block_shape", lambda like, *_: (10, 10))
    monkeypatch.setattr(eager, "forward_tile", counting)
    mb.NTXentLoss(0.5)(torch.randn(50, 4), torch.randn(50, 4))
    assert sum(sizes) == 100 * (100 + 10) // 2


@pytest.mark.parametrize(
    "loss",
    [
        *(mb.NTXentLoss(0.5), mb.NTXentLoss(0.5, tau_plus=0.1)),
        *(mb.DCLLoss(0.5), mb.DCLLoss(0.5, sigma=0.5)),
    ],
)
def test_one_instance_has_loss_zero(loss: Any) -> None:
    x, y = leaves(torch.randn(1, 4), torch.randn(1, 4))
    value = loss(x, y)
    value.backward()
    assert value == 0
    assert not x.grad.any()


# --- the debiased sum of negatives ----------------------------------------------------------------


def test_the_sum_at_its_floor_and_where_exponentials_overflow() -> None:
    """Numbers on either side of the floor, and logits whose exponentials overflow."""
    positive, count = torch.tensor([0.0, 3.0, 1000.0]), torch.tensor(4.0)
    negative = torch.tensor([2.0, 2.0, 1010.0])
    found = debiased(positive, negative, torch.tensor(1.0), count, 0.1)
    first = math.log((math.exp(2) - 0.4) / 0.9)
    third = 1010 + math.log((1 - 0.4 * math.exp(-10)) / 0.9)
    torch.testing.assert_close(found, torch.tensor([first, math.log(4) - 1, third]))


def test_the_sum_of_nothing_and_of_nan() -> None:
    nothing = debiased(
        torch.zeros(1), torch.tensor([-torch.inf]), torch.tensor(1.0), torch.tensor(0.0), 0.1
    )
    assert nothing == -torch.inf
    for bad in ([torch.nan, 0.0], [0.0, torch.nan]):
        parts = torch.tensor(bad).split(1)
        assert debiased(*parts, torch.tensor(1.0), torch.tensor(4.0), 0.1).isnan()
