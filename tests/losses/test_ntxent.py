from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import megabatch as mb
from megabatch.similarity import eager, eager_softmax
from tests.losses.reference import (
    assert_equal,
    debiased_ntxent_of_logits,
    leaves,
    ntxent_of_logits,
)
from tests.similarity.features import MAKERS

#: Some feature matrices have rows that are not of unit length.
pytestmark = pytest.mark.filterwarnings("ignore:.*lengths of rows")


@pytest.mark.parametrize("views", [2, 3])
@pytest.mark.parametrize("scale", [0.01, 14.3, 100.0])
@pytest.mark.parametrize("maker", MAKERS)
def test_equals_simclrs_formula(maker: str, scale: float, views: int) -> None:
    pairs = [MAKERS[maker](7, 7, 5)[i % 2] for i in range(views)]
    loss = mb.NTXentLoss(0.5)

    def truth(*values: Any) -> Any:
        x = torch.cat(values[:-1])
        return ntxent_of_logits(values[-1] * x @ x.T, views)

    assert_equal(lambda *v: loss(*v[:-1], temperature=1 / v[-1]), truth, *pairs, scale)


@pytest.mark.parametrize("tau_plus", [0.02, 0.3])
@pytest.mark.parametrize("scale", [0.01, 2.0, 14.3])
@pytest.mark.parametrize("maker", MAKERS)
def test_debiased(maker: str, scale: float, tau_plus: float) -> None:
    """The formula of Chuang et al. 2020, with a learnt temperature."""
    loss = mb.NTXentLoss(0.5, tau_plus=tau_plus, normalize=True)

    def truth(x: Tensor, y: Tensor, s: Tensor) -> Tensor:
        z = F.normalize(torch.cat([x, y]))
        return debiased_ntxent_of_logits(s * z @ z.T, s, tau_plus)

    x, y = MAKERS[maker](7, 7, 5)
    assert_equal(lambda x, y, s: loss(x, y, temperature=1 / s), truth, x, y, scale)


def test_computes_half_of_the_matrix(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = []
    original = eager_softmax.forward_tile

    def counting(logits: Any, *rest: Any) -> None:
        sizes.append(logits.numel())
        original(logits, *rest)

    monkeypatch.setattr(eager, "block_shape", lambda like, *_: (10, 10))
    monkeypatch.setattr(eager_softmax, "forward_tile", counting)
    mb.NTXentLoss(0.5)(torch.randn(50, 4), torch.randn(50, 4))
    assert sum(sizes) == 100 * (100 + 10) // 2


def test_one_instance_has_loss_zero() -> None:
    x, y = leaves(torch.randn(1, 4), torch.randn(1, 4))
    for tau_plus in (0.0, 0.1):
        loss = mb.NTXentLoss(0.5, tau_plus=tau_plus)(x, y)
        loss.backward()
        assert loss == 0
        assert not x.grad.any()


def test_a_nan_gives_a_nan() -> None:
    x = torch.randn(5, 3)
    x[0, 0] = torch.nan
    assert mb.NTXentLoss(0.5)(torch.randn(5, 3), x).isnan()
    assert mb.NTXentLoss(0.5, tau_plus=0.1)(torch.randn(5, 3), x).isnan()


X = torch.randn(6, 4)


@pytest.mark.parametrize("loss", [mb.NTXentLoss, mb.DCLLoss])
@pytest.mark.parametrize(
    ("views", "error", "words"),
    [
        ((X,), TypeError, ("views", "two", "1")),
        ((X, X[:5]), ValueError, ("views[1]", "6 rows", "5")),
        ((X, X, X[:, :2]), ValueError, ("views[2]", "width 4", "2")),
        ((X, X.double()), TypeError, ("views[1]", "float64")),
        ((X[0], X[0]), ValueError, ("views[0]", "(4,)")),
        ((None, X), TypeError, ("views[0]", "NoneType")),
        ((X[:0], X[:0]), ValueError, ("views", "one row", "0")),
    ],
)
def test_bad_views(loss: Any, views: Any, error: type, words: tuple[str, ...]) -> None:
    with pytest.raises(error) as caught:
        loss(0.5)(*views)
    assert all(word in str(caught.value) for word in words)


@pytest.mark.parametrize("loss", [mb.NTXentLoss, mb.DCLLoss, mb.SupConLoss])
@pytest.mark.parametrize(
    ("temperature", "error", "word"),
    [(0, ValueError, "0"), (None, TypeError, "NoneType"), (torch.ones(2), ValueError, "(2,)")],
)
def test_bad_temperature(loss: Any, temperature: Any, error: type, word: str) -> None:
    with pytest.raises(error) as caught:
        loss(temperature)
    assert "temperature" in str(caught.value)
    assert word in str(caught.value)


@pytest.mark.parametrize(
    ("tau_plus", "error", "words"),
    [
        (1.0, ValueError, ("tau_plus", "below 1", "1.0")),
        (-0.1, ValueError, ("tau_plus", "-0.1")),
        ("0.1", TypeError, ("tau_plus", "str")),
        (0.1, ValueError, ("views", "two", "tau_plus=0.1", "3")),
    ],
)
def test_bad_tau_plus(tau_plus: Any, error: type, words: tuple[str, ...]) -> None:
    with pytest.raises(error) as caught:
        mb.NTXentLoss(0.5, tau_plus=tau_plus)(X, X, X)
    assert all(word in str(caught.value) for word in words)
