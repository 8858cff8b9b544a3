"""Exact losses against autograd through the whole matrix."""

from __future__ import annotations

import pytest
import torch

from machinery import exact as exact_losses
from machinery import truth
from machinery.inputs import features
from tests.similarity import dense


def leaves(m: int, n: int, *numbers: float) -> list[torch.Tensor]:
    x, y = features(m, 5, torch.float64, "cpu", n=n)
    scalars = [torch.tensor(number, dtype=x.dtype) for number in numbers]
    return [t.requires_grad_() for t in (x, y, *scalars)]


@pytest.mark.parametrize("strip", [7, 1 << 27])
def test_sigmoid_loss_and_its_bias(strip: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(truth, "_STRIP_NUMBERS", strip * 33)
    inputs = x, y, scale, bias = leaves(33, 33, 14.3, -10.0)
    z = scale * x @ y.T + bias
    loss = -torch.nn.functional.logsigmoid(z * (2 * torch.eye(33, dtype=z.dtype) - 1)).sum() / 33
    gradients = torch.autograd.grad(loss, inputs)
    exact = exact_losses.siglip(x.detach(), y.detach(), 14.3, -10.0)
    for mine, theirs in zip(exact, (loss.detach(), *gradients), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-12)


def test_logsumexp_of_a_rectangle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(truth, "_STRIP_NUMBERS", 7 * 12)
    inputs = x, y, scale = leaves(33, 12, 14.3)
    rows, columns = dense.logsumexp(x, y, scale)
    loss = rows.mean() + columns.mean()
    gradients = torch.autograd.grad(loss, inputs)
    exact = exact_losses.logsumexp(x.detach(), y.detach(), 14.3)
    for mine, theirs in zip(exact[:4], (loss.detach(), *gradients), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-12)


def test_loss_of_copies_follows_from_the_loss_of_one() -> None:
    x, y = features(33, 5, torch.float64, "cpu")
    direct = truth.clip(x.repeat(3, 1), y.repeat(3, 1), 14.3)
    derived = exact_losses.of_copies(truth.clip(x, y, 14.3), 3)
    torch.testing.assert_close(derived.loss, direct.loss)
    torch.testing.assert_close(derived.dscale, direct.dscale)
    assert truth.row_error(direct.dx, derived.dx) < 1e-12
    assert truth.row_error(direct.dy, derived.dy) < 1e-12
    wrong = direct.dx.clone()
    wrong[80] *= 1.5
    assert truth.row_error(wrong, derived.dx) == pytest.approx(0.5)
