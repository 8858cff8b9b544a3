"""Tiles of the sigmoid loss in torch operations: see `sigmoid`."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from megabatch.similarity.backends import eager
from megabatch.similarity.backends.eager import EagerTiles, buffer_views, row_dots
from megabatch.similarity.masks import Pairs
from megabatch.similarity.reductions.operands import DeferredGrad, Need, SigmoidParams, Teacher
from megabatch.similarity.slices import strips, within

#: Factor of float16's dS, which is at most 1, so that small entries are normal numbers.
GAIN = 2.0**15


class SigmoidTiles(EagerTiles):
    """See `base.Tiles`; `gradient_block` also adds the block's losses to `sums`."""

    def __init__(
        self,
        x: Tensor,
        y: Tensor,
        pairs: Pairs,
        params: SigmoidParams,
        need: Need,
        bounds: Sequence[int],
    ) -> None:
        """`bounds`: where the rows of each rank begin, and where the last one's end."""
        super().__init__(x, y, pairs)
        self.params, self.need, self.bounds = params, need, bounds
        self._scratch = self._buffers(1)
        self._gain: Tensor | None = None
        if x.dtype == torch.float16 and eager.rounds_left(x):
            # A GPU's products take dS in float16, which loses digits below 2^-14.
            weight = params.weight_divisor
            self._gain = GAIN / (torch.ones_like(params.scale) if weight is None else weight)
        # There are b² terms: a block is summed in float32, the blocks in float64.
        self._sums = x.new_zeros((len(bounds) - 1, 3), dtype=torch.float64)

    def row_blocks(self) -> Iterator[slice]:
        """See `base.Tiles`; a block has rows of one rank."""
        return within(self.bounds, lambda rows: strips(rows, self.block_rows))

    def unpack_upstream(self, packed: Tensor | None) -> None:
        """None: a pair's gradient needs no statistic of its row or column."""

    def pack_upstream(self, upstream: object) -> None:
        """None: only features and ids are sent."""

    def gradient_block(self, i: slice, j: slice, rows: object, cols: object) -> Tensor | None:
        """See `base.Tiles`."""
        (scratch,) = buffer_views(self._scratch, i, j)
        s = eager.logits(self.x[i], self.y[j], self.params.scale, out=scratch).add_(
            self.params.bias
        )
        weight = None if self.params.weight is None else self.params.weight[i]
        loss, ds = self._loss_and_grad(s, i, j, weight)
        sums = self._sums[bisect_right(self.bounds, i.start) - 1]
        sums[0] += loss
        if self.need.bias:
            sums[1] += ds.sum()
        if self.need.features:
            return ds if self._gain is None else ds.mul_(self._gain)
        if self.need.scale:
            one = torch.ones_like(self.params.scale)
            sums[2] += (ds * eager.logits(self.x[i], self.y[j], one)).sum()
        return None

    def _loss_and_grad(
        self, s: Tensor, i: slice, j: slice, weight: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """(sum of the losses, dS) of one block of logits; destroys `s`."""
        return _loss_and_grad(s, self.pairs.view(i, j), weight)

    def sums(self) -> Tensor:
        """(ranks, 3) float64: of losses, dS, and of dS * products if x and y are frozen."""
        return self._sums

    def factor(self, divisor: int) -> Tensor:
        """The factor of the sums of dS times features."""
        return self.params.scale / (divisor if self._gain is None else divisor * self._gain)

    def defer_grad(
        self,
        total: Tensor,
        side: str,
        part: slice,
        factor: Tensor,
        out: DeferredGrad,
        rows: Tensor | slice,
        scale_grad_part: bool,
    ) -> Tensor | None:
        """Write factor * total to these rows of `out`; <features, total> if `scale_grad_part`.

        `total` belongs to `part` of the features of `side`, "x" or "y".
        """
        features = (self.x if side == "x" else self.y)[part]
        product = row_dots(features, total, torch.float64) if scale_grad_part else None
        if product is not None and self._gain is not None:
            product /= self._gain
        values = total.mul_(factor)
        if len(out.row_scale):
            _, exponent = torch.frexp(values.abs().amax(1).nan_to_num(1, 1))
            power = torch.ldexp(torch.ones_like(values[:, 0]), exponent.clamp(-100, 100) - 15)
            out.row_scale[rows] = power
            values.div_(power[:, None])
        out.values[rows] = values.to(out.values.dtype)
        return product


class SoftLabelTiles(SigmoidTiles):
    """Tiles with soft labels: sigmoid(t) of a teacher's logits t, instead of 0 and 1."""

    def __init__(
        self,
        x: Tensor,
        y: Tensor,
        pairs: Pairs,
        params: SigmoidParams,
        need: Need,
        bounds: Sequence[int],
        teacher: Teacher,
    ) -> None:
        super().__init__(x, y, pairs, params, need, bounds)
        self.teacher = teacher
        self._teacher_scratch = self._buffers(1)

    def _loss_and_grad(
        self, s: Tensor, i: slice, j: slice, weight: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        (scratch,) = buffer_views(self._teacher_scratch, i, j)
        teacher = self.teacher
        t = eager.logits(teacher.x[i], teacher.y[j], teacher.scale, out=scratch)
        assert teacher.bias is not None
        return _soft_loss_and_grad(s, t.add_(teacher.bias), weight)


def _soft_loss_and_grad(s: Tensor, t: Tensor, weight: Tensor | None) -> tuple[Tensor, Tensor]:
    """(sum of the losses, dS) of one block of logits `s`, labels sigmoid(t); destroys `s`."""
    losses = F.logsigmoid(s).mul_(t.sigmoid())
    losses.addcmul_(F.logsigmoid(s.neg()), t.neg().sigmoid_()).neg_()
    # sigmoid(s) - sigmoid(t), whose difference cancels if both are near 1, as a product: of the
    # larger's sigmoid, of 1 - the smaller's, and of 1 - e^(smaller - larger).
    low = torch.minimum(s, t)
    negative = s < t
    high = torch.maximum(s, t, out=s)
    ds = torch.expm1(low - high)
    ds.mul_(high.sigmoid_()).mul_(low.neg_().sigmoid_())
    ds = torch.where(negative, ds, ds.neg())
    if weight is None:
        return losses.sum(), ds
    return (losses.sum(1) * weight).sum(), ds.mul_(weight[:, None])


def _loss_and_grad(s: Tensor, pairs: Pairs, weight: Tensor | None) -> tuple[Tensor, Tensor]:
    """(sum of the losses, dS) of one block of logits; destroys `s`."""
    positive, _ = pairs.masks(s)
    if positive is not None:
        s = torch.where(positive, s.neg(), s)
    # softplus(s) = -logsigmoid(-s): torch's softplus returns its argument above 20.
    losses = F.logsigmoid(s.neg()).neg_()
    ds = s.sigmoid_()  # of -z * logit, so that neither sign is a difference 1 - p
    if positive is not None:
        ds = torch.where(positive, ds.neg(), ds)
    if weight is None:
        return losses.sum(), ds
    return (losses.sum(1) * weight).sum(), ds.mul_(weight[:, None])
