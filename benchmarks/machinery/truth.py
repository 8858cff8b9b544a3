"""CLIP's loss and its gradients in float64, independent of the engine that is measured.

The matrix is formed in strips, twice, so that the check also runs if the matrix does not fit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

_STRIP_NUMBERS = 2**27  # 1 GiB


class Truth(NamedTuple):
    """The exact result for inputs x (m, d), y (n, d)."""

    loss: Tensor  #: ()
    dx: Tensor  #: (m, d)
    dy: Tensor  #: (n, d)
    dscale: Tensor  #: ()
    dbias: Tensor | None = None  #: (), of a loss that has a bias


@torch.no_grad()
def clip(x: Tensor, y: Tensor, scale: float) -> Truth:
    """CLIP's loss: the mean of both cross-entropies of the logits scale * x @ y.T."""
    x, y = x.double(), y.double()
    b = len(x)
    rows, columns = logsumexps(x, y, scale)
    positive = scale * (x * y).sum(1)
    loss = ((rows - positive) + (columns - positive)).mean() / 2

    def gradient(s: Tensor, i: slice) -> Tensor:
        ds = (s - rows[i, None]).exp() + (s - columns).exp()
        ds.diagonal(i.start).sub_(2)
        return ds / (2 * b)

    return Truth(loss, *gradients(x, y, scale, gradient))


def logsumexps(
    x: Tensor,
    y: Tensor,
    scale: float,
    mask: Callable[[Tensor, slice], Tensor] = lambda s, i: s,
) -> tuple[Tensor, Tensor]:
    """Log-sum-exps of rows and columns; `mask` masks a strip of logits with -inf."""
    rows, columns = x.new_empty(len(x)), x.new_full((len(y),), -torch.inf)
    for i in _strips(x, y):
        s = mask(scale * (x[i] @ y.T), i)
        rows[i] = s.logsumexp(1)
        columns = torch.logaddexp(columns, s.logsumexp(0))
    return rows, columns


def gradients(
    x: Tensor, y: Tensor, scale: float, gradient: Callable[[Tensor, slice], Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """dx, dy and dscale; `gradient` maps a strip of logits and its rows to dS."""
    dx, dy, dscale = torch.empty_like(x), torch.zeros_like(y), x.new_zeros(())
    for i in _strips(x, y):
        s = scale * (x[i] @ y.T)
        ds = gradient(s, i)
        dscale += (ds * s).sum() / scale
        dx[i] = scale * (ds @ y)
        dy += scale * (ds.T @ x[i])
    return dx, dy, dscale


def _strips(x: Tensor, y: Tensor) -> Iterator[slice]:
    step = max(1, _STRIP_NUMBERS // len(y))
    for start in range(0, len(x), step):
        yield slice(start, min(start + step, len(x)))


def row_errors(gradient: Tensor, exact: Tensor) -> Tensor:
    """The error of each row, relative to the length of the exact row."""
    error = (gradient.double() - exact).norm(dim=1)
    return error / exact.norm(dim=1).clamp_min(1e-300)


def row_error(gradient: Tensor, exact: Tensor) -> float:
    """The largest error of all rows; `exact` repeats if it has fewer."""
    parts = gradient.split(len(exact))
    return torch.stack([row_errors(part, exact[: len(part)]).max() for part in parts]).max().item()


def relative_error(value: Tensor, exact: Tensor) -> float:
    """The relative error of a number."""
    return ((value.double() - exact) / exact).abs().item()
