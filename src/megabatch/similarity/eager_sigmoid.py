"""Blocks of the sigmoid loss in torch operations."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from megabatch.similarity import eager
from megabatch.similarity.eager import EagerTiles, buffer_views
from megabatch.similarity.matrix import Matrix
from megabatch.similarity.tiles import row_dots

#: Factor of float16's dS, which is at most 1, so that small entries are normal numbers.
GAIN = 2.0**15


class Need(NamedTuple):
    """The inputs whose gradients are needed."""

    x: bool
    y: bool
    scale: bool
    bias: bool

    @property
    def features(self) -> bool:
        """Whether the gradient of x or of y is needed."""
        return self.x or self.y


class SigmoidCall(NamedTuple):
    """The part of a call that is the same for all blocks."""

    scale: Tensor  #: ()
    bias: Tensor  #: ()
    need: Need
    weight_divisor: Tensor | None = None  #: () by which float16's weights are divided
    teacher: tuple[Tensor, Tensor] | None = None  #: its scale and bias, for soft labels


class Deferred(NamedTuple):
    """A gradient of features (n, d), stored until the backward pass multiplies it.

    For half-precision features it is stored in their dtype, divided by the number of x's rows, so
    that a loss that is a mean over these does not round it a second time.
    """

    values: Tensor  #: (n, d), or (0,) if it is not wanted
    row_scale: Tensor  #: (n,) powers of two by which float16's rows are divided; else (0,)
    order: Tensor | None = None  #: (n,) index of each sorted row; None: they are not sorted

    @classmethod
    def like(cls, features: Tensor, wanted: bool) -> Deferred:
        """An uninitialised gradient of `features`; empty if it is not wanted."""
        halves = wanted and features.dtype == torch.float16
        return cls(
            features.new_empty(features.shape if wanted else 0),
            features.new_empty(len(features) if halves else 0, dtype=torch.float32),
        )

    def place(self, rows: slice) -> slice | Tensor:
        """Where these sorted rows are."""
        return rows if self.order is None else self.order[rows]


class SigmoidTiles(EagerTiles):
    """Tiles whose `gradient_block` also adds the block's losses to `sums`."""

    def __init__(self, matrix: Matrix, call: SigmoidCall, sums: Tensor) -> None:
        """`sums`: as `new_sums` makes it, for all blocks of the sweep."""
        super().__init__(matrix)
        self.call, self._sums = call, sums
        self._scratch = self._buffers(1 if call.teacher is None else 2)
        self._gain: Tensor | None = None
        if self.half_ds:  # it loses digits below 2^-14
            weight = call.weight_divisor
            self._gain = GAIN / (torch.ones_like(call.scale) if weight is None else weight)

    @staticmethod
    def new_sums(x: Tensor) -> Tensor:
        """Sums of losses, dS, and dS * products if x and y are frozen.

        There are b² terms: a block is summed in float32, the blocks in float64.
        """
        return x.new_zeros(3, dtype=torch.float64)

    def gradient_block(self, i: slice, j: slice, rows: object, cols: object) -> Tensor | None:
        call, need, (scratch, *other) = self.call, self.call.need, buffer_views(self._scratch, i, j)
        s = eager.logits(self.x[i], self.y[j], call.scale, out=scratch).add_(call.bias)
        block = self.matrix.view(i, j)
        if call.teacher is None:
            losses, ds = _losses_and_grad(s, block.masks(s)[0])
        else:
            scale, bias = call.teacher
            assert block.rows.guide is not None
            assert block.cols.guide is not None
            t = eager.logits(block.rows.guide, block.cols.guide, scale, out=other[0]).add_(bias)
            losses, ds = _soft_losses_and_grad(s, t)
        weight, sums = block.rows.weight, self._sums
        sums[0] += losses.sum() if weight is None else (losses.sum(1) * weight).sum()
        if weight is not None:
            ds.mul_(weight[:, None])
        if need.bias:
            sums[1] += ds.sum()
        if need.features:
            return ds if self._gain is None else ds.mul_(self._gain)
        if need.scale:
            one = torch.ones_like(call.scale)
            sums[2] += (ds * eager.logits(self.x[i], self.y[j], one)).sum()
        return None

    def sums(self) -> Tensor:
        """(3,) float64: see `new_sums`."""
        return self._sums

    def factor(self, divisor: int) -> Tensor:
        """The factor of the sums of dS times features."""
        return self.call.scale / (divisor if self._gain is None else divisor * self._gain)

    def write_grad(
        self, total: Tensor, side: str, rows: slice, factor: Tensor, scale_grad: bool, out: Any
    ) -> Tensor | None:
        features = (self.x if side == "x" else self.y)[rows]
        product = row_dots(features, total, torch.float64) if scale_grad else None
        if product is not None and self._gain is not None:
            product /= self._gain
        values, place = total.mul_(factor), out.place(rows)
        if len(out.row_scale):
            _, exponent = torch.frexp(values.abs().amax(1).nan_to_num(1, 1))
            power = torch.ldexp(torch.ones_like(values[:, 0]), exponent.clamp(-100, 100) - 15)
            out.row_scale[place] = power
            values.div_(power[:, None])
        out.values[place] = values.to(out.values.dtype)
        return product


def _soft_losses_and_grad(s: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
    """(losses, dS) of one block of logits `s`, labels sigmoid(t); destroys both."""
    losses = F.logsigmoid(s).mul_(t.sigmoid())
    losses.addcmul_(F.logsigmoid(s.neg()), t.neg().sigmoid_()).neg_()
    # sigmoid(s) - sigmoid(t), whose difference cancels if both are near 1, as a product: of the
    # larger's sigmoid, of 1 - the smaller's, and of 1 - e^(smaller - larger).
    low = torch.minimum(s, t)
    negative = s < t
    high = torch.maximum(s, t, out=s)
    ds = torch.expm1(low - high)
    ds.mul_(high.sigmoid_()).mul_(low.neg_().sigmoid_())
    return losses, torch.where(negative, ds, ds.neg())


def _losses_and_grad(s: Tensor, positive: Tensor | None) -> tuple[Tensor, Tensor]:
    """(losses, dS) of one block of logits; destroys `s`."""
    if positive is not None:
        s = torch.where(positive, s.neg(), s)
    # softplus(s) = -logsigmoid(-s): torch's softplus returns its argument above 20.
    losses = F.logsigmoid(s.neg()).neg_()
    ds = s.sigmoid_()  # of -z * logit, so that neither sign is a difference 1 - p
    return losses, ds if positive is None else torch.where(positive, ds.neg(), ds)
