"""The whole similarity matrix at once: the float64 truth.

Ordinary differentiable PyTorch in the features' own dtype, written independently of the sweep.
Memory grows with m * n.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from megabatch.similarity.softmax import Split


def logits(
    x: Tensor,
    y: Tensor,
    scale: float | Tensor = 1.0,
    row_weight: Tensor | None = None,
    col_lengths: Tensor | None = None,
    col_bias: float | Tensor = 0.0,
) -> Tensor:
    """S (m, n), of late interaction for x and y of three dimensions."""
    if x.dim() == 2:
        return scale * (x @ y.T) + col_bias
    products = torch.einsum("ild,jkd->ijlk", x, y)
    if col_lengths is not None:
        padding = torch.arange(y.shape[1], device=y.device) >= col_lengths[:, None]
        products = products.masked_fill(padding[:, None], -torch.inf)
    sums = products.max(3).values.sum(2)
    return scale * (sums if row_weight is None else sums * row_weight[:, None])


def logsumexp(
    x: Tensor, y: Tensor, scale: float | Tensor = 1.0, col_bias: float | Tensor = 0.0
) -> tuple[Tensor, Tensor]:
    """Log-sum-exp along each axis: `(rows (m,), columns (n,))`."""
    s = logits(x, y, scale, col_bias=col_bias)
    return s.logsumexp(1), s.logsumexp(0)


def equal_ids(s: Tensor, ids: str | tuple[Tensor, Tensor]) -> Tensor:
    """(m, n): the pairs of equal ids, none of which is negative; or those on the diagonal."""
    if isinstance(ids, str):
        return torch.eye(*s.shape, dtype=torch.bool, device=s.device)
    return (ids[0][:, None] == ids[1]) & (ids[0] >= 0)[:, None]


def split_logsumexp(
    x: Tensor,
    y: Tensor | None = None,
    scale: float | Tensor = 1.0,
    *,
    ids: str | tuple[Tensor, Tensor] = "paired",
    positives: str = "ids",
    ceiling: Tensor | None = None,
    guide: tuple[Tensor, Tensor] | None = None,
    row_weight: Tensor | None = None,
    col_lengths: Tensor | None = None,
    col_bias: float | Tensor = 0.0,
) -> tuple[Split, Split]:
    """As `megabatch.similarity.split_logsumexp`, both sides."""
    s = logits(x, x if y is None else y, scale, row_weight, col_lengths, col_bias)
    m, n = s.shape
    counted = torch.ones(m, n, dtype=torch.bool, device=s.device)
    if y is None:
        counted.fill_diagonal_(False)
    equal = equal_ids(s, ids)
    negative = counted & ~equal
    if positives == "paired":
        equal = equal_ids(s, "paired")
        negative = negative & ~equal
    if ceiling is not None:
        compared = s if guide is None else guide[0] @ guide[1].T
        negative = negative & ~(compared > ceiling[:, None])
    sides = [_side(s, counted & equal, negative, dim) for dim in (1, 0)]
    return sides[0], sides[1]


def _side(s: Tensor, positive: Tensor, negative: Tensor, dim: int) -> Split:
    return Split(
        _masked_logsumexp(s, negative, dim),
        _masked_logsumexp(s, positive, dim),
        torch.where(positive, s, 0).sum(dim),
        positive.sum(dim).to(s.dtype),
    )


def _masked_logsumexp(s: Tensor, mask: Tensor, dim: int) -> Tensor:
    # All of a row masked: -inf with a zero gradient, where logsumexp of -infs would give NaN.
    some = mask.any(dim, keepdim=True)
    values = s.masked_fill(~mask, -torch.inf).masked_fill(~some, 0).logsumexp(dim)
    return values.masked_fill(~some.squeeze(dim), -torch.inf)


def softplus_sum(
    x: Tensor,
    y: Tensor,
    scale: float | Tensor,
    bias: float | Tensor,
    *,
    ids: str | tuple[Tensor, Tensor] = "paired",
    weight: Tensor | None = None,
    teacher: tuple[Tensor, Tensor, float, float] | None = None,
) -> Tensor:
    """As `megabatch.similarity.softplus_sum`."""
    s = logits(x, y, scale) + bias
    labels = equal_ids(s, ids).to(s.dtype)
    if teacher is not None:
        u, v, factor, offset = teacher
        labels = (logits(u, v, factor) + offset).sigmoid()
    losses = F.binary_cross_entropy_with_logits(s, labels, reduction="none")
    return (losses if weight is None else weight[:, None] * losses).sum()


def paired(x: Tensor, y: Tensor, scale: float | Tensor = 1.0) -> Tensor:
    """The diagonal of S, (m,)."""
    return scale * (x * y).sum(1)


def ranks(
    x: Tensor,
    y: Tensor,
    target: Tensor,
    *,
    ids: tuple[Tensor, Tensor] | None = None,
    col_lengths: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """As `megabatch.similarity.ranks`."""
    s = logits(x, y, col_lengths=col_lengths)
    score = s.gather(1, target[:, None])
    skip = torch.zeros_like(s, dtype=torch.bool).scatter_(1, target[:, None], True)
    if ids is not None:
        skip |= equal_ids(s, ids)
    return ((s > score) & ~skip).sum(1), ((s == score) & ~skip).sum(1)
