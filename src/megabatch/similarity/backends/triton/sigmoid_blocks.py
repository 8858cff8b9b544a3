"""One device with fused kernels: the sigmoid loss and its gradients from one sweep."""

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

#: float16 holds numbers from 2^-24 to 2^16. dS, at most 1, is stored times this.
HALF_GAIN = 2.0**15
#: Tiles that a program of `sigmoid.exact` looks at, of a large block and of a smaller one: about as
#: many programs as a GPU has multiprocessors, each with hardly more than one tile of the diagonal.
CHUNKS = 128, 32
LARGE = 8192
#: Rows and columns that a program of `sigmoid.keep` takes at once.
ROWS, COLUMNS = 16, 128


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
        #: by program of `sigmoid.exact`: losses, dS, dS times products
        self._sums = x.new_zeros((3, cdiv(tiles, CHUNKS[1])), dtype=torch.float64)
        #: by program of `sigmoid.tile`: losses, dS
        self._parts = self._empty(2 * sigmoid.PARTS.value * tiles)

    def accumulator(self, rows: int) -> Tensor:
        """Room for the gradients of `rows` rows, without values."""
        return self._empty(rows, self.d)

    def add(
        self,
        i: slice,
        dx: Tensor | None,
        dy: Tensor | None,
        fresh: tuple[bool, bool] = (False, False),
        later: list[Callable[[], None]] | None = None,
    ) -> None:
        """Add one strip of rows: its losses, and its gradients where dx (theirs) or dy is given.

        `fresh`: dx, dy hold nothing yet. `later` gets dx's last product, which is then for the
        caller to make, before the next strip; None: it is made here.
        """
        for j in product_parts(len(self.y), self.columns):
            ds = None
            if dx is not None or dy is not None:
                ds = self._workspace(i.stop - i.start, j.stop - j.start)
            self._block(i, j, ds)
            if ds is not None and dy is not None:
                add_product(dy[j], ds.T, self.x[i], fresh[1])
            if ds is not None and dx is not None:
                self._add_to_dx(dx, ds, j, fresh[0], later)

    def _block(self, i: slice, j: slice, ds: Tensor | None) -> None:
        """Add one block's sums; its dS goes to `ds`."""
        m, n = i.stop - i.start, j.stop - j.start
        pairs, config = self.pairs.view(i, j), self.config
        tiles, columns = cdiv(m, TILE), cdiv(n, TILE)
        groups = cdiv(tiles, config.rows)
        weight = None if self.weight is None else self.weight[i]
        near, far = (r.view(s) for r, s in zip(self._ranges, (i, j), strict=True))
        offset = pairs.column_start - pairs.row_start
        xd, yd = self._descriptors(config.bk)
        diagonal = diagonal_of(pairs) if pairs.crosses_diagonal(m, n) else NO_DIAGONAL
        # Sums of dS without any dS to store are rare: no kernel of their own.
        slow = ds is None and (self.need.scale or self.need.bias)
        out = None if ds is None else new_descriptor(ds, TILE // config.split)
        # The last column tile apart where it reaches past the end: the others need no mask.
        whole = n // TILE
        for first, count, even in ((0, whole, True), (whole, columns - whole, False)):
            if count and not slow:
                sigmoid.tile.launch(
                    groups * count, x=xd, y=yd, ds=out, parts=self._parts,
                    scale=self.terms.scale, bias=self.terms.bias, weight=weight,
                    row_ranges=near.values, row_range_stride=near.stride,
                    column_ranges=far.values, column_range_stride=far.stride,
                    row_start=i.start, column_start=j.start, m=m, n=n, d=self.d,
                    first_column_tile=first, column_tiles=count, diagonal_offset=offset,
                    BM=TILE, BN=TILE, BK=config.bk, R=config.rows, GROUP=config.group,
                    SPLIT=config.split, EVEN=even, DIAGONAL=diagonal,
                    IDS=pairs.row_ids is not None, WEIGHT=weight is not None,
                    GRADIENT=ds is not None, GAIN=self.gain,
                    num_warps=config.warps, num_stages=config.stages,
                )  # fmt: skip
        if config.split != 1:
            out = None if ds is None else new_descriptor(ds, TILE)
        chunk = CHUNKS[0] if tiles * columns >= LARGE else CHUNKS[1]
        sigmoid.exact.launch(
            cdiv(tiles * columns, chunk), x=xd, y=yd, ds=out, parts=self._parts, sums=self._sums,
            stride=self._sums.stride(0),
            scale=self.terms.scale, bias=self.terms.bias, weight=weight,
            row_ids=pairs.row_ids, row_ranges=near.values, row_range_stride=near.stride,
            column_ids=pairs.column_ids, column_ranges=far.values, column_range_stride=far.stride,
            row_start=i.start, column_start=j.start, m=m, n=n, d=self.d, diagonal_offset=offset,
            BM=TILE, BN=TILE, BK=config.bk, R=config.rows, CHUNK=chunk, ALL=slow,
            DIAGONAL=diagonal, IDS=pairs.row_ids is not None, WEIGHT=weight is not None,
            GRADIENT=ds is not None, GAIN=self.gain, num_warps=16, num_stages=config.stages,
        )  # fmt: skip

    def sums(self) -> Tensor:
        """(3,) float64: of losses, of dS, and of dS * products where x and y are frozen."""
        total = self._sums.sum(1)
        return total if self.terms.unit is None else total * self.terms.unit

    def factor(self, divisor: int) -> Tensor:
        """What the sums of dS times features are multiplied by."""
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
        kept: Kept,
        rows: Tensor | slice,
        inner: bool,
    ) -> Tensor | None:
        """Write factor * total to these rows of `kept`; <features, dS * y> if `inner` is wanted."""
        size, d = len(total), kept.values.shape[1]
        programs = cdiv(size, ROWS)
        products = self._empty(programs)
        values, units, order = kept.values, kept.units, None
        if isinstance(rows, slice):
            values, units = values[rows], units[rows]
        else:
            order = rows
        if programs:
            sigmoid.keep.launch(
                programs, total=total, features=features, order=order, out=values, units=units,
                factor=factor, inner=products, rows=size, d=d, total_stride=total.stride(0),
                feature_stride=features.stride(0), out_stride=values.stride(0),
                B=ROWS, BD=COLUMNS, ORDER=order is not None, UNITS=len(kept.units) > 0,
                INNER=inner, GAIN=self.gain,
            )  # fmt: skip
        if not inner:
            return None
        product = products.sum(dtype=torch.float64)
        return product if self.terms.unit is None else product * self.terms.unit


def release(kept: Kept, out: Tensor, factor: Tensor, times: int) -> None:
    """out = kept * factor * times, each row times its unit."""
    size, d = out.shape
    sigmoid.release.launch(
        cdiv(size, ROWS), kept=kept.values, units=kept.units, out=out, factor=factor, times=times,
        rows=size, d=d, kept_stride=kept.values.stride(0), out_stride=out.stride(0),
        B=ROWS, BD=COLUMNS, UNITS=len(kept.units) > 0,
    )  # fmt: skip
