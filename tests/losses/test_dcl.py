from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import megabatch as mb
from tests.losses.reference import assert_equal, dcl_of_logits, leaves
from tests.similarity.features import MAKERS

#: Some feature matrices have rows that are not of unit length.
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
        logits = s * z @ z.T
        other = ~torch.eye(7, dtype=torch.bool).repeat(2, 2)
        negative = logits.masked_fill(~other, -torch.inf).logsumexp(1)
        return (negative - weights.repeat(2) * s * (x * y).sum(1).repeat(2)).mean()

    loss = mb.DCLLoss(0.1, sigma=sigma, normalize=normalize)
    assert_equal(lambda x, y, s: loss(x, y, temperature=1 / s), truth, first, second, 10.0)


def test_weights_of_large_products_are_finite() -> None:
    x = torch.full((3, 2), 100.0)
    assert mb.DCLLoss(1.0, sigma=0.5)(x, x).isfinite()


@pytest.mark.parametrize(
    ("sigma", "error", "words"),
    [
        (0, ValueError, ("sigma", "positive", "0")),
        ("0.5", TypeError, ("sigma", "str")),
        (0.5, ValueError, ("views", "two", "sigma=0.5", "3")),
    ],
)
def test_bad_sigma(sigma: Any, error: type, words: tuple[str, ...]) -> None:
    x = torch.randn(5, 3)
    with pytest.raises(error) as caught:
        mb.DCLLoss(0.5, sigma=sigma)(x, x, x)
    assert all(word in str(caught.value) for word in words)


def test_one_instance_has_loss_zero() -> None:
    x, y = leaves(torch.randn(1, 4), torch.randn(1, 4))
    for sigma in (None, 0.5):
        loss = mb.DCLLoss(0.5, sigma=sigma)(x, y)
        loss.backward()
        assert loss == 0
        assert not x.grad.any()


def test_a_nan_gives_a_nan() -> None:
    x = torch.randn(5, 3)
    x[0, 0] = torch.nan
    assert mb.DCLLoss(0.5)(torch.randn(5, 3), x).isnan()
    assert mb.DCLLoss(0.5, sigma=0.5)(torch.randn(5, 3), x).isnan()
