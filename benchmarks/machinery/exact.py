"""The exact value and gradients, in float64, of the losses that only these benchmarks measure."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from machinery.truth import Truth, logsumexps
from machinery.truth import gradients as gradients_of


@torch.no_grad()
def logsumexp(x: Tensor, y: Tensor, scale: float) -> Truth:
    """The mean of the rows' log-sum-exps plus the mean of the columns'."""
    x, y = x.double(), y.double()
    rows, columns = logsumexps(x, y, scale)

    def gradient(s: Tensor, i: slice) -> Tensor:
        return (s - rows[i, None]).exp() / len(x) + (s - columns).exp() / len(y)

    return Truth(rows.mean() + columns.mean(), *gradients_of(x, y, scale, gradient))


@torch.no_grad()
def siglip(x: Tensor, y: Tensor, scale: float, bias: float) -> Truth:
    """SigLIP's loss: -log sigmoid of ±(scale * x @ y.T + bias), summed over columns."""
    x, y = x.double(), y.double()
    b = len(x)
    loss, dbias = x.new_zeros(()), x.new_zeros(())

    def gradient(s: Tensor, i: slice) -> Tensor:
        z = s + bias
        ds = z.sigmoid()
        ds.diagonal(i.start).sub_(1)
        ds /= b
        loss.add_((F.softplus(z, threshold=700).sum() - z.diagonal(i.start).sum()) / b)
        dbias.add_(ds.sum())
        return ds

    dx, dy, dscale = gradients_of(x, y, scale, gradient)
    return Truth(loss, dx, dy, dscale, dbias)


@torch.no_grad()
def clip_with_ids(x: Tensor, y: Tensor, scale: float, ids: Tensor) -> Truth:
    """CLIP's loss with pairs of equal ids as positives, the target spread evenly over them."""
    x, y = x.double(), y.double()
    b = len(x)
    rows, columns = logsumexps(x, y, scale)
    loss = (rows + columns).mean() / 2

    def gradient(s: Tensor, i: slice) -> Tensor:
        nonlocal loss
        same = equal(ids[i], ids).to(s.dtype)
        # An id's share is the same among rows and columns.
        target = same / same.sum(1, keepdim=True)
        loss = loss - (target * s).sum() / b
        return ((s - rows[i, None]).exp() + (s - columns).exp() - 2 * target) / (2 * b)

    gradients = gradients_of(x, y, scale, gradient)
    return Truth(loss, *gradients)


@torch.no_grad()
def clip_without_duplicates(x: Tensor, y: Tensor, scale: float, ids: Tensor) -> Truth:
    """CLIP's loss that ignores other pairs of equal ids, in both directions."""
    x, y = x.double(), y.double()
    b = len(x)

    def masked(s: Tensor, i: slice) -> Tensor:
        same = equal(ids[i], ids)
        same.diagonal(i.start).fill_(False)
        return s.masked_fill(same, -torch.inf)

    rows, columns = logsumexps(x, y, scale, masked)
    positive = scale * (x * y).sum(1)
    loss = ((rows - positive) + (columns - positive)).mean() / 2

    def gradient(s: Tensor, i: slice) -> Tensor:
        s = masked(s, i)
        ds = (s - rows[i, None]).exp() + (s - columns).exp()
        ds.diagonal(i.start).sub_(2)
        return ds / (2 * b)

    return Truth(loss, *gradients_of(x, y, scale, gradient))


@torch.no_grad()
def distillation(x: Tensor, y: Tensor, scale: float, u: Tensor, v: Tensor, factor: float) -> Truth:
    """CLIP's loss plus cross-entropies to the softmax of a teacher's logits, factor * u @ v.T."""
    x, y, u, v = (t.double() for t in (x, y, u, v))
    b = len(x)
    rows, columns = logsumexps(x, y, scale)
    teacher_rows, teacher_columns = logsumexps(u, v, factor)
    loss = (rows + columns).mean() - scale * (x * y).sum(1).mean()

    def gradient(s: Tensor, i: slice) -> Tensor:
        t = factor * (u[i] @ v.T)
        target = (t - teacher_rows[i, None]).exp() + (t - teacher_columns).exp()
        loss.sub_((target * s).sum() / (2 * b))
        ds = 2 * ((s - rows[i, None]).exp() + (s - columns).exp()) - target
        ds.diagonal(i.start).sub_(2)
        return ds / (2 * b)

    return Truth(loss, *gradients_of(x, y, scale, gradient))


@torch.no_grad()
def infonce(
    x: Tensor, y: Tensor, scale: float, ids: Tensor | None = None, margin: float | None = None
) -> Truth:
    """The rows' cross-entropies, ignoring other pairs of equal ids and those above a margin."""
    x, y = x.double(), y.double()
    own = scale * (x * y).sum(1)
    loss = x.new_zeros(())

    def gradient(s: Tensor, i: slice) -> Tensor:
        if margin is not None:
            s = s.masked_fill(s > own[i, None] + margin * scale, -torch.inf)
        if ids is not None:
            s = s.masked_fill(equal(ids[i], ids), -torch.inf)
        s.diagonal(i.start).copy_(own[i])
        logp = s.log_softmax(1)
        loss.sub_(logp.diagonal(i.start).sum() / len(x))
        ds = logp.exp_()
        ds.diagonal(i.start).sub_(1)
        return ds / len(x)

    gradients = gradients_of(x, y, scale, gradient)
    return Truth(loss, *gradients)


@torch.no_grad()
def supervised(z: Tensor, ids: Tensor, scale: float) -> Truth:
    """The mean over rows of each one's mean -log p over others with its id; dx is z's gradient.

    Every row must have another of its id.
    """
    z = z.double()
    loss = z.new_zeros(())

    def gradient(s: Tensor, i: slice) -> Tensor:
        s.diagonal(i.start).fill_(-torch.inf)
        logp = s.log_softmax(1)
        positive = equal(ids[i], ids)
        positive.diagonal(i.start).fill_(False)
        target = positive.to(s.dtype) / positive.sum(1, keepdim=True)
        loss.sub_(logp.masked_fill(~positive, 0).mul(target).sum() / len(z))
        s.diagonal(i.start).zero_()  # a factor of the scale's gradient
        return (logp.exp_() - target) / len(z)

    dx, dy, dscale = gradients_of(z, z, scale, gradient)
    return Truth(loss, dx + dy, dy, dscale)


def equal(rows: Tensor, columns: Tensor) -> Tensor:
    """(m, n): whether two ids are equal."""
    return rows[:, None] == columns


def of_copies(exact: Truth, copies: int) -> Truth:
    """CLIP's loss with each row repeated `copies` times, from the loss without repetition.

    Each probability is spread over the copies. The gradient is that of one copy.
    """
    loss = exact.loss + math.log(copies)
    return Truth(loss, exact.dx / copies, exact.dy / copies, exact.dscale)
