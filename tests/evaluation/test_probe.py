from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression
from sklearn.neighbors import KNeighborsClassifier
from torch import Tensor

from megabatch.errors import UsageError
from megabatch.evaluation import probe
from megabatch.evaluation.probe import choose_and_fit, fit, neighbour_votes


@pytest.mark.parametrize(("k", "temperature"), [(1, 0.07), (20, 0.07), (50, 1.0)])
def test_votes_equal_scikit_learns_weighted_neighbours(k: int, temperature: float) -> None:
    generator = torch.Generator().manual_seed(0)
    train, test = (F.normalize(torch.randn(n, 6, generator=generator)) for n in (1500, 90))
    labels = torch.randint(0, 7, (1500,), generator=generator)

    def weights(distances: np.ndarray) -> np.ndarray:
        return np.exp((1 - distances) / temperature)  # scikit-learn's cosine distance

    peer = KNeighborsClassifier(k, weights=weights, metric="cosine", algorithm="brute")
    shares = torch.from_numpy(peer.fit(train, labels).predict_proba(test)).float()
    votes = neighbour_votes(train, labels, 7, k=k, temperature=temperature)(test)
    torch.testing.assert_close(votes / votes.sum(1, keepdim=True), shares, rtol=1e-4, atol=1e-5)


def test_a_small_temperature_overflows_nothing_and_few_images_all_vote() -> None:
    train = torch.eye(3)
    votes = neighbour_votes(train, torch.tensor([1, 0, 1]), 3, k=20, temperature=1e-4)(train)
    assert votes.isfinite().all()
    assert votes.argmax(1).tolist() == [1, 0, 1]
    even = neighbour_votes(train, torch.tensor([1, 0, 1]), 3, temperature=1e9)(train)
    torch.testing.assert_close(even, torch.tensor([[1.0, 2.0, 0.0]]).expand(3, 3))


@pytest.fixture(scope="module")
def digits() -> tuple[Tensor, Tensor]:
    """Scikit-learn's digits, normalised like features, in float64."""
    data = load_digits()
    return F.normalize(torch.from_numpy(data.data)), torch.from_numpy(data.target.astype(np.int64))


@pytest.mark.parametrize("c", [0.01, 1.0, 100.0])
def test_the_fit_equals_scikit_learns(
    digits: tuple[Tensor, Tensor], c: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, y = (part[:500] for part in digits)
    monkeypatch.setattr(probe, "_ROWS", 128)  # several parts
    got = fit(x, y, 10, c)
    peer = LogisticRegression(C=c, max_iter=3000, tol=1e-8).fit(x, y)
    # The largest weights are 0.09, 2.7 and 11; the minimum is flat where they are large.
    torch.testing.assert_close(got.weight.data, torch.from_numpy(peer.coef_), rtol=1e-3, atol=1e-2)
    shares = torch.from_numpy(peer.predict_proba(digits[0]))
    torch.testing.assert_close(got(digits[0]).softmax(1), shares, rtol=1e-3, atol=5e-4)


def test_the_regularisation_is_chosen_on_images_that_were_held_out(
    digits: tuple[Tensor, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[float, int]] = []

    def pretend(x: Tensor, y: Tensor, n: int, c: float) -> Callable[[Tensor], Tensor]:
        """A classifier that is right for the more images, the nearer C is to 30."""
        asked.append((c, len(x)))
        wrong = int(40 * abs(np.log10(c / 30)))
        labels = digits[1].clone()
        labels[:: max(1, 300 // max(1, wrong))] = 10  # of which there are none

        def scores(held_out: Tensor) -> Tensor:
            assert len(held_out) == len(labels) - len(x)
            rows = (held_out[:, None] == digits[0]).all(2).int().argmax(1)
            return F.one_hot(labels[rows], 11)

        return scores

    monkeypatch.setattr(probe, "fit", pretend)
    _, c = choose_and_fit(*digits, 10)
    assert c == 10
    assert asked == [(10.0**e, 1437) for e in range(-6, 7)] + [(10, 1797)]


def test_one_image_leaves_nothing_to_choose_on() -> None:
    with pytest.raises(UsageError, match="--class-train-data: expected at least two images"):
        choose_and_fit(torch.eye(1, 3), torch.zeros(1, dtype=torch.int64), 3)
