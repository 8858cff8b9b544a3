from __future__ import annotations

import pytest
import torch

from machinery import family, step, truth
from machinery.family import LOSSES
from machinery.inputs import Case, features

NAMES = [
    (n, c.name)
    for n, loss in LOSSES.items()
    if n != "clip"
    for c in loss.contenders.values()
    if c.runs_on("cpu")
]


@pytest.mark.parametrize("strip", [7, 1 << 27])
@pytest.mark.parametrize(("loss", "name"), NAMES)
def test_every_contender_is_the_loss(
    loss: str, name: str, strip: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(truth, "_STRIP_NUMBERS", strip * 33)
    monkeypatch.setattr(family, "CLASSES", 5)
    made = Case(loss, name, "cpu", "float64", b=33, d=8, scale=30.0)
    inputs = step.make_inputs(made)
    call = step.forward_backward(LOSSES[loss].contenders[name].load(), made, inputs)
    value, exact = call(), step.exact_result(made, inputs)
    found = [value, inputs.x.grad, inputs.y.grad, *(scalar.grad for scalar in inputs.scalars)]
    for mine, theirs in zip(found, [t for t in exact if t is not None], strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-11)


def test_masks_hit_something() -> None:
    x, y = features(64, 8, torch.float64, "cpu")
    ids = family.duplicates(x)
    assert 64 < (ids[:, None] == ids).sum() < 64 * 4
    assert 50 < len(family.duplicates(x).unique()) < 64
    products = x @ y.T
    assert (products > products.diagonal()[:, None] + family.MARGIN).sum() > 64
