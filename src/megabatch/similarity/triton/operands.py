"""The operands of the kernels: features, ids, and one side's log-sum-exps with their gradients."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from megabatch.similarity.triton import softmax_backward
from megabatch.similarity.triton.blocking import TILE, cdiv, padded
from megabatch.similarity.triton.tiles import id_ranges


class Upstream(NamedTuple):
    """The upstream of one side: see `states`."""

    wanted: bool  #: whether the side has upstream gradients
    packed: Tensor  #: (2 or 5, size) log-sum-exps and their gradients
    extremes: Tensor  #: (2, tiles) smallest and largest log-sum-exp of each tile, in log2
    stride: int = 0  #: of `packed`
    tiles: int = 0
    has_positives: bool = False

    @classmethod
    def absent(cls, placeholder: Tensor) -> Upstream:
        """A side without upstream gradients; kernels never read the placeholder."""
        return cls(False, placeholder, placeholder)

    @classmethod
    def of(cls, packed: Tensor, lses: tuple[int, ...] = (0,)) -> Upstream:
        """A side with these numbers; `lses`: the log-sum-exps among them whose extremes count."""
        size, tiles = packed.shape[1], cdiv(packed.shape[1], TILE)
        extremes = packed.new_empty(2 * len(lses), tiles)
        for k, lse in enumerate(lses):
            if tiles:
                softmax_backward.lse_extremes.launch(
                    tiles, lse=packed[lse], out=extremes[2 * k :], size=size, tiles=tiles, B=TILE
                )
        return cls(True, packed, extremes, packed.stride(0), tiles, len(packed) > 2)

    def view(self, part: slice) -> Upstream:
        """These rows or columns, which must begin with a tile and end with one or with the side."""
        if part.stop - part.start == self.packed.shape[1]:
            return self
        first = part.start // TILE
        return self._replace(packed=self.packed[:, part], extremes=self.extremes[:, first:])


class GuideOperands(NamedTuple):
    """A guide's features as the kernels take them; all None without a guide."""

    x: TensorDescriptor | None = None
    y: TensorDescriptor | None = None
    cols: Tensor | None = None  #: those of `y`
    stride: int | None = None  #: of `cols`
    d: int | None = None
    bk: int = 0  #: features per step of a product

    @classmethod
    def of(cls, rows: Tensor, cols: Tensor, bk: int) -> GuideOperands:
        """The operands of a guide's `aligned` features."""
        descriptors = new_descriptor(rows, bk), new_descriptor(cols, bk)
        return cls(*descriptors, cols, cols.stride(0), cols.shape[1], bk)


class Ranges(NamedTuple):
    """Smallest and largest id of each tile of one side, (2, tiles); None without ids."""

    values: Tensor | None
    stride: int

    def view(self, part: slice) -> Ranges:
        """The ranges from the first row or column of `part` on."""
        if self.values is None:
            return self
        return self._replace(values=self.values[:, part.start // TILE :])


def ranges_of(ids: Tensor | None) -> Ranges:
    """The ranges of ids (m,)."""
    if ids is None:
        return Ranges(None, 0)
    tiles = cdiv(len(ids), TILE)
    ranges = ids.new_empty(2, tiles)
    if tiles:
        id_ranges.launch(tiles, ids=ids, out=ranges, size=len(ids), tiles=tiles, B=TILE)
    return Ranges(ranges, tiles)


def aligned(x: Tensor) -> Tensor:
    """x (m, d) itself if a descriptor can take it, else a copy, padded with zeros if need be.

    A descriptor takes rows of whole 16 bytes, one after another, at addresses that divide by 16.
    """
    unit = 16 // x.element_size()
    if x.shape[1] % unit:
        return F.pad(x, (0, padded(x.shape[1], x.element_size()) - x.shape[1]))
    # Rows that share memory are expanded ones: no descriptor has a stride of 0.
    overlap = x.stride(0) < x.shape[1]
    if x.stride(1) != 1 or x.stride(0) % unit or x.data_ptr() % 16 or overlap:
        return x.clone(memory_format=torch.contiguous_format)
    return x


def new_descriptor(x: Tensor, columns: int) -> TensorDescriptor:
    """TILE rows by so many columns of a matrix at a time, for the GPU's copy engine (TMA)."""
    return TensorDescriptor(x, list(x.shape), list(x.stride()), [TILE, columns])
