"""The sigmoid loss and its gradients of one device's matrix by Triton kernels, from one sweep."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from megabatch.similarity import sweep
from megabatch.similarity.backends.triton import sigmoid
from megabatch.similarity.backends.triton.blocking import TILE, cdiv, product_parts
from megabatch.similarity.backends.triton.blocks import FusedBlocks
from megabatch.similarity.backends.triton.configs import sigmoid_config
from megabatch.similarity.backends.triton.operands import diagonal_of, new_descriptor
from megabatch.similarity.backends.triton.tiles import NO_DIAGONAL
from megabatch.similarity.pairs import Pairs
from megabatch.similarity.sigmoid_blocks import Kept, Need, Terms
from megabatch.similarity.tile_torch import add_product

#: float16 holds numbers from 2^-24 to 2^16. dS, at most 1, is stored multiplied by this.
HALF_GAIN = 2.0**15
#: Tiles that a program of `sigmoid.masked_tiles` looks at, in a large block and in a smaller one:
#: about as many programs as a GPU has multiprocessors, each with little more than one tile of the
#: diagonal.
CHUNKS = 128, 32
LARGE = 8192
#: Rows and columns that a program of `sigmoid.defer_grad` takes at once.
ROWS, COLS = 16, 128


class SigmoidBlocks(FusedBlocks):
    """See `megabatch.similarity.sigmoid_blocks.Blocks`."""

    def __init__(self, x: Tensor, y: Tensor, pairs: Pairs, terms: Terms, need: Need) -> None:
        super().__init__(x, y, pairs, False, sweep.workspace(x))
        self.terms, self.need = terms, need
        self.gain = HALF_GAIN if x.dtype == torch.float16 else 1.0
        self.weight = None if terms.weight is None else terms.weight.contiguous()
        if self.weight is not None and terms.unit is not None:
            self.weight = self.weight / terms.unit
        self.config = sigmoid_config(x)
        tiles = cdiv(min(self.rows, len(x)), TILE) * cdiv(min(self.columns, len(y)), TILE)
        #: by program of `sigmoid.masked_tiles`: losses, dS, dS times products
        self._sums = x.new_zeros((3, cdiv(tiles, CHUNKS[1])), dtype=torch.float64)
        #: by program of `sigmoid.unmasked_tiles`: losses, dS
        self._partials = self._empty(2 * sigmoid.PARTS.value * tiles)

    def accumulator(self, rows: int) -> Tensor:
        """Room for the gradients of `rows` rows, without values."""
        return self._empty(rows, self.d)

    def add(
        self,
        i: slice,
        dx: Tensor | None,
        dy: Tensor | None,
        overwrite: tuple[bool, bool] = (False, False),
        deferred: list[Callable[[], None]] | None = None,
    ) -> None:
        """Add one strip of rows: its losses, and its gradients if dx (theirs) or dy is given.

        Args:
            overwrite: whether dx, dy hold nothing yet.
            deferred: gets the last product of dx, which the caller must call before the next strip.
                None: the product is computed here.
        """
        for j in product_parts(len(self.y), self.columns):
            ds = None
            if dx is not None or dy is not None:
                ds = self._workspace(i.stop - i.start, j.stop - j.start)
            self._block(i, j, ds)
            if ds is not None and dy is not None:
                add_product(dy[j], ds.T, self.x[i], overwrite[1])
            if ds is not None and dx is not None:
                self._add_to_dx(dx, ds, j, overwrite[0], deferred)

    def _block(self, i: slice, j: slice, ds: Tensor | None) -> None:
        """Add one block's sums, and write its dS to `ds`."""
        m, n = i.stop - i.start, j.stop - j.start
        pairs, config = self.pairs.view(i, j), self.config
        tiles, cols = cdiv(m, TILE), cdiv(n, TILE)
        groups = cdiv(tiles, config.rows)
        weight = None if self.weight is None else self.weight[i]
        row_ranges, col_ranges = (r.view(s) for r, s in zip(self._ranges, (i, j), strict=True))
        offset = pairs.column_start - pairs.row_start
        xd, yd = self._descriptors(config.bk)
        diagonal = diagonal_of(pairs) if pairs.crosses_diagonal(m, n) else NO_DIAGONAL
        # Sums of dS without a dS to store are rare: they have no fast kernel.
        all_masked = ds is None and (self.need.scale or self.need.bias)
        out = None if ds is None else new_descriptor(ds, TILE // config.split)
        # The last column tile has a launch of its own if it reaches past the end: the others need
        # no mask.
        whole = n // TILE
        for first, count, even in ((0, whole, True), (whole, cols - whole, False)):
            if count and not all_masked:
                sigmoid.unmasked_tiles.launch(
                    groups * count, x=xd, y=yd, ds=out, partials=self._partials,
                    scale=self.terms.scale, bias=self.terms.bias, weight=weight,
                    row_ranges=row_ranges.values, row_range_stride=row_ranges.stride,
                    col_ranges=col_ranges.values, col_range_stride=col_ranges.stride,
                    row_start=i.start, col_start=j.start, m=m, n=n, d=self.d,
                    first_col_tile=first, col_tiles=count, diagonal_offset=offset,
                    BM=TILE, BN=TILE, BK=config.bk, ROW_TILES=config.rows, GROUP=config.group,
                    SPLIT=config.split, EVEN_N=even, DIAGONAL=diagonal,
                    IDS=pairs.row_ids is not None, WEIGHT=weight is not None,
                    GRADIENT=ds is not None, GAIN=self.gain,
                    num_warps=config.warps, num_stages=config.stages,
                )  # fmt: skip
        if config.split != 1:
            out = None if ds is None else new_descriptor(ds, TILE)
        chunk = CHUNKS[0] if tiles * cols >= LARGE else CHUNKS[1]
        sigmoid.masked_tiles.launch(
            cdiv(tiles * cols, chunk), x=xd, y=yd, ds=out, partials=self._partials,
            sums=self._sums, stride=self._sums.stride(0),
            scale=self.terms.scale, bias=self.terms.bias, weight=weight,
            row_ids=pairs.row_ids, row_ranges=row_ranges.values, row_range_stride=row_ranges.stride,
            col_ids=pairs.column_ids, col_ranges=col_ranges.values,
            col_range_stride=col_ranges.stride,
            row_start=i.start, col_start=j.start, m=m, n=n, d=self.d, diagonal_offset=offset,
            BM=TILE, BN=TILE, BK=config.bk, ROW_TILES=config.rows, CHUNK=chunk, ALL=all_masked,
            DIAGONAL=diagonal, IDS=pairs.row_ids is not None, WEIGHT=weight is not None,
            GRADIENT=ds is not None, GAIN=self.gain, num_warps=16, num_stages=config.stages,
        )  # fmt: skip

    def sums(self) -> Tensor:
        """(3,) float64: of losses, of dS, and of dS * products if x and y are frozen."""
        total = self._sums.sum(1)
        return total if self.terms.unit is None else total * self.terms.unit

    def factor(self, divisor: int) -> Tensor:
        """The factor of the sums of dS times features."""
        factor = self.terms.scale / (divisor * self.gain)
        return factor if self.terms.unit is None else factor * self.terms.unit

    def free(self) -> None:
        """Give the workspace back."""
        self._ds = None

    def keep(
        self,
        total: Tensor,
        features: Tensor,
        factor: Tensor,
        deferred_grad: Kept,
        rows: Tensor | slice,
        with_scale: bool,
    ) -> Tensor | None:
        """Write factor * total to these rows of `deferred_grad`.

        Returns <features, dS * y>, a part of the scale's gradient, if `with_scale`.
        """
        size, d = len(total), deferred_grad.values.shape[1]
        programs = cdiv(size, ROWS)
        scale_grad_parts = self._empty(programs)
        values, row_scale, order = deferred_grad.values, deferred_grad.units, None
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
                ROW_SCALE=has_row_scale, SCALE_GRAD=with_scale, GAIN=self.gain,
            )  # fmt: skip
        if not with_scale:
            return None
        scale_grad_part = scale_grad_parts.sum(dtype=torch.float64)
        return scale_grad_part if self.terms.unit is None else scale_grad_part * self.terms.unit


def release(deferred_grad: Kept, out: Tensor, factor: Tensor, divisor: int) -> None:
    """out = deferred_grad * factor * divisor, with the scale of each row."""
    size, d = out.shape
    values, row_scale = deferred_grad
    sigmoid.write_deferred_grad.launch(
        cdiv(size, ROWS), deferred=values, row_scale=row_scale, out=out, factor=factor,
        divisor=divisor, rows=size, d=d, deferred_stride=values.stride(0),
        out_stride=out.stride(0), B=ROWS, BD=COLS, ROW_SCALE=len(row_scale) > 0,
    )  # fmt: skip
