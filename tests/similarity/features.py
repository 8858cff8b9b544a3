"""Feature matrices that are hard for a log-sum-exp, each in another way; most have unit rows."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor


def random(m: int, n: int, d: int) -> tuple[Tensor, Tensor]:
    return _unit(m, d), _unit(n, d)


def duplicated(m: int, n: int, d: int) -> tuple[Tensor, Tensor]:
    """Three distinct rows, each repeated many times on both sides."""
    base = _unit(3, d)
    return base[torch.arange(m) % 3], base[torch.arange(n) % 3]


def antipodal(m: int, n: int, d: int) -> tuple[Tensor, Tensor]:
    """Every row of x is close to the opposite of every row of y: all logits are near -scale."""
    axis = _unit(1, d)
    return F.normalize(axis + 0.01 * _unit(m, d)), F.normalize(-axis + 0.01 * _unit(n, d))


def badly_scaled(m: int, n: int, d: int) -> tuple[Tensor, Tensor]:
    """Rows have lengths from 0.001 to 3, so that the sizes of their logits differ widely."""
    return _unit(m, d) * _lengths(m), _unit(n, d) * _lengths(n)


def learnt(m: int, n: int, d: int) -> tuple[Tensor, Tensor]:
    """Row i of x is close to row i of y, as after training: probabilities are close to 1."""
    shared = _unit(max(m, n), d)
    noise = 0.7
    return F.normalize(shared[:m] + noise * _unit(m, d)), F.normalize(
        shared[:n] + noise * _unit(n, d)
    )


def clustered(m: int, n: int, d: int) -> tuple[Tensor, Tensor]:
    """Rows of both sides lie around five centres, which gives hard negatives."""
    centres = _unit(5, d)
    x = centres[torch.arange(m) % 5] + 0.3 * _unit(m, d)
    return F.normalize(x), F.normalize(centres[torch.arange(n) % 5] + 0.3 * _unit(n, d))


def outliers(m: int, n: int, d: int) -> tuple[Tensor, Tensor]:
    """One row is aligned with all columns, one opposed to all: outliers of their block's logits."""
    axis = _unit(1, d)
    x, y = _unit(m, d), F.normalize(axis + 0.1 * _unit(n, d))
    x[0] = axis
    x[-1] = -axis
    return x, y


MAKERS: dict[str, Callable[[int, int, int], tuple[Tensor, Tensor]]] = {
    maker.__name__: maker
    for maker in (random, duplicated, antipodal, badly_scaled, learnt, clustered, outliers)
}


def _unit(n: int, d: int) -> Tensor:
    return F.normalize(torch.randn(n, d, dtype=torch.float64), dim=1)


def _lengths(n: int) -> Tensor:
    return torch.logspace(-3, 0.5, n, dtype=torch.float64)[torch.randperm(n)][:, None]
