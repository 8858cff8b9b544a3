"""The kernels of soft targets, row by row."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import megabatch as mb
from megabatch import similarity
from megabatch.similarity import soft_targets
from tests.process_state import changed
from tests.similarity.features import MAKERS
from tests.similarity.precision import row_errors
from tests.similarity.triton import DEVICE, HALVES, MARKS, SECOND

pytest.importorskip("triton")
pytestmark = MARKS


def dense(
    x: Tensor, y: Tensor, scale: float, u: Tensor, v: Tensor, factor: float
) -> tuple[list[Tensor], Tensor]:
    """(cross-entropies of rows and of columns, logits as a leaf), in the dtype of x."""
    s = (scale * x @ y.T).requires_grad_()
    t = factor * u @ v.T
    sides = [-(q.softmax(1) * p.log_softmax(1)).sum(1) for p, q in ((s, t), (s.T, t.T))]
    return sides, s


def compare(x: Tensor, y: Tensor, scale: float, u: Tensor, v: Tensor, factor: float) -> None:
    """Compare cross-entropies to float32's rounding, and x's gradient row by row.

    The error of a row may be that of dS rounded once to half precision, plus the row's own
    rounding and that of float32 logits.
    """
    leaf = x.detach().requires_grad_()
    rows, columns = soft_targets(leaf, y, scale, u, v, factor)
    ours = [rows.cross_entropy, columns.cross_entropy]
    weights = [torch.linspace(low, 1, len(x), device=DEVICE) for low in (0.2, 0.5)]
    (dx,) = torch.autograd.grad(sum(map(torch.dot, weights, ours)), leaf)

    wide = [t.double() for t in (x, y, u, v)]
    truth, s = dense(*wide[:2], scale, *wide[2:], factor)
    (ds,) = torch.autograd.grad(sum(map(torch.dot, [w.double() for w in weights], truth)), s)
    exact = scale * ds @ wide[1]
    logits = max(1.0, s.detach().abs().max().item())
    size = max(logits, *(side.max().item() for side in truth))
    for mine, side in zip(ours, truth, strict=True):
        torch.testing.assert_close(mine.double(), side.detach(), rtol=0, atol=2e-6 * size)
    eps, longest = torch.finfo(x.dtype).eps, scale * wide[1].norm(dim=1).max()
    rounding = eps * (longest * ds.norm(dim=1) + exact.norm(dim=1))
    subnormal = 2**-24 * x.shape[1] ** 0.5  # float16's smallest number
    assert (row_errors(dx, exact) <= rounding + 2**-20 * logits * longest + subnormal).all()
    split, _ = similarity.split_logsumexp(x, y, scale)
    for a, b in zip(rows[:4], split, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=2e-6 * size)


def features(kind: str, m: int, d: int, width: int, dtype: torch.dtype) -> list[Tensor]:
    x, y = MAKERS[kind](m, m, d)
    u, v = MAKERS["learnt"](m, m, width)
    return [t.to(DEVICE, dtype) for t in (x, y, u, v)]


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(
    ("kind", "scale"),
    [(kind, 100.0) for kind in MAKERS] + [(kind, 14.3) for kind in SECOND] + [("random", 0.01)],
)
def test_every_kind_of_features(kind: str, scale: float, dtype: torch.dtype) -> None:
    x, y, u, v = features(kind, 140, 24, 40, dtype)
    compare(x, y, scale, u, v, 20.0)


@pytest.mark.parametrize(
    ("kind", "scale"), [(kind, 100.0) for kind in SECOND] + [("learnt", 100.0), ("learnt", 1.0)]
)
def test_a_teacher_that_agrees(kind: str, scale: float) -> None:
    x, y, *_ = features(kind, 140, 24, 8, HALVES[-1])
    compare(x, y, scale, x.clone(), y.clone(), scale)


@pytest.mark.parametrize(("m", "d", "width"), [(1, 8, 8), (127, 3, 70), (530, 16, 8)])
def test_sizes_that_are_no_multiple_of_a_tile(m: int, d: int, width: int) -> None:
    x, y, u, v = features("random", m, d, width, HALVES[-1])
    compare(x, y, 5.0, u, v, 8.0)


def test_both_losses_and_the_scales_gradient() -> None:
    x, y, u, v = features("learnt", 150, 16, 24, HALVES[-1])
    scale = torch.tensor(12.0, device=DEVICE, requires_grad=True)
    leaf = y.detach().requires_grad_()
    losses = mb.DistillClipLoss()(x, leaf, scale, u, v, 15.0)
    ds, dy = torch.autograd.grad(sum(losses), (scale, leaf))
    wide = [t.detach().double().requires_grad_() for t in (x, y, scale)]
    s = wide[2] * wide[0] @ wide[1].T
    t = 15 * u.double() @ v.double().T
    labels = torch.arange(150, device=DEVICE)
    truth = sum(
        torch.nn.functional.cross_entropy(p, labels)
        - (q.softmax(1) * p.log_softmax(1)).sum(1).mean()
        for p, q in ((s, t), (s.T, t.T))
    )
    expected = torch.autograd.grad(truth / 2, (wide[2], wide[1]))
    assert abs(sum(losses).item() - truth.item() / 2) <= 1e-5 * abs(truth.item())
    torch.testing.assert_close(ds.double(), expected[0], rtol=2e-3, atol=1e-5)
    rounding = torch.finfo(leaf.dtype).eps  # of dS and of dy
    assert (dy.double() - expected[1]).norm() <= 2 * rounding * expected[1].norm()


@pytest.mark.parametrize("side", [0, 1])
def test_one_side_with_logits_whose_exponentials_overflow(side: int) -> None:
    x, y, u, v = features("learnt", 140, 16, 24, HALVES[-1])
    leaf = x.detach().requires_grad_()
    sides = soft_targets(leaf, y, 200.0, u, v, 200.0)
    (dx,) = torch.autograd.grad(sides[side].cross_entropy.sum(), leaf)
    wide = [t.double() for t in (x, y, u, v)]
    truth, s = dense(*wide[:2], 200.0, *wide[2:], 200.0)
    (ds,) = torch.autograd.grad(truth[side].sum(), s)
    exact = 200.0 * ds @ wide[1]
    assert s.max() > 100
    assert (dx.double() - exact).norm() <= 4e-3 * exact.norm() + 1e-3


def test_nan_features_give_nan() -> None:
    for k in range(4):
        inputs = features("random", 140, 16, 16, HALVES[-1])
        inputs[k][3, 1] = torch.nan
        x, y, u, v = inputs
        rows, columns = soft_targets(x, y, 3.0, u, v, 3.0)
        assert rows.cross_entropy.isnan().any() or columns.cross_entropy.isnan().any()
        assert mb.DistillClipLoss()(x, y, 3.0, u, v, 3.0)[1].isnan()


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["random", "learnt", "outliers"])
def test_a_larger_batch(kind: str) -> None:
    similarity.set_workspace(None)
    x, y, u, v = features(kind, 3000, 512, 768, torch.bfloat16)
    compare(x, y, 50.0, u, v, 100.0)


@pytest.mark.gpu
@pytest.mark.parametrize("width", [3, 24, 70, 512])
def test_float32_by_tf32(width: int) -> None:
    x, y, u, v = features("learnt", 700, 96, width, torch.float32)
    leaf = x.requires_grad_()
    with changed("precision", "high"):
        rows, _ = soft_targets(leaf, y, 10.0, u, v, 10.0)
        rows.cross_entropy.mean().backward()
    wide = [t.detach().double() for t in (x, y, u, v)]
    truth, s = dense(*wide[:2], 10.0, *wide[2:], 10.0)
    (ds,) = torch.autograd.grad(truth[0].mean(), s)
    exact = 10.0 * ds @ wide[1]
    assert leaf.grad is not None
    # TF32 keeps 10 bits of a feature: logits of up to 10 are off by up to 0.02.
    assert (rows.cross_entropy.double() - truth[0]).abs().max() <= 0.02
    assert (leaf.grad.double() - exact).norm() <= 5e-3 * exact.norm()
