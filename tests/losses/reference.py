"""Dense float64 references, written from the papers' formulas, not with the library's terms."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.similarity.exact import compare, leaves


def assert_equal(
    ours: Callable[..., Tensor], truth: Callable[..., Tensor], *values: Tensor | float
) -> None:
    """Assert equal values and gradients of all `values`, to 1e-11 relative to the largest or 1."""
    mine, theirs = leaves(*values), leaves(*values)
    a, b = ours(*mine), truth(*theirs)
    assert b.isfinite()
    compare([a], [b], mine, theirs)


def same(ids: Tensor) -> Tensor:
    """(b, b) mask of pairs i, j that are the same or share an id; negative ids equal no other."""
    own = torch.eye(len(ids), dtype=torch.bool, device=ids.device)
    return ((ids[:, None] == ids) & (ids >= 0)) | own


def soft_cross_entropy(s: Tensor, target: Tensor, dropped: Tensor | None = None) -> Tensor:
    """(rows,) cross-entropies against rows of target probabilities."""
    if dropped is not None:
        s = s.masked_fill(dropped, -torch.inf)
    logp = F.log_softmax(s, dim=1)
    return -torch.where(target > 0, target * logp, 0).sum(1)


def clip_of_logits(
    s: Tensor,
    ids: Tensor | None = None,
    duplicates: str = "positive",
    smoothing: float = 0.0,
    weights: Tensor | None = None,
) -> Tensor:
    b = len(s)
    eye = torch.eye(b, dtype=s.dtype, device=s.device)
    dropped, target = None, eye
    if ids is not None and duplicates == "ignored":
        dropped = same(ids) & (eye == 0)
    elif ids is not None:
        target = same(ids).to(s.dtype)
        target = target / target.sum(1, keepdim=True)
    target = (1 - smoothing) * target + smoothing / b
    losses = soft_cross_entropy(s, target, dropped) + soft_cross_entropy(s.T, target, dropped)
    return losses.mean() / 2 if weights is None else (weights * losses).sum() / weights.sum() / 2


def siglip_of_logits(s: Tensor, ids: Tensor | None = None, weights: Tensor | None = None) -> Tensor:
    """The logits include the bias."""
    own = torch.arange(len(s), device=s.device)
    positive = same(own if ids is None else ids)
    losses = F.binary_cross_entropy_with_logits(s, positive.to(s.dtype), reduction="none").sum(1)
    return losses.mean() if weights is None else (weights * losses).sum() / weights.sum()


def pairs_of(s: Tensor, labels: Tensor, columns: Tensor | None) -> tuple[Tensor, Tensor]:
    """Masks of the positive pairs and of the negative ones.

    `columns`: labels of the references; None: the columns are the rows themselves.
    """
    others = torch.ones_like(s, dtype=torch.bool)
    if columns is None:
        others.fill_diagonal_(False)
    column_labels = labels if columns is None else columns
    equal = (labels[:, None] == column_labels) & (labels[:, None] >= 0)
    return others & equal, others & ~equal


def mean_of_positives(values: Tensor, positive: Tensor) -> Tensor:
    """Each row's mean of its positives' values; rows without any are left out."""
    count = positive.sum(1)
    return (torch.where(positive, values, 0).sum(1) / count.clamp(min=1))[count > 0]


def supcon_of_logits(
    s: Tensor, labels: Tensor, columns: Tensor | None = None, form: str = "out"
) -> Tensor:
    positive, negative = pairs_of(s, labels, columns)
    left_out = ~(positive | negative)
    logp = s.masked_fill(left_out, -torch.inf).log_softmax(1)
    terms = -mean_of_positives(logp, positive)
    if form == "in":  # -log of the mean probability
        logp, positive = (t[positive.any(1)] for t in (logp, positive))
        terms = positive.sum(1).to(s).log() - logp.masked_fill(~positive, -torch.inf).logsumexp(1)
    return terms.mean() if len(terms) else 0 * s.sum()


def sincere_of_logits(
    s: Tensor, labels: Tensor, columns: Tensor | None = None, average: str = "anchors"
) -> Tensor:
    """Each positive's cross-entropy among itself and the anchor's negatives."""
    positive, negative = pairs_of(s, labels, columns)
    rest = s.masked_fill(~negative, -torch.inf).logsumexp(1, keepdim=True)
    pairs = -F.logsigmoid(s - rest)
    terms = pairs[positive] if average == "pairs" else mean_of_positives(pairs, positive)
    return terms.mean() if len(terms) else 0 * s.sum()


def ntxent_of_logits(s: Tensor, views: int) -> Tensor:
    """SimCLR's l(i, j), the mean over all ordered pairs of views of one instance."""
    return supcon_of_logits(s, torch.arange(len(s) // views, device=s.device).repeat(views))
