from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import megabatch as mb
from tests.losses.reference import assert_equal, leaves, sincere_of_logits
from tests.similarity.features import MAKERS

#: Of features that are meant to have other lengths here.
pytestmark = pytest.mark.filterwarnings("ignore:.*lengths of rows")

LABELS = torch.tensor([0, 0, 0, 1, 1, -1, -1, 2, 3, 3, 3, 3])
AVERAGES = pytest.mark.parametrize("average", ["anchors", "pairs"])


@AVERAGES
@pytest.mark.parametrize("scale", [0.01, 14.3, 100.0])
@pytest.mark.parametrize("maker", MAKERS)
def test_equals_the_papers_formula(maker: str, scale: float, average: Any) -> None:
    x, _ = MAKERS[maker](12, 12, 5)
    loss = mb.SincereLoss(0.1, average=average)
    assert_equal(
        lambda x, s: loss(x, LABELS, temperature=1 / s),
        lambda x, s: sincere_of_logits(s * x @ x.T, LABELS, average=average),
        x,
        scale,
    )


@settings(deadline=None, max_examples=50)
@given(
    labels=st.lists(st.integers(-1, 5), min_size=1, max_size=20),
    columns=st.one_of(st.none(), st.lists(st.integers(-1, 5), min_size=1, max_size=15)),
    average=st.sampled_from(["anchors", "pairs"]),
    temperature=st.floats(0.02, 10),
)
def test_any_labels(labels: list[int], columns: Any, average: Any, temperature: float) -> None:
    torch.manual_seed(len(labels))
    x, y = MAKERS["clustered"](len(labels), len(columns or [0]), 4)
    kinds = torch.tensor(labels)
    others = None if columns is None else torch.tensor(columns)
    loss = mb.SincereLoss(temperature, average=average)
    assert_equal(
        lambda x, y: loss(x, kinds) if others is None else loss(x, kinds, y, others),
        lambda x, y: sincere_of_logits(
            x @ (x if others is None else y).T / temperature, kinds, others, average
        ),
        x,
        y,
    )


@pytest.mark.parametrize("classes", [1, 3, 40])
def test_classes_over_several_blocks(classes: int) -> None:
    """Blocks of 16 rows and 32 columns, within which classes begin and end."""
    labels = torch.arange(90) * 7 % classes - (torch.arange(90) % 11 == 0).long()
    x, y = MAKERS["random"](90, 70, 4)
    others = torch.arange(70) % (classes + 1)
    before = mb.similarity.set_workspace(64 << 10)
    try:
        assert_equal(
            lambda x, y: mb.SincereLoss(0.5)(x, labels) + mb.SincereLoss(0.5)(x, labels, y, others),
            lambda x, y: (
                sincere_of_logits(x @ x.T / 0.5, labels)
                + sincere_of_logits(x @ y.T / 0.5, labels, others)
            ),
            x,
            y,
        )
    finally:
        mb.similarity.set_workspace(before)


def test_one_positive_an_anchor_is_ntxent() -> None:
    x, y = MAKERS["learnt"](9, 9, 5)
    labels = torch.arange(9).repeat(2)
    for average in ("anchors", "pairs"):
        value = mb.SincereLoss(0.1, average=average)(torch.cat([x, y]), labels)  # type: ignore[arg-type]
        torch.testing.assert_close(value, mb.NTXentLoss(0.1)(x, y))


@AVERAGES
@pytest.mark.parametrize("labels", [torch.arange(4), torch.full((4,), -1)])
def test_no_anchor_with_a_positive_gives_zero(labels: torch.Tensor, average: Any) -> None:
    x, y = leaves(torch.randn(4, 3), torch.randn(2, 3))
    for references in ((), (y, torch.full((2,), 9)), (y[:0], torch.zeros(0).long())):
        loss = mb.SincereLoss(0.1, average=average)(x, labels, *references)
        loss.backward()
        assert loss == 0
        assert not x.grad.any()


def test_no_negative_gives_zero() -> None:
    (x,) = leaves(torch.randn(4, 3))
    loss = mb.SincereLoss(0.1)(x, torch.zeros(4, dtype=torch.int64))
    loss.backward()
    assert loss == 0
    assert not x.grad.any()


X, L = torch.randn(6, 4), torch.arange(6)


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ((X, L[:5]), ValueError, ("labels", "(6,)", "(5,)")),
        ((X, L.float()), TypeError, ("labels", "int64", "float32")),
        ((X, L, X), ValueError, ("reference_labels", "None")),
        ((X, L, X[:, :3], L), ValueError, ("references", "width 4", "3")),
    ],
)
def test_bad_arguments(arguments: Any, error: type, words: tuple[str, ...]) -> None:
    with pytest.raises(error) as caught:
        mb.SincereLoss(0.1)(*arguments)
    assert all(word in str(caught.value) for word in words)


def test_bad_average() -> None:
    with pytest.raises(ValueError, match=r"average.*anchors, pairs.*'rows'"):
        mb.SincereLoss(0.1, average="rows")  # type: ignore[arg-type]
