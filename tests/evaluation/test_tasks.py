from __future__ import annotations

import numpy as np
import pytest

from megabatch.evaluation import tasks
from megabatch.evaluation.tasks import pixel_neighbour_recalls


def brute_force(
    train: np.ndarray, names: np.ndarray, query: np.ndarray, right: np.ndarray, k: int
) -> float:
    """Expected recall@k over random orders of names at the same distance."""
    found = []
    for q, name in zip(query.astype(np.float64), right, strict=True):
        distance = np.square(train.astype(np.float64) - q).sum((1, 2))
        of_name = {n: distance[names == n].min() for n in np.unique(names)}
        nearer = sum(d < of_name[name] for d in of_name.values())
        as_near = sum(d == of_name[name] for d in of_name.values())
        found.append(min(max((k - nearer) / as_near, 0), 1))
    return float(np.mean(found))


@pytest.mark.parametrize("levels", [2, 256])  # two grey levels make many ties
@pytest.mark.parametrize("names", [12, 200])
def test_equals_all_distances(levels: int, names: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tasks, "_QUERIES_PER_BLOCK", 17)
    draw = np.random.default_rng(levels + names)
    side = 4 if levels == 2 else 8
    train = (draw.integers(0, levels, (400, side, side)) * (255 // (levels - 1))).astype(np.uint8)
    query = (draw.integers(0, levels, (60, side, side)) * (255 // (levels - 1))).astype(np.uint8)
    train_ids = draw.integers(0, names, 400)
    query_ids = draw.choice(train_ids, 60)
    got = pixel_neighbour_recalls(train, train_ids, query, query_ids, ks=(1, 3, 10))
    for k in (1, 3, 10):
        expected = brute_force(train, train_ids, query, query_ids, k)
        # If more names tie than ranks are left, any of them may be found.
        assert got[f"recall@{k}"] == pytest.approx(expected, abs=0.03 if levels == 2 else 1e-6)


def test_an_image_of_the_training_set_is_found() -> None:
    draw = np.random.default_rng(0)
    train = draw.integers(0, 256, (50, 32, 32)).astype(np.uint8)
    ids = np.arange(50)
    assert pixel_neighbour_recalls(train, ids, train[::-1], ids[::-1], ks=(1,)) == {"recall@1": 1.0}


def test_names_fill_the_places_not_images() -> None:
    """Many images of a wrong name are nearer than the right one, but take one rank only."""
    train = np.zeros((41, 2, 2), np.uint8)
    train[40] = 255
    ids = np.array([0] * 40 + [1])
    query = np.full((1, 2, 2), 100, np.uint8)
    got = pixel_neighbour_recalls(train, ids, query, np.array([1]), ks=(1, 2))
    assert got == {"recall@1": 0.0, "recall@2": 1.0}
