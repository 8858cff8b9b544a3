from __future__ import annotations

from typing import Any

import pytest
import torch

import megabatch as mb
from tests.losses.reference import assert_equal, dcl_of_logits, leaves
from tests.similarity.features import MAKERS

#: Of features that are meant to have other lengths here.
pytestmark = pytest.mark.filterwarnings("ignore:.*lengths of rows")


@pytest.mark.parametrize("views", [2, 3])
@pytest.mark.parametrize("scale", [0.01, 14.3, 100.0])
@pytest.mark.parametrize("maker", MAKERS)
def test_equals_the_papers_formula(maker: str, scale: float, views: int) -> None:
    pairs = [MAKERS[maker](7, 7, 5)[i % 2] for i in range(views)]
    loss = mb.DCLLoss(0.5)

    def truth(*values: Any) -> Any:
        x = torch.cat(values[:-1])
        return dcl_of_logits(values[-1] * x @ x.T, views)

    assert_equal(lambda *v: loss(*v[:-1], temperature=1 / v[-1]), truth, *pairs, scale)


def test_one_instance_has_loss_zero() -> None:
    x, y = leaves(torch.randn(1, 4), torch.randn(1, 4))
    loss = mb.DCLLoss(0.5)(x, y)
    loss.backward()
    assert loss == 0
    assert not x.grad.any()


def test_a_nan_gives_a_nan() -> None:
    x = torch.randn(5, 3)
    x[0, 0] = torch.nan
    assert mb.DCLLoss(0.5)(torch.randn(5, 3), x).isnan()
