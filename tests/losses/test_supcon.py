from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import megabatch as mb
from tests.losses.reference import assert_equal, leaves, supcon_of_logits
from tests.similarity.features import MAKERS

#: Of features that are meant to have other lengths here.
pytestmark = pytest.mark.filterwarnings("ignore:.*lengths of rows")

LABELS = torch.tensor([0, 0, 0, 1, 1, -1, -1, 2, 3, 3, 3, 3])


@pytest.mark.parametrize("form", ["out", "in"])
@pytest.mark.parametrize("scale", [0.01, 14.3, 100.0])
@pytest.mark.parametrize("maker", MAKERS)
def test_equals_the_papers_formulas(maker: str, scale: float, form: Any) -> None:
    x, _ = MAKERS[maker](12, 12, 5)
    loss = mb.SupConLoss(0.1, form=form)
    assert_equal(
        lambda x, s: loss(x, LABELS, temperature=1 / s),
        lambda x, s: supcon_of_logits(s * x @ x.T, LABELS, form=form),
        x,
        scale,
    )


@pytest.mark.parametrize("form", ["out", "in"])
@pytest.mark.parametrize("maker", MAKERS)
def test_references(maker: str, form: Any) -> None:
    x, y = MAKERS[maker](12, 9, 5)
    kinds = torch.tensor([0, 0, 3, 3, 5, -1, 1, 0, 6])
    loss = mb.SupConLoss(0.1, form=form)
    assert_equal(
        lambda x, y: loss(x, LABELS, y, kinds),
        lambda x, y: supcon_of_logits(x @ y.T / 0.1, LABELS, kinds, form),
        x,
        y,
    )


@settings(deadline=None, max_examples=50)
@given(
    labels=st.lists(st.integers(-1, 5), min_size=1, max_size=20),
    columns=st.one_of(st.none(), st.lists(st.integers(-1, 5), min_size=1, max_size=15)),
    form=st.sampled_from(["out", "in"]),
    temperature=st.floats(0.02, 10),
)
def test_any_labels(labels: list[int], columns: Any, form: Any, temperature: float) -> None:
    torch.manual_seed(len(labels))
    x, y = MAKERS["clustered"](len(labels), len(columns or [0]), 4)
    kinds = torch.tensor(labels)
    others = None if columns is None else torch.tensor(columns)
    loss = mb.SupConLoss(temperature, form=form)
    assert_equal(
        lambda x, y: loss(x, kinds) if others is None else loss(x, kinds, y, others),
        lambda x, y: supcon_of_logits(
            x @ (x if others is None else y).T / temperature, kinds, others, form
        ),
        x,
        y,
    )


def test_views_with_instances_as_labels_is_ntxent() -> None:
    x, y = MAKERS["learnt"](9, 9, 5)
    labels = torch.arange(9).repeat(2)
    ours = mb.SupConLoss(0.1)(torch.cat([x, y]), labels)
    torch.testing.assert_close(ours, mb.NTXentLoss(0.1)(x, y), rtol=0, atol=0)


@pytest.mark.parametrize("form", ["out", "in"])
@pytest.mark.parametrize("labels", [torch.arange(4), torch.full((4,), -1)])
def test_no_anchor_with_a_positive_gives_zero(labels: torch.Tensor, form: Any) -> None:
    x, y = leaves(torch.randn(4, 3), torch.randn(2, 3))
    for references in ((), (y, torch.full((2,), 9)), (y[:0], torch.zeros(0).long())):
        loss = mb.SupConLoss(0.1, form=form)(x, labels, *references)
        loss.backward()
        assert loss == 0
        assert not x.grad.any()


def test_a_nan_gives_a_nan() -> None:
    x = torch.randn(4, 3)
    x[3, 0] = torch.nan  # itself without a positive: it reaches the others as a negative
    for form in ("out", "in"):
        assert mb.SupConLoss(0.1, form=form)(x, torch.tensor([0, 0, 0, 1])).isnan()


X, L = torch.randn(6, 4), torch.arange(6)


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ((X[0], L), ValueError, ("embeddings", "(4,)")),
        ((X, L[:5]), ValueError, ("labels", "(6,)", "(5,)")),
        ((X, L.float()), TypeError, ("labels", "int64", "float32")),
        ((X, L.bool()), TypeError, ("labels", "int64", "bool")),
        ((X, list("abcdef")), TypeError, ("labels", "list")),
        ((X, None), TypeError, ("labels", "NoneType")),
        ((X, L, X), ValueError, ("reference_labels", "None")),
        ((X, L, None, L), ValueError, ("references", "None")),
        ((X, L, X[:, :3], L), ValueError, ("references", "width 4", "3")),
        ((X, L, X[:5], L), ValueError, ("reference_labels", "(5,)", "(6,)")),
    ],
)
def test_bad_arguments(arguments: Any, error: type, words: tuple[str, ...]) -> None:
    with pytest.raises(error) as caught:
        mb.SupConLoss(0.1)(*arguments)
    assert all(word in str(caught.value) for word in words)


def test_bad_form() -> None:
    with pytest.raises(ValueError, match=r"form.*out, in.*'both'"):
        mb.SupConLoss(0.1, form="both")  # type: ignore[arg-type]
