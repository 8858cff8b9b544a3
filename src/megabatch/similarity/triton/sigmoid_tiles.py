"""The sigmoid loss and its gradients of one device's matrix by Triton kernels, from one sweep."""

from __future__ import annotations

from bisect import bisect_right
from itertools import pairwise

import torch
from torch import Tensor

from megabatch.similarity import settings
from megabatch.similarity.eager_sigmoid import Deferred, SigmoidCall
from megabatch.similarity.matrix import Matrix
from megabatch.similarity.triton import sigmoid
from megabatch.similarity.triton.blocking import GROUP, TILE, block_shape, cdiv
from megabatch.similarity.triton.blocks import (
    KernelTiles,
    by_last_tile,
    new_descriptor,
    ranges_from,
    ranges_of,
)
from megabatch.similarity.triton.configs import launch_config
from megabatch.similarity.triton.gradients import scale_rows

#: float16 holds numbers from 2^-24 to 2^16. dS, at most 1, is stored multiplied by this.
HALF_GAIN = 2.0**15
#: Tiles that a program of `sigmoid.masked_tiles` looks at, in a large block and in a smaller one:
#: about as many programs as a GPU has multiprocessors, each with little more than one tile of the
#: diagonal.
CHUNKS = 128, 32
LARGE = 8192


class SigmoidKernelTiles(KernelTiles):
    """Tiles whose `gradient_block` also adds the block's losses to `sums`."""

    def __init__(self, matrix: Matrix, call: SigmoidCall, sums: Tensor) -> None:
        """`sums`: as `new_sums` makes it, for all blocks of the sweep."""
        super().__init__(matrix, call.scale)
        self.call, self._sums, self.bounds = call, sums, call.bounds
        self._row_ranges: list[Tensor | None] = []
        ids = matrix.rows.ids
        if len(call.bounds) > 2 and ids is not None:
            # A rank's rows need not begin with a tile of all rows.
            self._row_ranges = [ranges_of(ids[a:b]) for a, b in pairwise(call.bounds)]
        self.gain = HALF_GAIN if self.x.dtype == torch.float16 else 1.0
        weight = matrix.rows.weight
        self.weight = None if weight is None else weight.contiguous()
        if self.weight is not None and call.weight_divisor is not None:
            self.weight = self.weight / call.weight_divisor
        self.config = launch_config("sigmoid", self.features)
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

    def gradient_block(self, i: slice, j: slice, rows: object, cols: object) -> Tensor | None:
        ds = self._workspace(i, j) if self.call.need.features else None
        config = self.config
        block = self._block(i, j, config.bk)
        rank = bisect_right(self.call.bounds, i.start) - 1
        if self._row_ranges:
            start = i.start - self.call.bounds[rank]
            block.row_ranges, block.row_range_stride = ranges_from(self._row_ranges[rank], start)
        tiles, cols = cdiv(block.m, TILE), cdiv(block.n, TILE)
        weight = None if self.weight is None else self.weight[i]
        # Sums of dS without a dS to store are rare: they have no fast kernel.
        all_masked = ds is None and (self.call.need.scale or self.call.need.bias)
        whole = pieces = None if ds is None else new_descriptor(ds, TILE)
        if ds is not None and config.split != 1:
            pieces = new_descriptor(ds, TILE // config.split)
        for first, count, even in () if all_masked else by_last_tile(block.n):
            sigmoid.unmasked_tiles.launch(
                cdiv(tiles, config.rows) * count, block, ds=pieces, partials=self._partials,
                bias=self.call.bias, weight=weight, first_col_tile=first, col_tiles=count,
                ROW_TILES=config.rows, GROUP=config.group, SPLIT=config.split, EVEN_N=even,
                GAIN=self.gain, num_warps=config.warps, num_stages=config.stages,
            )  # fmt: skip
        chunk = CHUNKS[0] if tiles * cols >= LARGE else CHUNKS[1]
        sums = self._sums[rank]
        sigmoid.masked_tiles.launch(
            cdiv(tiles * cols, chunk), block, ds=whole, partials=self._partials,
            sums=sums, stride=sums.stride(0), bias=self.call.bias, weight=weight,
            ROW_TILES=config.rows, CHUNK=chunk, ALL=all_masked, GAIN=self.gain,
            num_warps=16, num_stages=config.stages,
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

    def write_grad(
        self, total: Tensor, side: str, part: slice, factor: Tensor, scale_grad: bool, out: Deferred
    ) -> Tensor | None:
        features = (self.x if side == "x" else self.y)[part] if scale_grad else None
        values, rows = out.values, out.rows(part)
        order = None if isinstance(rows, slice) else rows
        row_scale = out.row_scale if len(out.row_scale) else None
        if isinstance(rows, slice):
            values = values[rows]
            row_scale = None if row_scale is None else row_scale[rows]
        parts = scale_rows(
            total, values, factor, values.shape[1], features=features, order=order,
            row_scale=row_scale, choose=row_scale is not None, gain=self.gain,
        )  # fmt: skip
        if parts is None:
            return None
        found = parts.sum(dtype=torch.float64)
        return found if self.call.weight_divisor is None else found * self.call.weight_divisor


def write_deferred(deferred_grad: Deferred, out: Tensor, factor: Tensor, divisor: int) -> None:
    """out = deferred_grad * factor * divisor, with the scale of each row."""
    values, row_scale, _ = deferred_grad
    scale_rows(
        values, out, factor, out.shape[1], divisor, row_scale=row_scale if len(row_scale) else None
    )
