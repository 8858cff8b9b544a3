"""The blocks of one device's matrix for Triton kernels: geometry, workspace, accumulators."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from megabatch.similarity import settings
from megabatch.similarity.matrix import PAIRED, Matrix
from megabatch.similarity.triton.blocking import TILE, block_shape, cdiv, product_strips
from megabatch.similarity.triton.operands import Block, Features, ranges_of
from megabatch.similarity.triton.tiles import DROPPED, NO_DIAGONAL, POSITIVE


class KernelTiles:
    """The blocks of a matrix on one GPU; see `sweep.Tiles`."""

    def __init__(self, matrix: Matrix, scale: Tensor) -> None:
        x, y = matrix.rows.features, matrix.cols.features
        self.matrix, self.scale, self.symmetric = matrix, scale, matrix.symmetric
        (self.m, self.width), self.n = x.shape, y.shape[0]
        self.features = x  #: as given, not padded
        self._operands = Features(x, y)
        self.x, self.y, self.d = self._operands.x, self._operands.y, self._operands.d
        self._guide: Features | None = None
        shape = self.m, self.n, self.width, x.element_size()
        limit = settings.workspace(x)
        self.block_rows, self.block_cols = block_shape(*shape, self.symmetric, limit)
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

    def _block(self, i: slice, j: slice, bk: int) -> Block:
        """The block, for products of `bk` features a step."""
        view = self.matrix.view(i, j)
        diagonal = NO_DIAGONAL
        if view.crosses_diagonal():
            diagonal = POSITIVE if view.diagonal == PAIRED else DROPPED
        x, y = self._operands.descriptors(bk)
        guide_x = guide_y = guide_d = None
        guide_bk = 0
        if self._guide is not None:
            # No more shared memory than the features take.
            guide_bk = max(16, bk * self.x.element_size() // self._guide.y.element_size())
            guide_x, guide_y = self._guide.descriptors(guide_bk)
            guide_d = self._guide.d
        rows, cols = self._ranges
        return Block(
            self.scale, x, y, self.d, bk, guide_x, guide_y, guide_d, guide_bk,
            row_start=i.start, col_start=j.start, m=i.stop - i.start, n=j.stop - j.start,
            diagonal_offset=view.col_start - view.row_start, diagonal=diagonal,
            paired=view.diagonal == PAIRED, has_positives=view.has_positives,
            row_ids=view.rows.ids, row_ranges=None if rows is None else rows[:, i.start // TILE :],
            row_range_stride=0 if rows is None else rows.stride(0),
            col_ids=view.cols.ids, col_ranges=None if cols is None else cols[:, j.start // TILE :],
            col_range_stride=0 if cols is None else cols.stride(0),
            ceiling=view.rows.ceiling,
        )  # fmt: skip


def by_last_tile(n: int) -> list[tuple[int, int, bool]]:
    """The launches of a kernel of all column tiles: (first, number of tiles, whether all are full).

    The last tile has a launch of its own if it reaches past the end: a mask in all tiles costs 4%.
    """
    whole = n // TILE
    parts = (0, whole, True), (whole, cdiv(n, TILE) - whole, False)
    return [part for part in parts if part[1]]
