from __future__ import annotations

import pytest
import torch
from sklearn.metrics import recall_score, top_k_accuracy_score

from megabatch.evaluation.tasks import accuracy


def test_accuracies_equal_scikit_learns() -> None:
    generator = torch.Generator().manual_seed(1)
    classes = torch.randn(12, 8, generator=generator)
    labels = torch.randint(0, 10, (300,), generator=generator).pow(2) // 10  # two never occur
    images = 0.5 * classes[labels] + torch.randn(300, 8, generator=generator)
    scores = images @ classes.T
    everything, occurring = list(range(12)), sorted(set(labels.tolist()))
    expected = {
        f"top{k}": top_k_accuracy_score(labels, scores, k=k, labels=everything) for k in (1, 5)
    }
    expected["mean_per_class_recall"] = recall_score(
        labels, scores.argmax(1), labels=occurring, average="macro", zero_division=0
    )
    assert accuracy(images, classes, labels) == pytest.approx(expected)


def test_equal_classes_score_chance() -> None:
    labels = torch.arange(10).repeat(3)
    expected = {"top1": 0.1, "top5": 0.5, "mean_per_class_recall": 0.1}
    assert accuracy(torch.ones(30, 4), torch.ones(10, 4), labels) == pytest.approx(expected)
