"""The blocks of one device's matrix for Triton kernels: operands, geometry, workspace, results."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import triton.language as tl
from torch import Tensor

from megabatch.similarity import settings
from megabatch.similarity.matrix import PAIRED, Matrix
from megabatch.similarity.tiles import State, Tiles
from megabatch.similarity.triton.blocking import TILE, block_shape, cdiv, padded, product_strips
from megabatch.similarity.triton.launch import Descriptor, Kernel, kernel
from megabatch.similarity.triton.tiles import (
    DROPPED,
    NO_DIAGONAL,
    POSITIVE,
    id_ranges,
    lse_extremes,
)


class KernelTiles(Tiles):
    """The blocks of a matrix on one GPU."""

    divide = staticmethod(product_strips)

    def __init__(self, matrix: Matrix, scale: Tensor) -> None:
        rows, cols = matrix.rows, matrix.cols
        x, y = rows.features, cols.features
        self.matrix, self.scale, self.symmetric = matrix, scale, matrix.symmetric
        (self.m, self.width), self.n = x.shape, y.shape[0]
        self.features = x  #: as given, not padded
        self._operands = Features(x, y)
        self.x = self._operands.x
        self.y, self.d = self._operands.y, self._operands.d
        self._guide: Features | None = None
        if rows.guide is not None and cols.guide is not None:
            self._guide = Features(rows.guide, cols.guide)
        shape = self.m, self.n, self.width, x.element_size()
        limit = settings.workspace(x)
        self.block_rows, self.block_cols = block_shape(*shape, self.symmetric, limit)
        self.half_ds = x.dtype == torch.float16
        self._ranges = ranges_of(rows.ids), ranges_of(cols.ids)
        self._ds: Tensor | None = None

    def _empty(self, *shape: int) -> Tensor:
        return self.scale.new_empty(shape)  # in float32

    def _workspace(self, i: slice, j: slice) -> Tensor:
        """Room for dS of a block, in the features' dtype."""
        m, n = i.stop - i.start, j.stop - j.start
        stride = cdiv(n, 64) * 64  # rows that a descriptor and a fast product can take
        if self._ds is None or self._ds.numel() < m * stride:
            self._ds = None  # free the smaller one first
            self._ds = self.x.new_empty(m * stride)
        return self._ds.as_strided((m, n), (stride, 1))

    def _block(self, i: slice, j: slice, bk: int) -> Block:
        """The block, for products of `bk` features a step."""
        view = self.matrix.view(i, j)
        x, y = self._operands.descriptors(bk)
        guide_x = guide_y = guide_d = None
        guide_bk = 0
        if self._guide is not None:
            # No more shared memory than the features take.
            guide_bk = max(16, bk * self.x.element_size() // self._guide.x.element_size())
            guide_x, guide_y = self._guide.descriptors(guide_bk)
            guide_d = self._guide.d
        row_ranges, row_range_stride = ranges_from(self._ranges[0], i.start)
        col_ranges, col_range_stride = ranges_from(self._ranges[1], j.start)
        return Block(
            scale=self.scale, x=x, y=y, d=self.d, bk=bk,
            guide_x=guide_x, guide_y=guide_y, guide_d=guide_d, guide_bk=guide_bk,
            row_start=i.start, col_start=j.start, m=i.stop - i.start, n=j.stop - j.start,
            diagonal_offset=view.col_start - view.row_start, diagonal=block_diagonal(view),
            paired=view.diagonal == PAIRED, has_positives=view.has_positives,
            row_ids=view.rows.ids, row_ranges=row_ranges, row_range_stride=row_range_stride,
            col_ids=view.cols.ids, col_ranges=col_ranges, col_range_stride=col_range_stride,
            ceiling=view.rows.ceiling,
        )  # fmt: skip


def by_last_tile(n: int) -> list[tuple[int, int, bool]]:
    """The launches of a kernel of all column tiles: (first, number of tiles, whether all are full).

    The last tile has a launch of its own if it reaches past the end: a mask in all tiles costs 4%.
    """
    whole = n // TILE
    parts = (0, whole, True), (whole, cdiv(n, TILE) - whole, False)
    return [part for part in parts if part[1]]


class Block(SimpleNamespace):
    """A block of one device's matrix, as launches of `block_kernel`s read it."""

    #: The kernels' parameters that are attributes of a block; constants have capitals there.
    NAMES = (
        "scale", "x", "y", "d", "bk",  # descriptors of all features, their width, that of a step
        "guide_x", "guide_y", "guide_d", "guide_bk",  # likewise of a guide; None if there is none
        "row_start", "col_start", "m", "n",  # where the block begins in these features; its shape
        # The whole matrix's diagonal has the pairs (i, j) with i = j + diagonal_offset; their kind,
        # of `tiles`; whether they are the only positives; whether any pair can be positive.
        "diagonal_offset", "diagonal", "paired", "has_positives",
        "row_ids", "row_ranges", "row_range_stride",  # of the block; see `ranges_of`
        "col_ids", "col_ranges", "col_range_stride", "ceiling",
        "row_state", "row_state_stride", "row_is_first", "row_is_last",  # in the forward pass
        "col_state", "col_state_stride", "col_is_first", "col_is_last",
        "row_upstream", "row_stride", "row_extremes", "row_extremes_stride",  # in the backward pass
        "col_upstream", "col_stride", "col_extremes", "col_extremes_stride",
    )  # fmt: skip

    def set_states(self, rows: State, cols: State | None) -> None:
        """Set the sides' states; without that of the columns, kernels leave them out."""
        self.row_state, self.row_state_stride, self.row_is_first, self.row_is_last = rows
        self.col_state, self.col_state_stride, self.col_is_first, self.col_is_last = cols or rows

    def set_upstreams(self, rows: Upstream | None, cols: Upstream | None) -> None:
        """Set the sides' upstreams; None: the side has none."""
        absent = Upstream(None, 0, None, 0)
        rows, cols = rows or absent, cols or absent
        self.row_upstream, self.row_stride, self.row_extremes, self.row_extremes_stride = rows
        self.col_upstream, self.col_stride, self.col_extremes, self.col_extremes_stride = cols


def block_kernel(function: Callable[..., None]) -> Kernel:
    """`kernel` for kernels of a block: `launch(programs, block, *, ...)`.

    It takes less time to read arguments from a block than to pass them by keyword.
    """
    return Kernel(function, Block.NAMES)


def block_diagonal(block: Matrix) -> int:
    """The kind of the pairs (i, i) in a block, for kernels."""
    if not block.crosses_diagonal():
        return NO_DIAGONAL
    return POSITIVE if block.diagonal == PAIRED else DROPPED


class Upstream(NamedTuple):
    """The upstream of one side, on the host and inside kernels: see `states`."""

    packed: Any  #: (2 or 5, size) log-sum-exps and their gradients; None if the side has none
    stride: Any  #: of `packed`
    extremes: Any  #: (2 or 4, tiles) smallest and largest log-sum-exp of each tile, in log2
    extremes_stride: Any

    @classmethod
    def of(cls, packed: Tensor, lses: int = 1) -> Upstream:
        """A side with these numbers; the first of each of so many pairs is a log-sum-exp."""
        size, stride = packed.shape[1], packed.stride(0)
        tiles = cdiv(size, TILE)
        extremes = packed.new_empty(2 * lses, tiles)
        if tiles:
            lse_extremes.launch(
                tiles, packed=packed, stride=stride, out=extremes, size=size, tiles=tiles,
                COUNT=lses,
            )  # fmt: skip
        return cls(packed, stride, extremes, tiles)

    def view(self, part: slice) -> Upstream:
        """These rows or columns, which must begin with a tile and end with one or with the side."""
        if part.stop - part.start == self.packed.shape[1]:
            return self
        first = part.start // TILE
        return self._replace(packed=self.packed[:, part], extremes=self.extremes[:, first:])


def ranges_of(ids: Tensor | None) -> Tensor | None:
    """Smallest and largest id of each tile of ids (m,), (2, tiles)."""
    if ids is None:
        return None
    tiles = cdiv(len(ids), TILE)
    ranges = ids.new_empty(2, tiles)
    if tiles:
        id_ranges.launch(tiles, ids=ids, out=ranges, size=len(ids), tiles=tiles)
    return ranges


def ranges_from(ranges: Tensor | None, start: int) -> tuple[Tensor | None, int]:
    """The ranges from the tile on that begins with row `start`, and their stride."""
    return (None, 0) if ranges is None else (ranges[:, start // TILE :], ranges.stride(0))


class Features:
    """Features of both sides as descriptors can take them: see `aligned`."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x = aligned(x)
        self.y = self.x if y is x else aligned(y)
        self.d = self.x.shape[1]
        self._descriptors: dict[int, tuple[Descriptor, Descriptor]] = {}

    def descriptors(self, columns: int) -> tuple[Descriptor, Descriptor]:
        """For products of so many features a step."""
        # Made once, not per launch, and on demand: there are none of an empty shard.
        if columns not in self._descriptors:
            pair = new_descriptor(self.x, columns), new_descriptor(self.y, columns)
            self._descriptors[columns] = pair
        return self._descriptors[columns]


def aligned(x: Tensor) -> Tensor:
    """x (m, d) itself if a descriptor can take it, else a copy, padded with zeros if need be.

    A descriptor takes rows of whole 16 bytes, one after another, at addresses that divide by 16.
    """
    (step, one), width, unit = x.stride(), x.shape[1], 16 // x.element_size()
    if width % unit:
        return F.pad(x, (0, padded(width, x.element_size()) - width))
    # Rows that share memory are expanded ones: no descriptor has a stride of 0.
    if one != 1 or step % unit or step < width or x.data_ptr() % 16:
        return x.clone(memory_format=torch.contiguous_format)
    return x


def new_descriptor(x: Tensor, columns: int) -> Descriptor:
    """TILE rows by so many columns of a matrix at a time, for the GPU's copy engine (TMA)."""
    return Descriptor(x, [TILE, columns])


# --- gradients of features ------------------------------------------------------------------------

#: Rows and columns that a program takes at once.
ROWS, COLS = 16, 128


def scale_rows(
    total: Tensor,
    out: Tensor | None,
    factor: Tensor,
    width: int,
    divisor: int = 1,
    *,
    dot_width: int = 0,
    features: Tensor | None = None,
    order: Tensor | None = None,
    row_scale: Tensor | None = None,
    choose: bool = False,
    gain: float = 1.0,
) -> Tensor | None:
    """out[order] = total's first `width` columns, times factors: see `scaled_rows`.

    Returns:
        parts of the sum <features, total> / gain over the first `dot_width` columns, or all if 0;
        None without features.
    """
    size, programs = total.shape[0], cdiv(total.shape[0], ROWS)
    parts = None if features is None else factor.new_empty(programs)
    if programs:
        scaled_rows.launch(
            programs, total=total, features=features, order=order, out=out, row_scale=row_scale,
            factor=factor, divisor=divisor, scale_grad_parts=parts, rows=size, d=width,
            dot_d=dot_width or width, total_stride=total.stride(0),
            feature_stride=0 if features is None else features.stride(0),
            out_stride=0 if out is None else out.stride(0),
            ROWS=ROWS, COLS=COLS, CHOOSE=choose, GAIN=gain,
        )  # fmt: skip
    return parts


@kernel
def scaled_rows(
    total, features, order, out, row_scale, factor, divisor, scale_grad_parts, rows, d,
    dot_d, total_stride, feature_stride, out_stride,
    ROWS: tl.constexpr, COLS: tl.constexpr, CHOOSE: tl.constexpr, GAIN: tl.constexpr,
):  # fmt: skip
    """out[order] = factor * divisor * row_scale * total in out's dtype.

    scale_grad_parts[program] = <features, total> / GAIN, of the first dot_d columns. CHOOSE:
    instead of reading row_scale, the kernel writes it and divides by it: for each row the power of
    two that brings its largest number to 2^14.
    """
    i = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    inside = i < rows
    to = i
    if order is not None:
        to = tl.load(order + i, mask=inside, other=0)
    multiplier = tl.full((ROWS,), tl.load(factor) * divisor, tl.float32)
    if CHOOSE:
        largest = tl.zeros((ROWS,), tl.float32)
        for c in tl.range(0, d, COLS):
            j = c + tl.arange(0, COLS)
            mask = inside[:, None] & (j < d)[None, :]
            t = tl.load(total + i[:, None] * total_stride + j[None, :], mask=mask, other=0.0)
            largest = tl.maximum(largest, tl.max(tl.abs(t), 1))
        largest = tl.abs(largest * multiplier)
        power = (largest.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
        usual = (power >= 2.0**-100) & (power <= 2.0**100)
        own_scale = tl.where(usual, power * 2.0**-14, 1.0)
        tl.store(row_scale + to, own_scale, mask=inside)
        multiplier = multiplier / own_scale
    elif row_scale is not None:
        multiplier *= tl.load(row_scale + i, mask=inside, other=0.0)
    dot = tl.zeros((ROWS, COLS), tl.float32)
    for c in tl.range(0, d, COLS):
        j = c + tl.arange(0, COLS)
        mask = inside[:, None] & (j < d)[None, :]
        t = tl.load(total + i[:, None] * total_stride + j[None, :], mask=mask, other=0.0)
        if features is not None:
            at = features + i[:, None] * feature_stride + j[None, :]
            a = tl.load(at, mask=mask & (j < dot_d)[None, :], other=0.0)
            dot += t * a.to(tl.float32)
        if out is not None:
            value = (t.to(tl.float32) * multiplier[:, None]).to(out.dtype.element_ty)
            tl.store(out + to[:, None] * out_stride + j[None, :], value, mask=mask)
    if features is not None:
        part = tl.sum(tl.sum(dot, 1), 0) * (1.0 / GAIN)
        tl.store(scale_grad_parts + tl.program_id(0), part)
