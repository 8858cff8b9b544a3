"""The operands of the kernels: a block, its features, ids and log-sum-exps with their gradients."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from megabatch.similarity.triton.blocking import TILE, cdiv, padded
from megabatch.similarity.triton.launch import Kernel, kernel
from megabatch.similarity.triton.tiles import LOG2E, B, id_ranges


@dataclass(slots=True)
class Block:
    """A block of one device's matrix, from which `block_kernel`s take their parameters by name."""

    scale: Tensor
    x: TensorDescriptor  #: all rows' features; the block's begin at `row_start`
    y: TensorDescriptor
    d: int  #: width of the features
    bk: int  #: features per step of a product
    guide_x: TensorDescriptor | None  #: another model's features; None without a guide
    guide_y: TensorDescriptor | None
    guide_d: int | None
    guide_bk: int
    row_start: int
    col_start: int
    m: int
    n: int
    diagonal_offset: int  #: pairs (i, j + diagonal_offset) are those on the whole matrix's diagonal
    diagonal: int  #: the kind of these pairs: see `tiles`
    paired: bool  #: they are the only positives
    has_positives: bool
    row_ids: Tensor | None
    row_ranges: Tensor | None  #: see `id_ranges`
    row_range_stride: int
    col_ids: Tensor | None
    col_ranges: Tensor | None
    col_range_stride: int
    ceiling: Tensor | None
    # In the forward pass: see `State`.
    row_state: Tensor | None = None
    row_state_stride: int = 0
    row_is_first: int = 0
    row_is_last: int = 0
    col_state: Tensor | None = None
    col_state_stride: int = 0
    col_is_first: int = 0
    col_is_last: int = 0
    # In the backward pass: see `Upstream`.
    row_upstream: Tensor | None = None
    row_stride: int = 0
    row_extremes: Tensor | None = None
    row_extremes_stride: int = 0
    col_upstream: Tensor | None = None
    col_stride: int = 0
    col_extremes: Tensor | None = None
    col_extremes_stride: int = 0

    def set_states(self, rows: State, cols: State | None) -> None:
        """Set the sides' states; without that of the columns, kernels leave them out."""
        self.row_state, self.row_state_stride, self.row_is_first, self.row_is_last = rows
        (self.col_state, self.col_state_stride, self.col_is_first, self.col_is_last) = cols or rows

    def set_upstreams(self, rows: Upstream | None, cols: Upstream | None) -> None:
        """Set the sides' upstreams; None: the side has none."""
        if rows is not None:
            self.row_upstream, self.row_stride, self.row_extremes, self.row_extremes_stride = rows
        if cols is not None:
            self.col_upstream, self.col_stride, self.col_extremes, self.col_extremes_stride = cols


def block_kernel(function: Callable[..., None]) -> Kernel:
    """`kernel` for kernels of a block: `launch(programs, block, *, ...)`.

    Parameters named as an attribute of `Block`, in capitals if they are constants, are taken from
    `block`. This takes less time than to pass them.
    """
    return Kernel(function, Block.__slots__)


class State(NamedTuple):
    """The running state of one side of a block, on the host and inside kernels: see `states`."""

    numbers: Any
    stride: Any
    is_first: Any  #: whether the block is the side's first one: `numbers` is uninitialised
    is_last: Any  #: whether it is the last one, which leaves the results


class Upstream(NamedTuple):
    """The upstream of one side, on the host and inside kernels: see `states`."""

    packed: Any  #: (2 or 5, size) log-sum-exps and their gradients; None if the side has none
    stride: Any  #: of `packed`
    extremes: Any  #: (2, tiles) smallest and largest log-sum-exp of each tile, in log2
    extremes_stride: Any

    @classmethod
    def of(cls, packed: Tensor, lses: tuple[int, ...] = (0,)) -> Upstream:
        """A side with these numbers; `lses`: the log-sum-exps among them whose extremes count."""
        size, tiles = packed.shape[1], cdiv(packed.shape[1], TILE)
        extremes = packed.new_empty(2 * len(lses), tiles)
        for k, lse in enumerate(lses):
            if tiles:
                lse_extremes.launch(
                    tiles, lse=packed[lse], out=extremes[2 * k :], size=size, tiles=tiles
                )
        return cls(packed, packed.stride(0), extremes, tiles)

    def view(self, part: slice) -> Upstream:
        """These rows or columns, which must begin with a tile and end with one or with the side."""
        if part.stop - part.start == self.packed.shape[1]:
            return self
        first = part.start // TILE
        return self._replace(packed=self.packed[:, part], extremes=self.extremes[:, first:])


@kernel
def lse_extremes(lse, out, size, tiles):
    """Smallest and largest log-sum-exp of each tile of rows in log2: out[0], out[1]."""
    t = tl.program_id(0)
    i = t * B + tl.arange(0, B)
    store_extremes(tl.load(lse + i, mask=i < size, other=0.0), i < size, out + t, tiles)


@triton.jit
def store_extremes(lse, inside, out, tiles):
    """Write the smallest and the largest log-sum-exp of a tile, in log2, to out[0], out[tiles]."""
    lse = lse * LOG2E
    tl.store(out, tl.min(tl.where(inside, lse, float("inf")), 0))
    tl.store(out + tiles, tl.max(tl.where(inside, lse, float("-inf")), 0))


def ranges_of(ids: Tensor | None) -> Tensor | None:
    """Smallest and largest id of each tile of ids (m,), (2, tiles)."""
    if ids is None:
        return None
    tiles = cdiv(len(ids), TILE)
    ranges = ids.new_empty(2, tiles)
    if tiles:
        id_ranges.launch(tiles, ids=ids, out=ranges, size=len(ids), tiles=tiles)
    return ranges


class Features:
    """Features of both sides as descriptors can take them: see `aligned`."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x = aligned(x)
        self.y = self.x if y is x else aligned(y)
        self.d = self.x.shape[1]
        self._descriptors: dict[int, tuple[TensorDescriptor, TensorDescriptor]] = {}

    def descriptors(self, columns: int) -> tuple[TensorDescriptor, TensorDescriptor]:
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
