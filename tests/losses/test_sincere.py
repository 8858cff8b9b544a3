"""SincereLoss alone; `test_labelled` compares it with its formulas."""

from __future__ import annotations

import pytest
import torch

import megabatch as mb
from tests.losses.reference import assert_equal, leaves, sincere_of_logits
from tests.similarity.features import MAKERS

#: Some feature matrices have rows that are not of unit length.
pytestmark = pytest.mark.filterwarnings("ignore:.*lengths of rows")


@pytest.mark.parametrize("classes", [1, 3, 40])
def test_classes_over_several_blocks(classes: int) -> None:
    """Classes begin and end within blocks of 16 rows and 32 columns."""
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


def test_no_negative_gives_zero() -> None:
    (x,) = leaves(torch.randn(4, 3))
    loss = mb.SincereLoss(0.1)(x, torch.zeros(4, dtype=torch.int64))
    loss.backward()
    assert loss == 0
    assert not x.grad.any()


def test_bad_average() -> None:
    with pytest.raises(ValueError, match=r"average.*anchors, pairs.*'rows'"):
        mb.SincereLoss(0.1, average="rows")  # type: ignore[arg-type]
