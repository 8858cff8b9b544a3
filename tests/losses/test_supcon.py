"""SupConLoss alone; `test_labelled` compares it with its formulas."""

from __future__ import annotations

import pytest
import torch

import megabatch as mb

#: Some feature matrices have rows that are not of unit length.
pytestmark = pytest.mark.filterwarnings("ignore:.*lengths of rows")


def test_a_nan_gives_a_nan() -> None:
    x = torch.randn(4, 3)
    x[3, 0] = torch.nan  # the row has no positive, and is a negative of all others
    for form in ("out", "in"):
        assert mb.SupConLoss(0.1, form=form)(x, torch.tensor([0, 0, 0, 1])).isnan()


def test_bad_form() -> None:
    with pytest.raises(ValueError, match=r"form.*out, in.*'both'"):
        mb.SupConLoss(0.1, form="both")  # type: ignore[arg-type]
