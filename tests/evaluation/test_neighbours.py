from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from sklearn.neighbors import KNeighborsClassifier

from megabatch.evaluation.neighbours import neighbour_votes


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


@pytest.mark.parametrize(
    ("rows", "settings", "message"),
    [
        (2, {"k": 0}, "k must be at least 1, got 0"),
        (2, {"temperature": 0.0}, "temperature must be above 0, got 0.0"),
        (0, {}, "train has no rows"),
    ],
)
def test_impossible_settings_are_refused(rows: int, settings: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        neighbour_votes(torch.ones(rows, 2), torch.zeros(rows, dtype=torch.int64), 2, **settings)
