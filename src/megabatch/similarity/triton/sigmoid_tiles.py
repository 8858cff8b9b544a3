"""The sigmoid loss and its gradients of one device's matrix by Triton kernels, from one sweep."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from itertools import pairwise

import torch
from torch import Tensor

from megabatch.similarity import settings
from megabatch.similarity.eager_sigmoid import DeferredGrad, SigmoidCall
from megabatch.similarity.matrix import Matrix
from megabatch.similarity.slices import within
from megabatch.similarity.triton import sigmoid
from megabatch.similarity.triton.blocking import GROUP, TILE, block_shape, cdiv, product_strips
from megabatch.similarity.triton.blocks import KernelTiles, diagonal_in
from megabatch.similarity.triton.configs import sigmoid_config
from megabatch.similarity.triton.operands import new_descriptor, ranges_of

#: float16 holds numbers from 2^-24 to 2^16. dS, at most 1, is stored multiplied by this.
HALF_GAIN = 2.0**15
#: Tiles that a program of `sigmoid.masked_tiles` looks at, in a large block and in a smaller one:
#: about as many programs as a GPU has multiprocessors, each with little more than one tile of the
#: diagonal.
CHUNKS = 128, 32
LARGE = 8192
#: Rows and columns that a program of `sigmoid.defer_grad` takes at once.
ROWS, COLS = 16, 128


class SigmoidKernelTiles(KernelTiles):
    """See `sweep.Tiles`; `gradient_block` also adds the block's losses to `sums`."""

    def __init__(self, matrix: Matrix, call: SigmoidCall, sums: Tensor) -> None:
        """`sums`: as `new_sums` makes it, for all blocks of the sweep."""
        super().__init__(matrix)
        self.call, self._sums = call, sums
        # A rank's rows need not begin with a tile of all rows.
        self._row_ranges, ids = [self._ranges[0]], matrix.rows.ids
        if len(call.bounds) > 2 and ids is not None:
            self._row_ranges = [ranges_of(ids[a:b]) for a, b in pairwise(call.bounds)]
        self.gain = HALF_GAIN if self.x.dtype == torch.float16 else 1.0
        weight = matrix.rows.weight
        self.weight = None if weight is None else weight.contiguous()
        if self.weight is not None and call.weight_divisor is not None:
            self.weight = self.weight / call.weight_divisor
        self.config = sigmoid_config(self.features)
        tiles = cdiv(min(self.block_rows, self.m), TILE) * cdiv(min(self.block_cols, self.n), TILE)
        #: by program of `sigmoid.unmasked_tiles`: losses, dS
        self._partials = self._empty(2 * sigmoid.PARTS.value * tiles)

    @staticmethod
    def new_sums(x: Tensor, y: Tensor, ranks: int) -> Tensor:
        """Sums by rank that shares rows and by program: losses, dS, dS times products."""
        limit = settings.workspace(x) // x.element_size()
        rows, _ = block_shape(1, 1, x.shape[1], x.element_size(), False, settings.workspace(x))
        tiles = cdiv(rows, TILE) * cdiv(max(GROUP, limit // rows), TILE)
        return x.new_zeros((ranks, 3, cdiv(tiles, CHUNKS[1])), dtype=torch.float64)

    def row_blocks(self) -> Iterator[slice]:
        """See `sweep.Tiles`; a block has rows of one rank."""
        return within(self.call.bounds, lambda rows: product_strips(rows, self.block_rows))

    def unpack_upstream(self, packed: Tensor | None) -> None:
        """None: a pair's gradient needs no statistic of its row or column."""

    def pack_upstream(self, upstream: object) -> None:
        """None: only features and ids are sent."""

    def gradient_block(self, i: slice, j: slice, rows: object, cols: object) -> Tensor | None:
        ds = self._workspace(i, j) if self.call.need.features else None
        m, n = i.stop - i.start, j.stop - j.start
        block, config = self.matrix.view(i, j), self.config
        row_ids, col_ids = block.rows.ids, block.cols.ids
        tiles, cols = cdiv(m, TILE), cdiv(n, TILE)
        groups = cdiv(tiles, config.rows)
        weight = None if self.weight is None else self.weight[i]
        rank = bisect_right(self.call.bounds, i.start) - 1
        sums, start = self._sums[rank], self.call.bounds[rank]
        row_ranges = self._row_ranges[rank if len(self._row_ranges) > 1 else 0]
        row_ranges = row_ranges.view(slice(i.start - start, i.stop - start))
        col_ranges = self._ranges[1].view(j)
        offset = block.col_start - block.row_start
        xd, yd = self._descriptors(config.bk)
        diagonal = diagonal_in(block)
        # Sums of dS without a dS to store are rare: they have no fast kernel.
        all_masked = ds is None and (self.call.need.scale or self.call.need.bias)
        out = None if ds is None else new_descriptor(ds, TILE // config.split)
        # The last column tile has a launch of its own if it reaches past the end: the others need
        # no mask.
        whole = n // TILE
        for first, count, even in ((0, whole, True), (whole, cols - whole, False)):
            if count and not all_masked:
                sigmoid.unmasked_tiles.launch(
                    groups * count, x=xd, y=yd, ds=out, partials=self._partials,
                    scale=self.call.scale, bias=self.call.bias, weight=weight,
                    row_ranges=row_ranges.values, row_range_stride=row_ranges.stride,
                    col_ranges=col_ranges.values, col_range_stride=col_ranges.stride,
                    row_start=i.start, col_start=j.start, m=m, n=n, d=self.d,
                    first_col_tile=first, col_tiles=count, diagonal_offset=offset,
                    BM=TILE, BN=TILE, BK=config.bk, ROW_TILES=config.rows, GROUP=config.group,
                    SPLIT=config.split, EVEN_N=even, DIAGONAL=diagonal,
                    IDS=row_ids is not None, WEIGHT=weight is not None,
                    GRADIENT=ds is not None, GAIN=self.gain,
                    num_warps=config.warps, num_stages=config.stages,
                )  # fmt: skip
        if config.split != 1:
            out = None if ds is None else new_descriptor(ds, TILE)
        chunk = CHUNKS[0] if tiles * cols >= LARGE else CHUNKS[1]
        sigmoid.masked_tiles.launch(
            cdiv(tiles * cols, chunk), x=xd, y=yd, ds=out, partials=self._partials,
            sums=sums, stride=sums.stride(0),
            scale=self.call.scale, bias=self.call.bias, weight=weight,
            row_ids=row_ids, row_ranges=row_ranges.values, row_range_stride=row_ranges.stride,
            col_ids=col_ids, col_ranges=col_ranges.values,
            col_range_stride=col_ranges.stride,
            row_start=i.start, col_start=j.start, m=m, n=n, d=self.d, diagonal_offset=offset,
            BM=TILE, BN=TILE, BK=config.bk, ROW_TILES=config.rows, CHUNK=chunk, ALL=all_masked,
            DIAGONAL=diagonal, IDS=row_ids is not None, WEIGHT=weight is not None,
            GRADIENT=ds is not None, GAIN=self.gain, num_warps=16, num_stages=config.stages,
        )  # fmt: skip
        return ds

    def sums(self) -> Tensor:
        """(ranks, 3) float64: of losses, dS, and of dS * products if x and y are frozen."""
        total = self._sums.sum(2)
        return total if self.call.weight_divisor is None else total * self.call.weight_divisor

    def factor(self, divisor: int) -> Tensor:
        """The factor of the sums of dS times features."""
        factor = self.call.scale / (divisor * self.gain)
        return factor if self.call.weight_divisor is None else factor * self.call.weight_divisor

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
        size, d = len(total), out.values.shape[1]
        programs = cdiv(size, ROWS)
        scale_grad_parts = self._empty(programs)
        values, row_scale, order = out.values, out.row_scale, None
        has_row_scale = len(row_scale) > 0
        if isinstance(rows, slice):
            values, row_scale = values[rows], row_scale[rows]
        else:
            order = rows
        if programs:
            sigmoid.defer_grad.launch(
                programs, total=total, features=features, order=order, out=values,
                row_scale=row_scale, factor=factor, scale_grad_parts=scale_grad_parts,
                rows=size, d=d, total_stride=total.stride(0), feature_stride=features.stride(0),
                out_stride=values.stride(0), B=ROWS, BD=COLS, ORDER=order is not None,
                ROW_SCALE=has_row_scale, SCALE_GRAD=scale_grad_part, GAIN=self.gain,
            )  # fmt: skip
        if not scale_grad_part:
            return None
        found = scale_grad_parts.sum(dtype=torch.float64)
        return found if self.call.weight_divisor is None else found * self.call.weight_divisor


def write_deferred(deferred_grad: DeferredGrad, out: Tensor, factor: Tensor, divisor: int) -> None:
    """out = deferred_grad * factor * divisor, with the scale of each row."""
    size, d = out.shape
    values, row_scale = deferred_grad
    sigmoid.write_deferred_grad.launch(
        cdiv(size, ROWS), deferred=values, row_scale=row_scale, out=out, factor=factor,
        divisor=divisor, rows=size, d=d, deferred_stride=values.stride(0),
        out_stride=out.stride(0), B=ROWS, BD=COLS, ROW_SCALE=len(row_scale) > 0,
    )  # fmt: skip
