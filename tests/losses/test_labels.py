"""SupConLoss and SincereLoss against their formulas."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import megabatch as mb
from tests.losses.reference import assert_equal, leaves, sincere_of_logits, supcon_of_logits
from tests.similarity.features import MAKERS

#: Some feature matrices have rows that are not of unit length.
pytestmark = pytest.mark.filterwarnings("ignore:.*lengths of rows")

LABELS = torch.tensor([0, 0, 0, 1, 1, -1, -1, 2, 3, 3, 3, 3])
REFERENCE_LABELS = torch.tensor([0, 0, 3, 3, 5, -1, 1, 0, 6])
#: The loss, its formula for a matrix of logits, and the options of both.
LOSSES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "supcon out": (mb.SupConLoss, supcon_of_logits, {"form": "out"}),
    "supcon in": (mb.SupConLoss, supcon_of_logits, {"form": "in"}),
    "sincere anchors": (mb.SincereLoss, sincere_of_logits, {"average": "anchors"}),
    "sincere pairs": (mb.SincereLoss, sincere_of_logits, {"average": "pairs"}),
}
labelled = pytest.mark.parametrize("name", LOSSES)


def made(name: str, temperature: float = 0.1) -> Any:
    loss, _, options = LOSSES[name]
    return loss(temperature, **options)


def formula(name: str, logits: Tensor, labels: Tensor, others: Tensor | None = None) -> Tensor:
    _, of_logits, options = LOSSES[name]
    value: Tensor = of_logits(logits, labels, others, **options)
    return value


@labelled
@pytest.mark.parametrize("maker", MAKERS)
def test_equals_the_papers_formula(maker: str, name: str) -> None:
    loss = made(name)
    for scale in (0.01, 14.3, 100.0):
        assert_equal(
            lambda x, s: loss(x, LABELS, temperature=1 / s),
            lambda x, s: formula(name, s * x @ x.T, LABELS),
            *(MAKERS[maker](12, 12, 5)[0], scale),
        )


@labelled
@pytest.mark.parametrize("maker", MAKERS)
def test_references(maker: str, name: str) -> None:
    x, y = MAKERS[maker](12, 9, 5)
    loss = made(name)
    assert_equal(
        lambda x, y: loss(x, LABELS, y, REFERENCE_LABELS),
        lambda x, y: formula(name, x @ y.T / 0.1, LABELS, REFERENCE_LABELS),
        x,
        y,
    )


@settings(deadline=None, max_examples=60)
@given(
    row_labels=st.lists(st.integers(-1, 5), min_size=1, max_size=20),
    column_labels=st.one_of(st.none(), st.lists(st.integers(-1, 5), min_size=1, max_size=15)),
    name=st.sampled_from(sorted(LOSSES)),
    temperature=st.floats(0.02, 10),
)
def test_any_labels(
    row_labels: list[int], column_labels: list[int] | None, name: str, temperature: float
) -> None:
    torch.manual_seed(len(row_labels))
    x, y = MAKERS["clustered"](len(row_labels), len(column_labels or [0]), 4)
    labels = torch.tensor(row_labels)
    others = None if column_labels is None else torch.tensor(column_labels)
    loss = made(name, temperature)
    assert_equal(
        lambda x, y: loss(x, labels) if others is None else loss(x, labels, y, others),
        lambda x, y: formula(
            name, x @ (x if others is None else y).T / temperature, labels, others
        ),
        x,
        y,
    )


@labelled
def test_two_views_with_instances_as_labels_are_ntxent(name: str) -> None:
    x, y = MAKERS["learnt"](9, 9, 5)
    value = made(name)(torch.cat([x, y]), torch.arange(9).repeat(2))
    torch.testing.assert_close(value, mb.NTXentLoss(0.1)(x, y), rtol=0, atol=1e-12)


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
