"""Losses and their gradients in float64, written apart from the engine that is measured.

Strips of the matrix are formed twice, so that the check also runs where the matrix does not fit.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

_STRIP_NUMBERS = 2**27  # 1 GiB


class Truth(NamedTuple):
    """The exact result for inputs x, y (b, d)."""

    loss: Tensor  #: ()
    dx: Tensor  #: (b, d)
    dy: Tensor  #: (b, d)
    dscale: Tensor  #: ()


@torch.no_grad()
def clip(x: Tensor, y: Tensor, scale: float) -> Truth:
    """CLIP's loss: both cross-entropies of the logits scale * x @ y.T, their mean."""
    x, y = x.double(), y.double()
    b = len(x)
    rows, columns = x.new_empty(b), x.new_full((b,), -torch.inf)
    for i in _strips(b):
        s = scale * (x[i] @ y.T)
        rows[i] = s.logsumexp(1)
        columns = torch.logaddexp(columns, s.logsumexp(0))
    positive = scale * (x * y).sum(1)
    loss = ((rows - positive) + (columns - positive)).mean() / 2

    dx, dy, dscale = torch.empty_like(x), torch.zeros_like(y), x.new_zeros(())
    for i in _strips(b):
        s = scale * (x[i] @ y.T)
        ds = (s - rows[i, None]).exp() + (s - columns).exp()
        ds.diagonal(i.start).sub_(2)
        ds /= 2 * b
        dscale += (ds * s).sum() / scale
        dx[i] = scale * (ds @ y)
        dy += scale * (ds.T @ x[i])
    return Truth(loss, dx, dy, dscale)


def _strips(b: int) -> Iterator[slice]:
    step = max(1, _STRIP_NUMBERS // b)
    for start in range(0, b, step):
        yield slice(start, min(start + step, b))


def row_error(gradient: Tensor, exact: Tensor) -> float:
    """The largest error of a row, relative to the length of the exact row."""
    error = (gradient.double() - exact).norm(dim=1)
    return (error / exact.norm(dim=1).clamp_min(1e-300)).max().item()


def relative_error(value: Tensor, exact: Tensor) -> float:
    """The error of one number, relative to it."""
    return ((value.double() - exact) / exact).abs().item()
