from __future__ import annotations

import pytest
import torch

from machinery import truth
from machinery.inputs import features
from megabatch.benchmarking.measure import dense_clip_loss


@pytest.mark.parametrize("strip", [7, 1 << 27])
def test_equals_autograd_through_the_matrix(strip: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(truth, "_STRIP_NUMBERS", strip * 33)
    x, y = features(33, 5, torch.float64, "cpu")
    leaves = [
        x.requires_grad_(),
        y.requires_grad_(),
        torch.tensor(14.3, dtype=x.dtype).requires_grad_(),
    ]
    loss = dense_clip_loss(*leaves)
    loss.backward()
    exact = truth.clip(x, y, 14.3)
    assert exact.dbias is None
    for mine, theirs in zip(
        exact[:4], (loss.detach(), *(leaf.grad for leaf in leaves)), strict=True
    ):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-12)


def test_row_error_is_that_of_the_worst_row() -> None:
    exact = torch.tensor([[3.0, 4.0], [0.0, 0.001]]).double()
    value = exact + torch.tensor([[0.05, 0.0], [0.0, 0.0001]])
    assert truth.row_error(value, exact) == pytest.approx(0.1)


def test_relative_error() -> None:
    assert truth.relative_error(torch.tensor(2.2), torch.tensor(-2.0).double()) == pytest.approx(
        2.1
    )
