from __future__ import annotations

import pytest
import torch
from sklearn.metrics import recall_score, top_k_accuracy_score
from torch import Tensor

from megabatch.evaluation import classification
from megabatch.evaluation.classification import Ranked, chance, rank_classes


def problem() -> tuple[Tensor, Tensor, Tensor]:
    """300 images, their classes (of which two never occur), and 12 classes' features."""
    generator = torch.Generator().manual_seed(1)
    classes = torch.randn(12, 8, generator=generator)
    labels = torch.randint(0, 10, (300,), generator=generator).pow(2) // 10
    images = 0.5 * classes[labels] + torch.randn(300, 8, generator=generator)
    return images, labels, classes


def similar(images: Tensor, labels: Tensor, classes: Tensor) -> Ranked:
    return rank_classes(lambda x: x @ classes.T, images, labels)


def test_figures_equal_scikit_learns() -> None:
    images, labels, classes = problem()
    scores = images @ classes.T
    ranked = similar(images, labels, classes)
    everything = list(range(12))
    expected = {
        f"top{k}": top_k_accuracy_score(labels, scores, k=k, labels=everything) for k in (1, 5)
    }
    best = scores.argmax(1)
    occurring = sorted(set(labels.tolist()))
    expected["mean_per_class_recall"] = recall_score(
        labels, best, labels=occurring, average="macro", zero_division=0
    )
    assert ranked.figures() == pytest.approx(expected)
    by_class = ranked.recall_by_class()
    assert set(by_class) == set(labels.tolist())
    for label, recall in by_class.items():
        assert recall == pytest.approx(float((best[labels == label] == label).double().mean()))


def test_blocks_of_images_do_not_change_the_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    images, labels, classes = problem()
    expected = similar(images, labels, classes)
    monkeypatch.setattr(classification, "_ROWS", 70)
    got = similar(images, labels, classes)
    for name in ("above", "equal"):
        assert torch.equal(getattr(got, name), getattr(expected, name))


def test_equal_classes_score_chance() -> None:
    labels = torch.arange(10).repeat(3)
    expected = {"top1": 0.1, "top5": 0.5, "mean_per_class_recall": 0.1}
    assert chance(10) == pytest.approx(expected)
    same = similar(torch.ones(30, 4), labels, torch.ones(10, 4))
    assert same.figures() == pytest.approx(expected)
    silent = rank_classes(lambda x: x.new_zeros(len(x), 10), torch.ones(30, 4), labels)
    assert silent.figures() == pytest.approx(expected)
    assert chance(3)["top5"] == 1
