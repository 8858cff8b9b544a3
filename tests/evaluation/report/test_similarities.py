from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from sklearn.metrics import roc_auc_score

from megabatch.evaluation.answers import Answers
from megabatch.evaluation.report import similarities
from megabatch.evaluation.report.similarities import embedding_map, heat_map, histogram
from megabatch.evaluation.tasks import Matched
from tests.evaluation.report.conftest import image_ids


def test_the_histogram_counts_positives_and_negatives(matched: Matched) -> None:
    got = histogram(matched)  # of all pairs: there are few
    scores = matched.features @ matched.text_features.T
    right = image_ids(matched)[:, None] == torch.arange(len(matched.texts))
    positives, negatives = scores[right], scores[~right]
    assert sum(got.positives) == len(positives)
    assert sum(got.negatives) == len(negatives)
    assert (got.low, got.high) == pytest.approx((float(scores.min()), float(scores.max())))
    edges = np.linspace(got.low, got.high, len(got.negatives) + 1)
    counts = np.histogram(negatives.numpy(), edges)[0]
    assert np.abs(counts - got.negatives).sum() <= 4  # an edge, rounded
    assert got.mean_positive == pytest.approx(float(positives.mean()), abs=1e-6)
    assert got.mean_negative == pytest.approx(float(negatives.mean()), abs=1e-6)
    area = roc_auc_score(right.flatten().numpy(), scores.flatten().numpy())
    assert got.separated == pytest.approx(area, abs=1e-9)


def test_a_sample_is_drawn_from_many(matched: Matched, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(similarities, "_SAMPLED", 50)
    got = histogram(matched)
    assert sum(got.positives) == 50
    assert 50 * 45 <= sum(got.negatives) <= 50 * 50


def test_equal_features_have_a_histogram_and_no_map(matched: Matched) -> None:
    same = replace(
        matched,
        features=torch.ones_like(matched.features) / 4,
        text_features=torch.ones_like(matched.text_features) / 4,
    )
    got = histogram(same)
    assert got.separated == 0.5
    assert sum(got.positives) == len(matched.indices)
    assert embedding_map(same) == []


def test_one_text_for_all_has_no_negatives(matched: Matched) -> None:
    n = len(matched.indices)
    ids = torch.zeros(n, dtype=torch.int64)
    one = replace(
        matched,
        texts=["a"],
        text_features=matched.text_features[:1],
        answers=Answers.by_ids(ids, ids[:1]),
    )
    got = histogram(one)
    assert sum(got.negatives) == 0
    assert sum(got.positives) == n
    assert len(heat_map(one).texts) == 1


def test_the_heat_map_s_diagonal_has_the_positives(matched: Matched) -> None:
    got = heat_map(matched)
    assert len(got.texts) == 40
    assert got.texts == sorted(set(got.texts))
    for i, (text, row) in enumerate(zip(got.texts, got.cosines, strict=True)):
        column = matched.texts.index(text)
        images = (image_ids(matched) == column).nonzero().flatten()
        positives = matched.features[images] @ matched.text_features[column]
        assert float((positives - row[i]).abs().min()) < 1e-3
    other = matched.text_features[matched.texts.index(got.texts[1])]
    own = matched.features[image_ids(matched) == matched.texts.index(got.texts[0])]
    assert float((own @ other - got.cosines[0][1]).abs().min()) < 1e-3


def test_the_map_holds_images_and_their_texts(
    matched: Matched, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(similarities, "_MAPPED", 30)
    apart = replace(matched, text_features=matched.text_features + 5)  # a modality gap
    points = embedding_map(apart)
    images, texts = ([p for p in points if p.second is second] for second in (False, True))
    assert len(images) == 30
    assert {p.text for p in texts} == {p.text for p in images}
    assert all(0 <= p.x <= 1 and 0 <= p.y <= 1 and p.group is None for p in points)
    places = {p.text: np.array([p.x, p.y]) for p in texts}
    own = np.mean([np.linalg.norm(places[p.text] - (p.x, p.y)) for p in images])
    others = [np.linalg.norm(q - (p.x, p.y)) for p in images for q in places.values()]
    assert own < 0.5 * np.mean(others)


def test_points_of_classes_have_their_class_and_few_classes_are_all_there(
    matched: Matched, monkeypatch: pytest.MonkeyPatch
) -> None:
    points = embedding_map(matched, of_classes=True)
    named = {p.text for p in points if p.second}
    assert named == {p.text for p in points if not p.second}
    assert len(named) <= 10
    monkeypatch.setattr(similarities, "_ALL_CLASSES", len(matched.texts))
    points = embedding_map(matched, of_classes=True)
    assert [p.text for p in points if p.second] == matched.texts
    assert all(matched.texts[p.group] == p.text for p in points if p.group is not None)
    assert all(p.group is not None for p in points)


def test_few_images_have_no_map(matched: Matched) -> None:
    few = replace(
        matched,
        indices=matched.indices[:4],
        features=matched.features[:4],
        answers=Answers.by_ids(image_ids(matched)[:4], torch.arange(len(matched.texts))),
    )
    assert embedding_map(few) == []
    assert len(heat_map(few).texts) == len(set(image_ids(few).tolist()))
