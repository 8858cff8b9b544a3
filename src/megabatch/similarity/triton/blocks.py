"""The blocks of one device's matrix for Triton kernels: geometry, workspace, accumulators."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from megabatch.similarity import settings
from megabatch.similarity.matrix import PAIRED, Matrix
from megabatch.similarity.triton.blocking import block_shape, cdiv, product_strips
from megabatch.similarity.triton.operands import (
    Ranges,
    aligned,
    new_descriptor,
    ranges_of,
)
from megabatch.similarity.triton.tiles import DROPPED, NO_DIAGONAL, POSITIVE


class KernelTiles:
    """The blocks of a matrix on one GPU; see `sweep.Tiles`."""

    def __init__(self, matrix: Matrix) -> None:
        x, y = matrix.rows.features, matrix.cols.features
        self.matrix, self.symmetric = matrix, matrix.symmetric
        (self.m, self.width), self.n = x.shape, y.shape[0]
        self.x = aligned(x)
        self.y = self.x if y is x else aligned(y)
        self.d = self.x.shape[1]
        self.features = x  #: as given, not padded
        shape = self.m, self.n, self.width, x.element_size()
        limit = settings.workspace(x)
        self.block_rows, self.block_cols = block_shape(*shape, self.symmetric, limit)
        self._descriptor_pairs: dict[int, tuple[TensorDescriptor, TensorDescriptor]] = {}
        self._ranges = ranges_of(matrix.rows.ids), ranges_of(matrix.cols.ids)
        self._ds: Tensor | None = None

    def row_blocks(self) -> Iterator[slice]:
        """The rows in parts."""
        return product_strips(self.m, self.block_rows)

    def col_blocks(self, i: slice) -> Iterator[slice]:
        """The columns of the blocks of rows `i`; if symmetric, those from the diagonal on."""
        for j in product_strips(self.n, self.block_cols):
            if not self.symmetric or j.start >= i.start:
                yield j

    def new_total(self, rows: int) -> Tensor:
        """An accumulator for the gradients of `rows` rows; zeros if no block will write to it."""
        if self.m == 0 or self.n == 0:
            return self.x.new_zeros((rows, self.d), dtype=torch.float32)
        return self._empty(rows, self.d)

    def _empty(self, *shape: int) -> Tensor:
        return self.x.new_empty(shape, dtype=torch.float32)

    def _workspace(self, i: slice, j: slice) -> Tensor:
        """Room for dS of a block, in the features' dtype."""
        m, n = i.stop - i.start, j.stop - j.start
        stride = cdiv(n, 64) * 64  # rows that a descriptor and a fast product can take
        if self._ds is None or self._ds.numel() < m * stride:
            self._ds = None  # free the smaller one first
            self._ds = self.x.new_empty(m * stride)
        return self._ds[: m * stride].view(m, stride)[:, :n]

    def _descriptors(self, columns: int) -> tuple[TensorDescriptor, TensorDescriptor]:
        # Made once, not per launch, and on demand: there are none of an empty shard.
        if columns not in self._descriptor_pairs:
            pair = new_descriptor(self.x, columns), new_descriptor(self.y, columns)
            self._descriptor_pairs[columns] = pair
        return self._descriptor_pairs[columns]

    def _id_ranges(self, i: slice, j: slice) -> tuple[Ranges, Ranges]:
        rows, cols = self._ranges
        return rows.view(i), cols.view(j)


def diagonal_in(block: Matrix) -> int:
    """The kernels' DIAGONAL for a block: the kind of its pairs (i, i)."""
    if not block.crosses_diagonal():
        return NO_DIAGONAL
    return POSITIVE if block.diagonal == PAIRED else DROPPED
