"""Exact losses against each contender in float64; a dense one is autograd through the matrix."""

from __future__ import annotations

import pytest
import torch

from machinery import exact as exact_losses
from machinery import family, step, truth
from machinery.family import LOSSES
from machinery.inputs import Case, features

CONTENDERS = [
    (name, contender.name)
    for name, loss in LOSSES.items()
    for contender in loss.contenders.values()
    if contender.runs_on("cpu")
]


@pytest.mark.parametrize("strip", [7, 1 << 27])
@pytest.mark.parametrize(("loss", "name"), CONTENDERS)
def test_every_contender_is_the_loss(
    loss: str, name: str, strip: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(truth, "_STRIP_NUMBERS", strip * 33)
    monkeypatch.setattr(family, "CLASSES", 5)
    for n in (None, 12) if loss == "logsumexp" else (None,):
        made = Case(loss, name, "cpu", "float64", b=33, d=8, scale=30.0, n=n)
        inputs = step.make_inputs(made)
        call = step.forward_backward(LOSSES[loss].contenders[name].load(), made, inputs)
        value, exact = call(), step.exact_result(made, inputs)
        found = [value, inputs.x.grad, inputs.y.grad, *(scalar.grad for scalar in inputs.scalars)]
        for mine, theirs in zip(found, [t for t in exact if t is not None], strict=True):
            torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-12)


def test_masks_hit_something() -> None:
    x, y = features(64, 8, torch.float64, "cpu")
    ids = family.duplicates(x)
    assert 64 < (ids[:, None] == ids).sum() < 64 * 4
    assert 50 < len(family.duplicates(x).unique()) < 64
    products = x @ y.T
    assert (products > products.diagonal()[:, None] + family.MARGIN).sum() > 64


def test_loss_of_copies_follows_from_the_loss_of_one() -> None:
    x, y = features(33, 5, torch.float64, "cpu")
    direct = truth.clip(x.repeat(3, 1), y.repeat(3, 1), 14.3)
    derived = exact_losses.of_copies(truth.clip(x, y, 14.3), 3)
    torch.testing.assert_close(derived.loss, direct.loss)
    torch.testing.assert_close(derived.dscale, direct.dscale)
    assert truth.row_error(direct.dx, derived.dx) < 1e-12
    assert truth.row_error(direct.dy, derived.dy) < 1e-12
    wrong = direct.dx.clone()
    wrong[80] *= 1.5  # the error is that of the worst row
    assert truth.row_error(wrong, derived.dx) == pytest.approx(0.5)
    off = truth.relative_error(torch.tensor(2.2), torch.tensor(-2.0).double())
    assert off == pytest.approx(2.1)
