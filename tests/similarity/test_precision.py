"""Errors in low precision, row by row, are no larger than those of a careful dense implementation.

Both errors are against float64. The dense implementation takes products in the features' dtype,
logits and softmax in float32, rounds dS to the features' dtype once and accumulates in float32.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import megabatch as mb
from megabatch import similarity
from tests.similarity import dense
from tests.similarity.features import MAKERS

#: Factor by which an error may exceed that of the dense implementation.
FACTOR = 1.5


def clip_from_negatives(pos: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    return (
        -(
            torch.nn.functional.logsigmoid(pos - rows)
            + torch.nn.functional.logsigmoid(pos - columns)
        ).mean()
        / 2
    )


def truth(x: Tensor, y: Tensor, scale: float) -> tuple[Tensor, ...]:
    """(rows, columns, dx, dy, dscale) in float64."""
    x, y = (t.double().detach().requires_grad_() for t in (x, y))
    s = torch.tensor(scale, dtype=torch.float64, requires_grad=True)
    rows, columns = dense.split_logsumexp(x, y, s)
    clip_from_negatives(dense.paired(x, y, s), rows.negative, columns.negative).backward()
    return rows.negative.detach(), columns.negative.detach(), x.grad, y.grad, s.grad


def float32_noise(x: Tensor, y: Tensor, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """Errors of the rows of dx and dy and of dscale if logits and log-sum-exps are in float32.

    Logits and log-sum-exps each have a relative error of up to eps, and their difference is an
    exponent, so dS has that relative error. A row of a gradient sums |dS| times the features'
    lengths.
    """
    x, y = x.double(), y.double()
    logits = (scale * (x @ y.T)).requires_grad_()
    rows, columns = dense.split_logsumexp(
        logits, torch.eye(len(x), dtype=torch.float64, device=x.device)
    )
    clip_from_negatives(logits.diagonal(), rows.negative, columns.negative).backward()
    largest = max(logits.detach().abs().max(), rows.negative.detach().abs().max())
    noise = 2 * torch.finfo(torch.float32).eps * (1 + largest) * logits.grad.abs()
    dscale = (noise * logits.detach().abs()).sum() / scale
    return scale * (noise @ y.norm(dim=1)), scale * (noise.T @ x.norm(dim=1)), dscale


def careful_dense(x: Tensor, y: Tensor, scale: float) -> tuple[Tensor, ...]:
    """As `truth`, but from float32 logits and with dS rounded once to the features' dtype."""
    logits = (scale * _product(x, y.T)).requires_grad_()
    eye = torch.eye(len(x), dtype=torch.bool, device=x.device)
    rows = logits.masked_fill(eye, -torch.inf).logsumexp(1)
    columns = logits.masked_fill(eye, -torch.inf).logsumexp(0)
    clip_from_negatives(logits.diagonal(), rows, columns).backward()
    ds = logits.grad.to(x.dtype)
    dx, dy = scale * _product(ds, y), scale * _product(ds.T, x)
    dscale = (x.float() * _product(ds, y)).sum()
    return rows.detach(), columns.detach(), dx.to(x.dtype), dy.to(x.dtype), dscale


def _product(a: Tensor, b: Tensor) -> Tensor:
    """Product in float32 on the device's units: a tensor core adds less exactly than float32."""
    if a.is_cuda and a.dtype != torch.float32:
        return torch.mm(a, b, out_dtype=torch.float32)
    return a.float() @ b.float()


def row_errors(value: Tensor, exact: Tensor) -> Tensor:
    return (value.double() - exact).norm(dim=1)


def assert_row_errors(x: Tensor, y: Tensor, scale: float, exponents: int = 1) -> None:
    """Compare log-sum-exps and gradients with those of the dense implementation.

    exponents: the number of float32 roundings of an exponent.
    """
    exact, peer = truth(x, y, scale), careful_dense(x, y, scale)
    a, b = (t.clone().requires_grad_() for t in (x, y))
    s = torch.tensor(scale, device=x.device, requires_grad=True)
    rows, columns = similarity.split_logsumexp(a, b, s)
    mb.ClipLoss()(a, b, s).backward()
    assert columns is not None
    eps = torch.finfo(torch.float32).eps
    for mine, i in ((rows.negative, 0), (columns.negative, 1)):
        slack = (2 + 2 * exponents) * eps * exact[i].abs()
        limit = FACTOR * (peer[i] - exact[i]).abs().max() + slack
        assert ((mine - exact[i]).abs() <= limit).all()
    # A row's error may be that of the dense implementation, in this row or the median row, plus
    # one rounding of the result and one of the exponents: two float32 computations differ by it.
    half = torch.finfo(x.dtype).eps / 2
    # Errors below the smallest normal number do not count, nor below a probability of e^-47,
    # which a block that takes one exponential for both sides may lose.
    tiny = max(torch.finfo(x.dtype).smallest_normal, 4e-21 * scale / len(x))
    noises = [exponents * noise for noise in float32_noise(x, y, scale)]
    for mine, i in ((a.grad, 2), (b.grad, 3)):
        size = exact[i].norm(dim=1)
        theirs = row_errors(peer[i], exact[i])
        limit = FACTOR * theirs.maximum(theirs.median()) + half * size + noises[i - 2] + tiny
        assert (row_errors(mine, exact[i]) <= limit).all()
    # The scale's gradient sums over all rows: compare with the rounding of that many terms.
    terms = (x.double() * exact[2]).sum(1).abs().sum() / scale
    limit = 2 * half * terms + noises[2] + FACTOR * abs(peer[4] - exact[4])
    assert abs(s.grad - exact[4]) <= limit


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("scale", [0.01, 14.3, 200.0])
@pytest.mark.parametrize("maker", MAKERS)
def test_per_row_error_is_no_larger_than_the_dense_expressions(
    maker: str, scale: float, dtype: torch.dtype
) -> None:
    assert_row_errors(*(t.to(dtype) for t in MAKERS[maker](256, 256, 64)), scale)


def test_a_learnt_pair_keeps_its_gradient_in_bfloat16() -> None:
    """p is close to 1 at scale 100, where a difference of two rounded terms would cancel."""
    x, y = (t.bfloat16() for t in MAKERS["learnt"](512, 512, 128))
    exact = truth(x, y, 100.0)
    a = x.clone().requires_grad_()
    mb.ClipLoss()(a, y, 100.0).backward()
    relative = row_errors(a.grad, exact[2]) / exact[2].norm(dim=1)
    assert relative.median() < 0.004
