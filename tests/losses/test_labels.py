"""SupConLoss and SincereLoss against their formulas."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import megabatch as mb
from tests.losses.reference import assert_equal, sincere_of_logits, supcon_of_logits
from tests.similarity.exact import leaves
from tests.similarity.features import MAKERS

#: Some feature matrices have rows that are not of unit length.
pytestmark = pytest.mark.filterwarnings("ignore:.*lengths of rows")

#: The loss, its formula for a matrix of logits, and the options of both.
LOSSES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "supcon out": (mb.SupConLoss, supcon_of_logits, {"form": "out"}),
    "supcon in": (mb.SupConLoss, supcon_of_logits, {"form": "in"}),
    "sincere anchors": (mb.SincereLoss, sincere_of_logits, {"average": "anchors"}),
    "sincere pairs": (mb.SincereLoss, sincere_of_logits, {"average": "pairs"}),
}
labelled = pytest.mark.parametrize("name", LOSSES)


def made(name: str) -> Any:
    loss, _, options = LOSSES[name]
    return loss(0.1, **options)


def formula(name: str, logits: Tensor, labels: Tensor, others: Tensor | None = None) -> Tensor:
    _, of_logits, options = LOSSES[name]
    value: Tensor = of_logits(logits, labels, others, **options)
    return value


@settings(deadline=None, max_examples=150)
@given(
    row_labels=st.lists(st.integers(-1, 5), min_size=1, max_size=20),
    column_labels=st.one_of(st.none(), st.lists(st.integers(-1, 5), min_size=1, max_size=15)),
    name=st.sampled_from(sorted(LOSSES)),
    maker=st.sampled_from(sorted(MAKERS)),
    scale=st.one_of(st.sampled_from([0.01, 14.3, 100.0]), st.floats(0.01, 100)),
)
def test_equals_the_papers_formula(
    row_labels: list[int], column_labels: list[int] | None, name: str, maker: str, scale: float
) -> None:
    """Among the anchors themselves, or against references."""
    torch.manual_seed(len(row_labels))
    x, y = MAKERS[maker](len(row_labels), len(column_labels or [0]), 4)
    labels = torch.tensor(row_labels)
    loss = made(name)
    if column_labels is None:
        assert_equal(
            lambda x, s: loss(x, labels, temperature=1 / s),
            lambda x, s: formula(name, s * x @ x.T, labels),
            *(x, scale),
        )
        return
    others = torch.tensor(column_labels)
    assert_equal(
        lambda x, y, s: loss(x, labels, y, others, temperature=1 / s),
        lambda x, y, s: formula(name, s * x @ y.T, labels, others),
        *(x, y, scale),
    )


@labelled
@pytest.mark.parametrize("labels", [torch.arange(4), torch.full((4,), -1)])
def test_no_anchor_with_a_positive_gives_zero(labels: Tensor, name: str) -> None:
    for rows in (4, 1):
        x, y = leaves(torch.randn(rows, 3), torch.randn(2, 3))
        for references in ((), (y, torch.full((2,), 9)), (y[:0], torch.zeros(0).long())):
            loss = made(name)(x, labels[:rows], *references)
            loss.backward()
            assert loss == 0
            assert not x.grad.any()


def test_sincere_without_negatives_is_zero() -> None:
    (x,) = leaves(torch.randn(4, 3))
    loss = mb.SincereLoss(0.1)(x, torch.zeros(4, dtype=torch.int64))
    loss.backward()
    assert loss == 0
    assert not x.grad.any()


@pytest.mark.parametrize("classes", [1, 3, 40])
def test_sincere_with_classes_over_several_blocks(classes: int, small_blocks: None) -> None:
    """Classes begin and end within blocks of 16 rows and 32 columns."""
    labels = torch.arange(60) * 7 % classes - (torch.arange(60) % 11 == 0).long()
    others = torch.arange(70) % (classes + 1)
    assert_equal(
        lambda x, y: mb.SincereLoss(0.5)(x, labels) + mb.SincereLoss(0.5)(x, labels, y, others),
        lambda x, y: (
            sincere_of_logits(x @ x.T / 0.5, labels)
            + sincere_of_logits(x @ y.T / 0.5, labels, others)
        ),
        *MAKERS["random"](60, 70, 4),
    )
