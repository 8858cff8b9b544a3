from __future__ import annotations

import pytest
import torch

from megabatch.benchmarking import truth
from megabatch.benchmarking.inputs import features
from megabatch.similarity import dense


@pytest.mark.parametrize("strip", [7, 1 << 27])
def test_equals_autograd_through_the_matrix(strip: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(truth, "_STRIP_NUMBERS", strip * 33)
    x, y = features(33, 5, torch.float64, "cpu")
    leaves = [
        x.requires_grad_(),
        y.requires_grad_(),
        torch.tensor(14.3, dtype=x.dtype).requires_grad_(),
    ]
    loss = dense.clip_loss(*leaves)
    loss.backward()
    exact = truth.clip(x, y, 14.3)
    assert exact.dbias is None
    for mine, theirs in zip(
        exact[:4], (loss.detach(), *(leaf.grad for leaf in leaves)), strict=True
    ):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-12)


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
    exact = truth.siglip(x.detach(), y.detach(), 14.3, -10.0)
    for mine, theirs in zip(exact, (loss.detach(), *gradients), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-12)


def test_logsumexp_of_a_rectangle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(truth, "_STRIP_NUMBERS", 7 * 12)
    inputs = x, y, scale = leaves(33, 12, 14.3)
    rows, columns = dense.logsumexp(x, y, scale)
    loss = rows.mean() + columns.mean()
    gradients = torch.autograd.grad(loss, inputs)
    exact = truth.logsumexp(x.detach(), y.detach(), 14.3)
    for mine, theirs in zip(exact[:4], (loss.detach(), *gradients), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-12)


def test_loss_of_copies_follows_from_the_loss_of_one() -> None:
    x, y = features(33, 5, torch.float64, "cpu")
    direct = truth.clip(x.repeat(3, 1), y.repeat(3, 1), 14.3)
    derived = truth.of_copies(truth.clip(x, y, 14.3), 3)
    torch.testing.assert_close(derived.loss, direct.loss)
    torch.testing.assert_close(derived.dscale, direct.dscale)
    assert truth.row_error(direct.dx, derived.dx) < 1e-12
    assert truth.row_error(direct.dy, derived.dy) < 1e-12
    wrong = direct.dx.clone()
    wrong[80] *= 1.5
    assert truth.row_error(wrong, derived.dx) == pytest.approx(0.5)


def test_row_error_is_that_of_the_worst_row() -> None:
    exact = torch.tensor([[3.0, 4.0], [0.0, 0.001]]).double()
    value = exact + torch.tensor([[0.05, 0.0], [0.0, 0.0001]])
    assert truth.row_error(value, exact) == pytest.approx(0.1)


def test_relative_error() -> None:
    assert truth.relative_error(torch.tensor(2.2), torch.tensor(-2.0).double()) == pytest.approx(
        2.1
    )
