"""The sigmoid loss over one device, block by block: each visited once, for its loss and gradients.

`blocks` chooses between torch operations (`Blocks`: any device, the readable truth) and fused
kernels. Gradients wait for the backward pass in the features' dtype (`Kept`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from megabatch.similarity import sweep, tile_torch
from megabatch.similarity.arguments import accumulator_dtype
from megabatch.similarity.pairs import Pairs

if TYPE_CHECKING:
    from megabatch.similarity.backends.triton.sigmoid_blocks import SigmoidBlocks

#: Rows that are scaled or multiplied at once outside the products.
_STRIP = 4096


class Terms(NamedTuple):
    """What makes a loss of products <x_i, y_j>; `unit`: by what weights are divided in float16."""

    scale: Tensor  #: ()
    bias: Tensor  #: ()
    weight: Tensor | None  #: (m,)
    unit: Tensor | None = None  #: ()


class Need(NamedTuple):
    """Which inputs' gradients are wanted."""

    x: bool
    y: bool
    scale: bool
    bias: bool

    @property
    def features(self) -> bool:
        """Whether any of the features'."""
        return self.x or self.y


class Kept(NamedTuple):
    """A gradient of features (n, d) until the backward pass, which multiplies it once more.

    For half precisions it is kept in their dtype, as that of a mean over x's rows: a loss that is
    such a mean rounds it no second time.
    """

    values: Tensor  #: (n, d), or (0,) where it is not wanted
    units: Tensor  #: (n,) powers of two by which float16's rows are divided; else (0,)

    @classmethod
    def like(cls, features: Tensor, wanted: bool) -> Kept:
        """Without values yet; all zero where there is nothing to fill in."""
        halves = wanted and features.dtype == torch.float16
        return cls(
            features.new_empty(features.shape if wanted else 0),
            features.new_empty(len(features) if halves else 0, dtype=torch.float32),
        )

    def zero_(self) -> Kept:
        """The gradient of an empty sum."""
        self.values.zero_()
        self.units.fill_(1)
        return self


def divisor(x: Tensor) -> int:
    """Kept gradients are of the sum divided by this."""
    return max(1, len(x)) if x.element_size() == 2 else 1


def release(kept: Kept, like: Tensor, factor: Tensor, times: int) -> Tensor:
    """The kept gradient times two factors, in the dtype of `like`; empty where none is kept."""
    out = torch.empty_like(kept.values, dtype=like.dtype)
    if len(out) and sweep.fused_available(like):
        from megabatch.similarity.backends.triton import sigmoid_blocks

        sigmoid_blocks.release(kept, out, factor, times)
        return out
    # Two dimensions, so that the product is formed in the factor's dtype and rounded once.
    factors = (factor * times).reshape(1, 1)
    for i in sweep.strips(len(out), _STRIP):
        unit = kept.units[i, None] * factors if len(kept.units) else factors
        torch.mul(kept.values[i], unit, out=out[i])
    return out


def blocks(x: Tensor, y: Tensor, pairs: Pairs, terms: Terms, need: Need) -> Blocks | SigmoidBlocks:
    """The blocks of x (m, d) against y (n, d), by fused kernels where there are some."""
    if not sweep.fused_available(x):
        return Blocks(x, y, pairs, terms, need)
    from megabatch.similarity.backends.triton.sigmoid_blocks import SigmoidBlocks

    return SigmoidBlocks(x, y, pairs, terms, need)


def weight_unit(x: Tensor, weight: Tensor | None) -> Tensor | None:
    """The largest weight, where dS's range asks for weights of at most 1."""
    if weight is None or x.dtype != torch.float16:
        return None
    largest = weight.abs().amax() if len(weight) else weight.new_zeros(())
    return largest.masked_fill(largest == 0, 1)


class Blocks:
    """The blocks of x (m, d) against y (n, d) in torch operations; gradients lack `factor`."""

    def __init__(self, x: Tensor, y: Tensor, pairs: Pairs, terms: Terms, need: Need) -> None:
        self.x, self.y, self.pairs, self.terms, self.need = x, y, pairs, terms, need
        self.rows, self.columns = sweep.block_shape(x)
        self.dtype = accumulator_dtype(x.dtype)
        size = min(self.rows, len(x)) * min(self.columns, len(y))
        self._buffer = x.new_empty(size, dtype=self.dtype)
        # b² terms: each block's sum is float32's, the sum of the blocks is kept wider.
        self._sums = x.new_zeros(3, dtype=torch.float64)

    def strips(self) -> Iterator[slice]:
        """The rows in parts, each for one call of `add`."""
        return sweep.strips(len(self.x), self.rows)

    def accumulator(self, rows: int) -> Tensor:
        """Room for the gradients of `rows` rows, without values."""
        return self.x.new_empty((rows, self.x.shape[1]), dtype=self.dtype)

    def add(
        self,
        i: slice,
        dx: Tensor | None,
        dy: Tensor | None,
        fresh: tuple[bool, bool] = (False, False),
        later: list[Callable[[], None]] | None = None,
    ) -> None:
        """Add one strip of rows: its losses, and its gradients where dx (theirs) or dy is given.

        `fresh`: dx, dy hold nothing yet. `later` would get what is for the caller to make, before
        the next strip; nothing is.
        """
        inner = self.need.scale and not self.need.features
        strip = self.accumulator(i.stop - i.start).zero_() if inner else dx
        for j in sweep.strips(len(self.y), self.columns):
            m, n = i.stop - i.start, j.stop - j.start
            view = self._buffer[: m * n].view(m, n)
            s = tile_torch.logits(self.x[i], self.y[j], self.terms.scale, out=view)
            weight = None if self.terms.weight is None else self.terms.weight[i]
            loss, ds = _block(s.add_(self.terms.bias), self.pairs.view(i, j), weight)
            self._sums[0] += loss
            if self.need.bias:
                self._sums[1] += ds.sum()
            if strip is not None:
                tile_torch.add_product(
                    strip, ds, self.y[j], fresh[0] and j.start == 0 and not inner
                )
            if dy is not None:
                tile_torch.add_product(dy[j], ds.T, self.x[i], fresh[1])
        if inner and strip is not None:
            self._sums[2] += _inner(self.x[i], strip)

    def free(self) -> None:
        """Give the buffer back; nothing can be added any more."""
        self._buffer = self._buffer[:0]

    def sums(self) -> Tensor:
        """(3,) float64: of losses, of dS, and of dS * products where x and y are frozen."""
        return self._sums

    def factor(self, divisor: int) -> Tensor:
        """What the sums of dS times features are multiplied by."""
        return self.terms.scale / divisor

    def keep(
        self,
        total: Tensor,
        features: Tensor,
        factor: Tensor,
        kept: Kept,
        rows: Tensor | slice,
        inner: bool,
    ) -> Tensor | None:
        """Write factor * total to these rows of `kept`; <features, dS * y> if `inner` is wanted."""
        product = _inner(features, total) if inner else None
        values = total.mul_(factor)
        if len(kept.units):
            _, exponent = torch.frexp(values.abs().amax(1).nan_to_num(1, 1))
            unit = torch.ldexp(torch.ones_like(values[:, 0]), exponent.clamp(-100, 100) - 15)
            kept.units[rows] = unit
            values.div_(unit[:, None])
        kept.values[rows] = values.to(kept.values.dtype)
        return product


def _block(s: Tensor, pairs: Pairs, weight: Tensor | None) -> tuple[Tensor, Tensor]:
    """(sum of the losses, dS) of one block of logits; destroys `s`."""
    positive, _ = pairs.masks(s)
    if positive is not None:
        s = torch.where(positive, s.neg(), s)
    # softplus(s) = -logsigmoid(-s): torch's softplus cuts to its argument above 20.
    losses = F.logsigmoid(s.neg()).neg_()
    ds = s.sigmoid_()  # of -z * logit, so that neither sign is a difference 1 - p
    if positive is not None:
        ds = torch.where(positive, ds.neg(), ds)
    if weight is None:
        return losses.sum(), ds
    return (losses.sum(1) * weight).sum(), ds.mul_(weight[:, None])


def _inner(features: Tensor, gradient: Tensor) -> Tensor:
    """<features, gradient>, strip by strip."""
    total = gradient.new_zeros((), dtype=torch.float64)
    for i in sweep.strips(len(features), _STRIP):
        total += (features[i].to(gradient.dtype) * gradient[i]).sum()
    return total
