"""Every loss under torch.func, and with features on the meta device."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.func import grad, vmap

import megabatch as mb

LABELS = torch.tensor([0, 0, 1, 2, 2, -1])

Loss = Callable[..., Tensor]
#: name -> a loss of tensors that require gradients, and their shapes
CASES: dict[str, tuple[Loss, tuple[tuple[int, ...], ...]]] = {
    "clip": (mb.ClipLoss(), ((6, 4), (6, 4), ())),
    "siglip": (mb.SigLipLoss(), ((6, 4), (6, 4), (), ())),
    "ntxent": (mb.NTXentLoss(0.5), ((6, 4), (6, 4))),
    "dcl": (mb.DCLLoss(0.5), ((6, 4), (6, 4))),
    "supcon": (lambda x: mb.SupConLoss(0.5)(x, LABELS.to(x.device)), ((6, 4),)),
    "sincere": (lambda x: mb.SincereLoss(0.5)(x, LABELS.to(x.device)), ((6, 4),)),
    "infonce": (mb.InfoNCELoss(0.5), ((6, 4), (6, 4), (9, 4))),
    "infonce, weighted": (
        mb.InfoNCELoss(0.5, hardness_mode="all_negatives", hardness_strength=2.0),
        ((6, 4), (6, 4), (9, 4)),
    ),
    "infonce, smoothing": (
        mb.InfoNCELoss(0.5, label_smoothing=0.1),
        ((6, 4), (6, 4), (6, 3, 4)),
    ),
    "ntxent, debiased": (mb.NTXentLoss(0.5, tau_plus=0.1), ((6, 4), (6, 4))),
    "dcl, weighted": (mb.DCLLoss(0.5, sigma=0.5), ((6, 4), (6, 4))),
    "matryoshka": (mb.MatryoshkaLoss(mb.ClipLoss(), [2, 4]), ((6, 4), (6, 4), ())),
}
cases = pytest.mark.parametrize(("loss", "shapes"), CASES.values(), ids=CASES)


def inputs(shapes: tuple[tuple[int, ...], ...]) -> list[Tensor]:
    return [torch.randn(shape, dtype=torch.float64) for shape in shapes]


@cases
def test_features_on_meta(loss: Loss, shapes: tuple[tuple[int, ...], ...]) -> None:
    mine = [t.float().to("meta").requires_grad_() for t in inputs(shapes)]
    value = loss(*mine)
    assert (value.shape, value.dtype, value.device.type) == ((), torch.float32, "meta")
    for t, g in zip(mine, torch.autograd.grad(value, mine), strict=True):
        assert (g.shape, g.dtype, g.device.type) == (t.shape, t.dtype, "meta")


@cases
def test_vmap_and_its_gradients(loss: Loss, shapes: tuple[tuple[int, ...], ...]) -> None:
    several = [inputs(shapes) for _ in range(3)]
    stacked = tuple(map(torch.stack, zip(*several, strict=True)))
    numbers = tuple(range(len(shapes)))
    found = vmap(grad(lambda *a: loss(*a), argnums=numbers))(*stacked)
    for k, one in enumerate(several):
        assert torch.allclose(vmap(loss)(*stacked)[k], loss(*one), rtol=1e-12)
        leaves = [t.requires_grad_() for t in one]
        for ours, truth in zip(found, torch.autograd.grad(loss(*leaves), leaves), strict=True):
            torch.testing.assert_close(ours[k], truth)
