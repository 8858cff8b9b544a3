"""NTXentLoss and DCLLoss; test_random_calls.py compares them with their formulas."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import megabatch as mb
from megabatch.losses.terms import debiased
from megabatch.similarity import eager
from tests.similarity.exact import leaves

#: Some feature matrices have rows that are not of unit length.
pytestmark = pytest.mark.filterwarnings("ignore:.*lengths of rows")


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


def test_weights_of_positives_do_not_overflow() -> None:
    large = torch.full((3, 2), 100.0)
    assert mb.DCLLoss(1.0, sigma=0.02)(large, large).isfinite()


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
