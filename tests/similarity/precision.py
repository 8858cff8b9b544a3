"""The criterion of low precision: row by row, errors no larger than a dense implementation's.

All errors are against float64. The dense implementation takes products in the features' dtype,
logits and softmax in float32, rounds dS to the features' dtype once and accumulates in float32.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

#: Factor by which an error may exceed that of the dense implementation.
FACTOR = 1.5


class Case(NamedTuple):
    ours: Callable[[Tensor, Tensor, Tensor], Tensor]  #: a loss of x, y and a scale
    dense: Callable[[Tensor], Tensor]  #: of the logits of `columns`
    columns: str = "y"
    smoothing: float = 0.0  #: its gradient through all columns is rounded separately
    bias: float = 0.0  #: that the loss adds to logits


def further_negatives(y: Tensor) -> Tensor:
    """Rows from the distribution of y's."""
    return y[: len(y) // 3].roll(1, dims=1)


def product(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """In float32 on the device's units, where a tensor core adds less exactly; or in float64."""
    if a.is_cuda and a.dtype in (torch.float16, torch.bfloat16):
        return torch.mm(a, b, out_dtype=dtype)
    return a.to(dtype) @ b.to(dtype)


def row_errors(value: Tensor, exact: Tensor) -> Tensor:
    return (value.double() - exact).norm(dim=1)


def sides(case: Case, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Rows and columns of the matrix."""
    if case.columns == "both":
        return (torch.cat([x, y]),) * 2
    return x, y if case.columns == "y" else torch.cat([y, further_negatives(y)])


def on_inputs(case: Case, rows: Tensor, columns: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of x and y, or their bounds, from those of rows and columns."""
    b = len(rows) // 2 if case.columns == "both" else len(rows)
    if case.columns == "both":
        return rows[:b] + columns[:b], rows[b:] + columns[b:]
    dy, extra = columns[:b].clone(), columns[b:]
    dy[: len(extra)] += extra.roll(-1, dims=1) if extra.dim() == 2 else extra
    return rows, dy


def gradients(
    case: Case, x: Tensor, y: Tensor, scale: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """(dx, dy, dscale) with logits and softmax in `dtype`, dS rounded once to the features'."""
    left, right = sides(case, x, y)
    s = (scale * product(left, right.T, dtype)).requires_grad_()
    case.dense(s).backward()
    if case.columns == "both":
        # Each pair is computed once, with the sum of both entries' gradients.
        of_rows = product((s.grad + s.grad.T).to(x.dtype), right, dtype)
        of_columns, shares = torch.zeros_like(of_rows), 2
    else:
        ds, shares = s.grad.to(x.dtype), 1
        of_rows, of_columns = product(ds, right, dtype), product(ds.T, left, dtype)
    dx, dy = on_inputs(case, scale * of_rows, scale * of_columns)
    return dx, dy, (left.to(dtype) * of_rows).sum() / shares


def float32_noise(case: Case, x: Tensor, y: Tensor, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """Errors of each row and of dscale if logits and log-sum-exps are rounded to float32.

    Each has a relative error of up to eps, and their difference is an exponent, so dS has that
    relative error. A row of a gradient sums |dS| times the features' lengths.
    """
    left, right = (t.double() for t in sides(case, x, y))
    s = (scale * (left @ right.T)).requires_grad_()
    case.dense(s).backward()
    values = s.detach()
    largest = values.abs().max().maximum(values.logsumexp(1).abs().max()) + abs(case.bias)
    noise = 2 * torch.finfo(torch.float32).eps * (1 + largest) * s.grad.abs()
    dscale = (noise * values.abs()).sum() / scale
    rows, columns = scale * (noise @ right.norm(dim=1)), scale * (noise.T @ left.norm(dim=1))
    return *on_inputs(case, rows, columns), dscale


def check(case: Case, x: Tensor, y: Tensor, scale: float, exponents: int = 1) -> None:
    """Compare gradients with those of the dense implementation.

    A row's error may be that of the dense implementation, in this row or the median row, plus one
    rounding of the result and one of the exponents: two float32 computations differ by it.
    exponents: the number of float32 roundings of an exponent.
    """
    b, dtype = len(x), x.dtype
    exact = gradients(case, x.double(), y.double(), scale, torch.float64)
    peer = gradients(case, x, y, scale, torch.float32)
    noise = [exponents * part for part in float32_noise(case, x, y, scale)]
    a, c = (t.clone().requires_grad_() for t in (x, y))
    s = torch.tensor(scale, requires_grad=True, device=x.device)
    case.ours(a, c, s).backward()
    half = torch.finfo(dtype).eps / 2
    second = case.smoothing * half * scale / b * max(x.norm(dim=1).max(), y.norm(dim=1).max())
    # Errors below the smallest normal number do not count, nor below a probability of e^-47,
    # which a block that takes one exponential for both sides may lose.
    tiny = max(torch.finfo(dtype).smallest_normal, 4e-21 * scale / b)
    for mine, i in ((a.grad, 0), (c.grad, 1)):
        theirs = row_errors(peer[i], exact[i])
        limit = FACTOR * theirs.maximum(theirs.median()) + half * exact[i].norm(dim=1)
        assert (row_errors(mine, exact[i]) <= limit + noise[i] + second + tiny).all()
    # The scale's gradient sums over all rows: compare with the rounding of that many terms.
    terms = (x.double() * exact[0]).sum(1).abs().sum() / scale
    limit = 2 * half * terms + noise[2] + FACTOR * abs(peer[2] - exact[2])
    assert abs(s.grad - exact[2]) <= limit + tiny
