"""What the kernels take of one side of the matrix: features, pulls, ranges of ids."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from megabatch.similarity.backends.triton import softmax_backward
from megabatch.similarity.backends.triton.blocking import TILE, cdiv, padded
from megabatch.similarity.backends.triton.tiles import DROPPED, NO_DIAGONAL, POSITIVE, id_ranges
from megabatch.similarity.pairs import PAIRED, PLAIN, Pairs


class Side(NamedTuple):
    """One side's pull, and its tiles' smallest and largest log-sum-exps."""

    wanted: bool
    pull: Tensor
    extremes: Tensor
    stride: int = 0
    tiles: int = 0
    positives: bool = False

    @classmethod
    def of(cls, pull: Side | Tensor | None, placeholder: Tensor) -> Side:
        """None: a side without upstream gradients; the kernels never read the placeholder."""
        if isinstance(pull, Side):
            return pull
        if pull is None:
            return cls(False, placeholder, placeholder)
        tiles = cdiv(pull.shape[1], TILE)
        extremes = pull.new_empty(2, tiles)
        softmax_backward.extremes.launch(
            tiles, pull=pull, out=extremes, size=pull.shape[1], tiles=tiles, B=TILE
        )
        return cls(True, pull, extremes, pull.stride(0), tiles, len(pull) == 5)

    def view(self, part: slice) -> Side:
        """These rows or columns, whole tiles but for the last."""
        if not self.wanted or part.stop - part.start == self.pull.shape[1]:
            return self
        return self._replace(
            pull=self.pull[:, part], extremes=self.extremes[:, part.start // TILE :]
        )


class Ranges(NamedTuple):
    """Smallest and largest ids of one side's tiles, (2, tiles); None where there are no ids."""

    values: Tensor | None
    stride: int

    def view(self, part: slice) -> Ranges:
        """From this row or column on."""
        if self.values is None:
            return self
        return self._replace(values=self.values[:, part.start // TILE :])


def ranges_of(ids: Tensor | None) -> Ranges:
    """Of ids (m,)."""
    if ids is None:
        return Ranges(None, 0)
    tiles = cdiv(len(ids), TILE)
    ranges = ids.new_empty(2, tiles)
    if tiles:
        id_ranges.launch(tiles, ids=ids, out=ranges, size=len(ids), tiles=tiles, B=TILE)
    return Ranges(ranges, tiles)


def aligned(x: Tensor) -> Tensor:
    """Rows of 16-byte multiples, as a descriptor wants them: else a zero-padded copy."""
    unit = 16 // x.element_size()
    if x.shape[1] % unit:
        return F.pad(x, (0, padded(x.shape[1], x.element_size()) - x.shape[1]))
    # Rows that share memory are expanded ones: no descriptor has a stride of 0.
    overlap = x.stride(0) < x.shape[1]
    if x.stride(1) != 1 or x.stride(0) % unit or x.data_ptr() % 16 or overlap:
        return x.clone(memory_format=torch.contiguous_format)
    return x


def new_descriptor(x: Tensor, columns: int) -> TensorDescriptor:
    """Tiles of so many columns of a matrix, for the GPU's copy engine."""
    return TensorDescriptor(x, list(x.shape), list(x.stride()), [TILE, columns])


def diagonal_of(pairs: Pairs) -> int:
    """What the kernels call the kind of the pairs (i, i)."""
    if pairs.diagonal == PLAIN:
        return NO_DIAGONAL
    return POSITIVE if pairs.diagonal == PAIRED else DROPPED
