"""Kernels of the softmax losses' tiles for Hopper GPUs, in Gluon, which comes with Triton.

They take the places of `softmax.unmasked_tiles` and `softmax.unmasked_gradients`, with the same
arithmetic (`tiles`). Only the products are made in another way. One program fills a multiprocessor:
one warp copies features, and two groups of four warps take turns. While the tensor cores multiply
for one group, the other computes exponentials and stores.

A program goes over items: a column tile and two neighbouring groups of ROW_TILES row tiles, one for
each group of warps (of an odd number of groups of rows, both take the last). So the tiles of the
two alternate strictly, and all three parties number the steps of the products alike. A wait for a
barrier names only the parity of a phase, so no party may be a whole phase ahead of the barrier:

- A group starts on a tile when the other has issued all products of the tile before (`turn`), hence
  has waited for all copies until then. The other cannot start on its next tile before.
- The copying warp fills a stage anew when the products that read it are done (`empty`).

No party waits for a step after its own, so none waits for ever.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as GluonDescriptor

from megabatch.similarity.backends import capability
from megabatch.similarity.triton.blocking import TILE
from megabatch.similarity.triton.blocks import Block
from megabatch.similarity.triton.launch import Descriptor, Kernel, past_binding
from megabatch.similarity.triton.tiles import (
    B,
    BlockSide,
    clamped_references,
    exponentials,
    group_reference,
    shared_weights,
    spread_col_sums,
    swizzle,
    unmasked_ds,
)

# Triton 3.9 has other names for the copies.
load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
store = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global

#: Features of a step of the products; stages of both sides' features, as many as fit.
BK, FORWARD_STAGES, BACKWARD_STAGES = gl.constexpr(64), gl.constexpr(6), gl.constexpr(5)
#: Registers of a thread that computes and of one that copies.
COMPUTING, COPYING = gl.constexpr(232), gl.constexpr(24)
#: How a group of warps holds a tile of products, a number for each row and for each column of it,
#: sums of columns as `spread_col_sums` leaves them, and a vector of which each thread has its part.
ACC_LAYOUT = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE, 16]))
ROW_LAYOUT = gl.constexpr(gl.SliceLayout(1, ACC_LAYOUT.value))
COL_LAYOUT = gl.constexpr(gl.SliceLayout(0, ACC_LAYOUT.value))
SPREAD_LAYOUT = gl.constexpr(gl.DistributedLinearLayout(
    [[0, 1], [0, 8], [0, 16], [0, 32], [0, 64]], [[0, 2], [0, 4], [1, 0], [2, 0], [4, 0]],
    [[8, 0], [16, 0]], [], [32, TILE],
))  # fmt: skip
FLAT_LAYOUT = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))


def takes(x: Tensor, block: Block, items: int) -> bool:
    """Whether these kernels compute a block of features like x that is that many items."""
    return (
        past_binding
        and x.is_cuda
        and x.element_size() == 2
        and capability(x.device) == (9, 0)
        and block.bk == BK.value
        and block.guide_x is None
        and items >= multiprocessors(x.device)
    )


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """Multiprocessors of a GPU; one program fits on each."""
    return torch.cuda.get_device_properties(device).multi_processor_count


def programs(x: Tensor, items: int) -> int:
    """How many programs to launch: one for each multiprocessor, among several processes two.

    A transfer may hold some when a launch begins. If none does, two cost up to 7%.
    """
    waves = 2 if dist.is_available() and dist.is_initialized() else 1
    return min(items, waves * multiprocessors(x.device))


class GluonKernel(Kernel):
    """A kernel of a block in Gluon."""

    def __init__(self, function: Callable[..., None]) -> None:
        super().__init__(function, Block.NAMES, gluon.jit)

    @staticmethod
    def descriptor(a: Any) -> Any:
        """Gluon's descriptor for one of ours; compiled kernels take Triton's too."""
        if type(a) is not Descriptor:
            return a
        dtype = gl.float16 if a.base.dtype == torch.float16 else gl.bfloat16
        layout = gl.NVMMASharedLayout.get_default_for(a.block_shape, dtype)
        return a.made(GluonDescriptor, layout)


# --- the three parties ----------------------------------------------------------------------------


class Ring(NamedTuple):
    """Stages of features in shared memory, and barriers, inside a kernel."""

    x: Any  #: (stages, B, BK)
    y: Any  #: (stages, B, BK)
    full: Any  #: of each stage: features have been copied into it
    empty: Any  #: of each stage: products have read it
    turn: Any  #: of each group of warps: the other has issued its products


@gluon.jit
def new_ring(x, y, STAGES: gl.constexpr):
    """The stages of tiles of x and y, empty."""
    of_x = gl.allocate_shared_memory(x.dtype, [STAGES, B, BK], x.layout)
    of_y = gl.allocate_shared_memory(y.dtype, [STAGES, B, BK], y.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    turn = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(STAGES):
        mbarrier.init(full.index(s), count=1)
        mbarrier.init(empty.index(s), count=1)
    for warps in gl.static_range(2):
        mbarrier.init(turn.index(warps), count=1)
    fence_async_shared()
    return Ring(of_x, of_y, full, empty, turn)


@gluon.jit
def place(item, warps, m, col_tiles, ROW_TILES: gl.constexpr, GROUP: gl.constexpr):
    """(group of rows, column tile, row tiles) of a group of warps in an item."""
    groups = gl.cdiv(m, ROW_TILES * B)
    pair, tj = swizzle(item, gl.cdiv(groups, 2), col_tiles, GROUP)
    count = gl.minimum(gl.cdiv(m, B) - 2 * pair * ROW_TILES, ROW_TILES)
    return gl.minimum(2 * pair + warps, groups - 1), tj, count


@gluon.jit
def copy_features(
    x, y, ring, row_start, col_start, m, col_tiles, d, ROW_TILES: gl.constexpr, GROUP: gl.constexpr
):
    """Copy the features of all tiles, step by step, in the order of the products."""
    STAGES: gl.constexpr = ring.x.shape[0]
    items = gl.cdiv(m, 2 * ROW_TILES * B) * col_tiles
    step = 0
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        _, tj, count = place(item, 0, m, col_tiles, ROW_TILES, GROUP)
        for r in range(count):
            for warps in gl.static_range(2):
                group, _, _ = place(item, warps, m, col_tiles, ROW_TILES, GROUP)
                i0 = row_start + (group * ROW_TILES + r) * B
                for c in range(0, d, BK):
                    s = step % STAGES
                    mbarrier.wait(ring.empty.index(s), (step // STAGES + 1) & 1)
                    full = ring.full.index(s)
                    mbarrier.expect(full, x.block_type.nbytes + y.block_type.nbytes)
                    load(x, [i0, c], full, ring.x.index(s))
                    load(y, [col_start + tj * B, c], full, ring.y.index(s))
                    step += 1


@gluon.jit
def products(ring, tile, d, WARPS: gl.constexpr):
    """A tile of x yᵀ, in float32: number `tile` of this group of warps."""
    STAGES: gl.constexpr = ring.x.shape[0]
    steps = gl.cdiv(d, BK)
    step = (2 * tile + WARPS) * steps
    mbarrier.wait(ring.turn.index(WARPS), (tile + 1 - WARPS) & 1)
    acc = warpgroup_mma_init(gl.zeros((B, B), gl.float32, ACC_LAYOUT))
    for c in range(steps):
        s = step % STAGES
        mbarrier.wait(ring.full.index(s), (step // STAGES) & 1)
        y = ring.y.index(s).permute((1, 0))
        acc = warpgroup_mma(ring.x.index(s), y, acc, use_acc=c > 0, is_async=True)
        # The products of the step before are done now.
        acc = warpgroup_mma_init(warpgroup_mma_wait(1, deps=(acc,)))
        mbarrier.arrive(ring.empty.index((step + STAGES - 1) % STAGES), pred=c > 0)
        step += 1
    mbarrier.arrive(ring.turn.index(1 - WARPS))
    out = warpgroup_mma_wait(0, deps=(acc,))
    mbarrier.arrive(ring.empty.index((step + STAGES - 1) % STAGES))
    return out


# --- forward --------------------------------------------------------------------------------------


@GluonKernel
def unmasked_tiles(
    x, y, scale, references, group_references, row_sums, col_sums,
    row_ranges, row_range_stride, col_ranges, col_range_stride, ceiling,
    row_start, col_start, m, n, d, col_tiles, diagonal_offset, ROW_TILES: gl.constexpr,
    GROUP: gl.constexpr, DIAGONAL: gl.constexpr, COLS: gl.constexpr,
):  # fmt: skip
    """`softmax.unmasked_tiles`, of all full column tiles."""
    ring = new_ring(x, y, FORWARD_STAGES)
    rows = BlockSide(None, None, row_start, m, None, row_ranges, row_range_stride, ceiling)
    cols = BlockSide(None, None, col_start, n, None, col_ranges, col_range_stride, None)
    of_rows, of_cols = (rows, references, row_sums), (cols, group_references, col_sums)
    numbers = (gl.load(scale), d, col_tiles, diagonal_offset)
    gl.warp_specialize([
        (compute_sums, (0, ring, of_rows, of_cols, numbers, ROW_TILES, GROUP, DIAGONAL, COLS)),
        (compute_sums, (1, ring, of_rows, of_cols, numbers, ROW_TILES, GROUP, DIAGONAL, COLS)),
        (copy_features, (x, y, ring, row_start, col_start, m, col_tiles, d, ROW_TILES, GROUP)),
    ], [4, 1], [COMPUTING, COPYING])  # fmt: skip


@gluon.jit
def compute_sums(
    WARPS: gl.constexpr, ring, of_rows, of_cols, numbers, ROW_TILES: gl.constexpr,
    GROUP: gl.constexpr, DIAGONAL: gl.constexpr, COLS: gl.constexpr,
):  # fmt: skip
    """The sums of one group of warps."""
    rows, references, row_sums = of_rows
    cols, group_references, col_sums = of_cols
    scale, d, col_tiles, diagonal_offset = numbers
    m, tile = rows.size, 0
    items = gl.cdiv(m, 2 * ROW_TILES * B) * col_tiles
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        group, tj, count = place(item, WARPS, m, col_tiles, ROW_TILES, GROUP)
        each = gl.arange(0, ROW_TILES, gl.BlockedLayout([ROW_TILES], [32], [4], [0]))
        largest = group_reference(references, group, each, m, ROW_TILES)
        gl.store(group_references + group, largest)
        col_total = gl.zeros((32, B), gl.float32, SPREAD_LAYOUT)
        for r in range(count):
            # Loads take their time during the other group's products.
            ti = group * ROW_TILES + r
            i = ti * B + gl.arange(0, B, ROW_LAYOUT)
            own = clamped_references(references, i, largest)
            acc = products(ring, tile, d, WARPS)
            tile += 1
            e = exponentials(acc, scale, own, rows, cols, ti, tj, i, diagonal_offset, DIAGONAL)
            gl.store(row_sums + tj.to(gl.int64) * m + i, gl.sum(e, 1), mask=i < m)
            if COLS:
                part = spread_col_sums(e, own, largest)
                col_total += gl.convert_layout(part, SPREAD_LAYOUT, assert_trivial=True)
        if COLS:
            j = tj * B + gl.arange(0, B, gl.SliceLayout(0, SPREAD_LAYOUT))
            gl.store(col_sums + group.to(gl.int64) * cols.size + j, gl.sum(col_total, 0))


# --- backward -------------------------------------------------------------------------------------


@GluonKernel
def unmasked_gradients(
    x, y, ds, scale, row_upstream, row_stride, row_extremes, row_extremes_stride,
    col_upstream, col_stride, ceiling, row_start, col_start, m, n, d, GROUP: gl.constexpr,
):  # fmt: skip
    """`softmax.unmasked_gradients`."""
    ring = new_ring(x, y, BACKWARD_STAGES)
    rows = BlockSide(None, None, row_start, m, None, None, None, ceiling)
    of_rows = (rows, row_upstream, row_stride, row_extremes + row_extremes_stride)
    of_cols = (n, col_upstream, col_stride)
    numbers = (gl.load(scale), d)
    gl.warp_specialize([
        (compute_ds, (0, ring, ds, of_rows, of_cols, numbers, GROUP)),
        (compute_ds, (1, ring, ds, of_rows, of_cols, numbers, GROUP)),
        (copy_features, (x, y, ring, row_start, col_start, m, gl.cdiv(n, B), d, 1, GROUP)),
    ], [4, 1], [COMPUTING, COPYING])  # fmt: skip


@gluon.jit
def compute_ds(WARPS: gl.constexpr, ring, ds, of_rows, of_cols, numbers, GROUP: gl.constexpr):
    """dS of one group of warps."""
    rows, row_upstream, row_stride, references = of_rows
    n, col_upstream, col_stride = of_cols
    scale, d = numbers
    m, col_tiles = rows.size, gl.cdiv(n, B)
    out = gl.allocate_shared_memory(ds.dtype, ds.block_shape, ds.layout)
    for item in range(gl.program_id(0), gl.cdiv(m, 2 * B) * col_tiles, gl.num_programs(0)):
        # Loads take their time during the other group's products, and one column's per thread.
        ti, tj, _ = place(item, WARPS, m, col_tiles, 1, GROUP)
        i, j = ti * B + gl.arange(0, B, ROW_LAYOUT), tj * B + gl.arange(0, B, FLAT_LAYOUT)
        reference = gl.load(references + ti)
        row_weight = shared_weights(row_upstream, row_stride, i, m, reference)
        col_weight = None
        if col_upstream is not None:
            col_weight = shared_weights(col_upstream, col_stride, j, n, reference)
        acc = products(ring, item // gl.num_programs(0), d, WARPS)
        if col_upstream is not None:
            col_weight = gl.convert_layout(col_weight, COL_LAYOUT)
        e = unmasked_ds(acc, scale, reference, row_weight, col_weight, rows, i).to(ds.dtype)
        tma.store_wait(0)  # for the tile before to be read
        out.store(e)
        fence_async_shared()
        store(ds, [ti * B, tj * B], out)
    tma.store_wait(0)
