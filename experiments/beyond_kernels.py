"""Kernels of the experiments: the forward pass that also stores the exponentials, and dS from them."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from megabatch.similarity.tiles import State, add_product
from megabatch.similarity.triton import hopper, softmax
from megabatch.similarity.triton.blocking import TILE, cdiv
from megabatch.similarity.triton.blocks import by_last_tile, new_descriptor
from megabatch.similarity.triton.configs import launch_config
from megabatch.similarity.triton.hopper import (
    COMPUTING,
    COPYING,
    ROW_LAYOUT,
    SPREAD_LAYOUT,
    GluonKernel,
    copy_features,
    fence_async_shared,
    new_ring,
    place,
    products,
    store,
    tma,
)
from megabatch.similarity.triton.launch import kernel
from megabatch.similarity.triton.tiles import (
    LOG2E,
    B,
    BlockSide,
    clamped_references,
    exponentials,
    group_reference,
    shared_weights,
    spread_col_sums,
)

STAGES = gl.constexpr(5)
HALF_LAYOUT = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))
#: Fixed point: 16 bits for log2 of an exponential from CENTRE - 64 to CENTRE + 64, in steps of 1 / STEP.
STEP, CENTRE = tl.constexpr(512.0), tl.constexpr(16.0)
MAGIC = tl.constexpr(12582912.0)  # 1.5 * 2^23: a float's low bits are then the rounded integer


@triton.jit
def in_steps(own):
    """References of rows, (own + CENTRE) in whole steps."""
    return tl.floor((own + CENTRE) * STEP + 0.5)


@GluonKernel
def kept_tiles(
    x,
    y,
    kept,
    scale,
    references,
    group_references,
    row_sums,
    col_sums,
    row_ranges,
    row_range_stride,
    col_ranges,
    col_range_stride,
    ceiling,
    row_start,
    col_start,
    m,
    n,
    d,
    col_tiles,
    diagonal_offset,
    ROW_TILES: gl.constexpr,
    GROUP: gl.constexpr,
    DIAGONAL: gl.constexpr,
    COLS: gl.constexpr,
    FIXED: gl.constexpr,
):
    """`hopper.unmasked_tiles` that also stores the exponentials of each tile to `kept`."""
    ring = new_ring(x, y, STAGES)
    rows = BlockSide(None, None, row_start, m, None, row_ranges, row_range_stride, ceiling)
    cols = BlockSide(None, None, col_start, n, None, col_ranges, col_range_stride, None)
    of_rows, of_cols = (rows, references, row_sums), (cols, group_references, col_sums)
    numbers = (gl.load(scale), d, col_tiles, diagonal_offset)
    gl.warp_specialize(
        [
            (
                compute_kept,
                (0, ring, kept, of_rows, of_cols, numbers, ROW_TILES, GROUP, DIAGONAL, COLS, FIXED),
            ),
            (
                compute_kept,
                (1, ring, kept, of_rows, of_cols, numbers, ROW_TILES, GROUP, DIAGONAL, COLS, FIXED),
            ),
            (copy_features, (x, y, ring, row_start, col_start, m, col_tiles, d, ROW_TILES, GROUP)),
        ],
        [4, 1],
        [COMPUTING, COPYING],
    )


@gluon.jit
def compute_kept(
    WARPS: gl.constexpr,
    ring,
    kept,
    of_rows,
    of_cols,
    numbers,
    ROW_TILES: gl.constexpr,
    GROUP: gl.constexpr,
    DIAGONAL: gl.constexpr,
    COLS: gl.constexpr,
    FIXED: gl.constexpr,
):
    rows, references, row_sums = of_rows
    cols, group_references, col_sums = of_cols
    scale, d, col_tiles, diagonal_offset = numbers
    m, tile = rows.size, 0
    out = gl.allocate_shared_memory(kept.dtype, kept.block_shape, kept.layout)
    items = gl.cdiv(m, 2 * ROW_TILES * B) * col_tiles
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        group, tj, count = place(item, WARPS, m, col_tiles, ROW_TILES, GROUP)
        each = gl.arange(0, ROW_TILES, gl.BlockedLayout([ROW_TILES], [32], [4], [0]))
        largest = group_reference(references, group, each, m, ROW_TILES)
        gl.store(group_references + group, largest)
        col_total = gl.zeros((32, B), gl.float32, SPREAD_LAYOUT)
        for r in range(count):
            ti = group * ROW_TILES + r
            i = ti * B + gl.arange(0, B, ROW_LAYOUT)
            own = clamped_references(references, i, largest)
            acc = products(ring, tile, d, WARPS)
            tile += 1
            if FIXED:
                steps = acc * (scale * (LOG2E * STEP)) + (MAGIC - in_steps(own))[:, None]
                steps = gl.maximum(steps, MAGIC - 32768.0)
                h = steps.to(gl.int32, bitcast=True).to(gl.int16).to(kept.dtype, bitcast=True)
                tma.store_wait(0)
                out.store(h)
                fence_async_shared()
                store(kept, [ti * B, tj * B], out)
            e = exponentials(acc, scale, own, rows, cols, ti, tj, i, diagonal_offset, DIAGONAL)
            if not FIXED:
                tma.store_wait(0)
                out.store(e.to(kept.dtype))
                fence_async_shared()
                store(kept, [ti * B, tj * B], out)
            gl.store(row_sums + tj.to(gl.int64) * m + i, gl.sum(e, 1), mask=i < m)
            if COLS:
                part = spread_col_sums(e, own, largest)
                col_total += gl.convert_layout(part, SPREAD_LAYOUT, assert_trivial=True)
        if COLS:
            # By halves: the sums over warps take shared memory, of which little is left.
            left, right = col_total.reshape((32, 2, B // 2)).permute((0, 2, 1)).split()
            to = col_sums + group.to(gl.int64) * cols.size + tj * B
            j = gl.arange(0, B // 2, HALF_LAYOUT)
            gl.store(to + j, gl.convert_layout(gl.sum(left, 0), HALF_LAYOUT))
            gl.store(to + B // 2 + j, gl.convert_layout(gl.sum(right, 0), HALF_LAYOUT))
    tma.store_wait(0)


@kernel
def ds_from_kept(
    kept,
    kept_stride,
    ds,
    ds_stride,
    references,
    group_references,
    row_upstream,
    row_stride,
    row_extremes,
    row_extremes_stride,
    col_upstream,
    col_stride,
    height,
    width,
    first_row,
    GROUP_ROWS: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    FIXED: tl.constexpr,
):
    """dS of a block (height, width) from its exponentials; 128 rows x BN columns a program.

    first_row: of the block among those of the references.
    """
    strips = tl.cdiv(width, BN)
    ti, c = tl.program_id(0) // strips, tl.program_id(0) % strips
    j = c * BN + tl.arange(0, BN)
    reference = tl.load(row_extremes + row_extremes_stride + ti)
    col_weight = shared_weights(col_upstream, col_stride, j, width, reference)
    largest = tl.load(group_references + (first_row + ti * 128) // GROUP_ROWS)
    for r in tl.static_range(0, 128, BM):
        i = ti * 128 + r + tl.arange(0, BM)
        row_weight = shared_weights(row_upstream, row_stride, i, height, reference)
        own = clamped_references(references, first_row + i, largest)
        mask = (i < height)[:, None] & (j < width)[None, :]
        v = tl.load(kept + i.to(tl.int64)[:, None] * kept_stride + j[None, :], mask=mask, other=0.0)
        if FIXED:
            shift = in_steps(own) * (1 / STEP) - reference
            e = tl.exp2(v.to(tl.int16, bitcast=True).to(tl.float32) * (1 / STEP) + shift[:, None])
        else:
            e = v.to(tl.float32) * tl.exp2(own - reference)[:, None]
        e = e * (row_weight[:, None] + col_weight[None, :])
        at = ds + i.to(tl.int64)[:, None] * ds_stride + j[None, :]
        tl.store(at, e.to(ds.dtype.element_ty), mask=mask)


@kernel
def finish_rows(
    total,
    weight,
    other,
    other_weight,
    features,
    factor,
    out,
    parts,
    size,
    d,
    BM: tl.constexpr,
    BN: tl.constexpr,
):
    """out = factor * t with t = weight_i * total_i + other_weight_i * other_i, in bf16.

    parts: of the sum of <features_i, t_i>. weight, other, features: None for 1, 0, no parts.
    """
    i = tl.program_id(0) * BM + tl.arange(0, BM)
    inside = i < size
    k = tl.load(factor)
    dot = tl.zeros((BM, BN), tl.float32)
    for c in range(0, d, BN):
        j = c + tl.arange(0, BN)
        at = i.to(tl.int64)[:, None] * d + j[None, :]
        mask = inside[:, None] & (j < d)[None, :]
        t = tl.load(total + at, mask=mask, other=0.0)
        if weight is not None:
            t = t * tl.load(weight + i, mask=inside, other=0.0)[:, None]
        if other is not None:
            own = tl.load(other_weight + i, mask=inside, other=0.0)[:, None]
            t += own * tl.load(other + at, mask=mask, other=0.0).to(tl.float32)
        if features is not None:
            dot += t * tl.load(features + at, mask=mask, other=0.0).to(tl.float32)
        tl.store(out + at, (t * k).to(out.dtype.element_ty), mask=mask)
    if features is not None:
        tl.store(parts + tl.program_id(0), tl.sum(tl.sum(dot, 1), 0))


# --- on the host ----------------------------------------------------------------------------------


class Options:
    """What the experiment's tiles do; set before a step."""

    fixed = False  #: fixed point, not bf16
    in_place = False  #: dS overwrites the exponentials (a second backward pass would be wrong)
    bm, bn, warps = 32, 256, 8  #: of `ds_from_kept`
    forward_side = 0  #: rows and columns of a block of the forward pass; 0: all
    out_of_range = 0  #: rows or columns whose sums left the range, counted if `count`
    count = False
    blocks: dict = {}  #: by forward block: (rows, columns, exponentials, references, groups' ones, rows of a group)
    dtype = None  #: of the exponentials; None: the features' (the interpreter has no bfloat16)


def new_kept(x: Tensor, m: int, n: int) -> Tensor:
    stride = cdiv(n, 64) * 64
    return x.new_empty(m * stride, dtype=Options.dtype or x.dtype).as_strided((m, n), (stride, 1))


def kept_forward(
    tiles, i: slice, j: slice, rows: State, cols: State | None, kept: Tensor, fixed: bool
):
    """`SoftmaxKernelTiles.forward_block`, with the exponentials in `kept`.

    Returns the references, the groups' and the number of rows of a group.
    """
    config = launch_config("forward", tiles.features)
    block = tiles._block(i, j, config.bk)
    block.set_states(rows, cols)
    m, n = block.m, block.n
    group_rows = config.rows * TILE
    groups, col_tiles = cdiv(m, group_rows), cdiv(n, TILE)
    references = tiles._empty(groups * (group_rows + config.rows))
    group_references = tiles._empty(groups)
    row_sums, col_sums = tiles._empty(col_tiles, m), tiles._empty(groups, n)
    softmax.reference.launch(
        groups * config.rows,
        block,
        out=references,
        cols=tiles.y,
        cols_stride=tiles.y.stride(0),
        guide_cols=None,
        guide_cols_stride=0,
        num_warps=config.warps,
        num_stages=config.stages,
    )
    sums = dict(
        references=references,
        group_references=group_references,
        row_sums=row_sums,
        col_sums=col_sums,
        ROW_TILES=config.rows,
        GROUP=config.group,
        COLS=cols is not None,
    )
    ((first, count, even),) = by_last_tile(n)
    items = cdiv(groups, 2) * count
    assert even and hopper.takes(tiles.x, block, items), (even, items)
    kept_tiles.launch(
        hopper.programs(tiles.x, items),
        block,
        kept=new_descriptor(kept, TILE),
        **sums,
        col_tiles=count,
        FIXED=fixed,
    )
    softmax.combine_partials.launch(
        cdiv(m, TILE) + (0 if cols is None else col_tiles),
        block,
        row_sums=row_sums,
        references=references,
        row_partials=col_tiles,
        col_sums=col_sums,
        group_references=group_references,
        col_partials=groups,
        GROUP_ROWS=group_rows,
        TRIANGLE=False,
        num_warps=8,
        num_stages=config.stages,
    )
    if Options.count:
        total = row_sums.double().sum(0)
        weights = torch.exp2((group_references - group_references.max()).double())
        of_cols = (col_sums.double() * weights[:, None]).sum(0) if cols is not None else total
        low, high = softmax.LOWEST.value, softmax.HIGHEST.value
        Options.out_of_range += sum(int(((t < low) | (t > high)).sum()) for t in (total, of_cols))
    return references, group_references, group_rows


class KeptTiles(softmax.SoftmaxKernelTiles):
    """Both passes with the exponentials kept between them, in `Options`."""

    def __init__(self, matrix, scale) -> None:
        super().__init__(matrix, scale)
        side = Options.forward_side
        self.forward_blocks = (side, side) if side else (self.m, self.n)

    def forward_block(self, i, j, rows, cols) -> None:
        if i.start == j.start == 0:
            Options.blocks.clear()
        kept = new_kept(self.x, i.stop - i.start, j.stop - j.start)
        made = kept_forward(self, i, j, rows, cols, kept, Options.fixed)
        Options.blocks[i.start, j.start] = (i, j, kept, *made)

    def gradient_block(self, i, j, rows, cols):
        bi, bj, kept, references, group_references, group_rows = next(
            b
            for b in Options.blocks.values()
            if b[0].start <= i.start < b[0].stop and b[1].start <= j.start < b[1].stop
        )
        first_row = i.start - bi.start
        part = kept[first_row : i.stop - bi.start, j.start - bj.start : j.stop - bj.start]
        ds = part if Options.in_place else self._workspace(i, j)
        config = launch_config("backward", self.features)
        block = self._block(i, j, config.bk)
        up_rows, up_cols = rows.view(i), cols.view(j)
        block.set_upstreams(up_rows, up_cols)
        tiles, col_tiles = cdiv(block.m, TILE), cdiv(block.n, TILE)
        ds_from_kept.launch(
            tiles * cdiv(block.n, Options.bn),
            kept=part,
            kept_stride=part.stride(0),
            ds=ds,
            ds_stride=ds.stride(0),
            references=references,
            group_references=group_references,
            row_upstream=up_rows.packed,
            row_stride=up_rows.stride,
            row_extremes=up_rows.extremes,
            row_extremes_stride=up_rows.extremes_stride,
            col_upstream=up_cols.packed,
            col_stride=up_cols.stride,
            height=block.m,
            width=block.n,
            first_row=first_row,
            GROUP_ROWS=group_rows,
            BM=Options.bm,
            BN=Options.bn,
            FIXED=Options.fixed,
            num_warps=Options.warps,
        )
        softmax.masked_gradients.launch(
            cdiv(tiles * col_tiles, 64),
            block,
            ds=new_descriptor(ds, TILE),
            CHUNK=64,
            num_warps=8,
            num_stages=config.stages,
        )
        return ds


def one_sweep(x: Tensor, y: Tensor, scale: Tensor, strip: int, apart: bool = True):
    """InfoNCE's mean loss of the rows and its gradients (dx, dy, dscale) in one sweep.

    dS_ij = a_i E_ij, where E are the exponentials as the forward kernel stores them: a_i goes to
    the rows of dx afterwards and to those of x before the product, and no pass over dS is needed.
    apart: the pairs (i, i) are added in float32 afterwards, unrounded, instead of written into E.
    """
    from megabatch.similarity.matrix import PAIRED, Matrix, Side

    b, d = x.shape
    tiles = softmax.SoftmaxKernelTiles(Matrix(Side(x), Side(y), PAIRED), scale)
    whole = slice(0, b)
    kept = new_kept(x, min(strip, b), b)
    dx, dy = torch.empty_like(x), x.new_empty((b, d), dtype=torch.float32)
    loss, dscale = x.new_zeros((), dtype=torch.float32), x.new_zeros((), dtype=torch.float32)
    scaled = x.new_empty((min(strip, b), d), dtype=kept.dtype)
    total = x.new_empty((min(strip, b), d), dtype=torch.float32)
    own_weight = x.new_empty(b, dtype=torch.float32)
    config = launch_config("backward", x)
    for start in range(0, b, strip):
        i = slice(start, min(start + strip, b))
        size = i.stop - i.start
        e, t = kept[:size], total[:size]
        state = tiles.new_state(size)
        own = State(state, state.stride(0), 1, 1)
        references, group_references, group_rows = kept_forward(
            tiles, i, whole, own, None, e, False
        )
        results = state[:4]
        negative, positive = results[0], results[2]  # the sum of one positive is its logit
        difference = negative - positive
        loss += torch.nn.functional.softplus(difference, threshold=50).sum()
        gradient = torch.sigmoid(difference) / b
        largest = group_references.repeat_interleave(group_rows)[:size]
        reference = torch.maximum(references[:size], largest - 100.0)
        inverse = torch.exp2(negative * 1.4426950408889634 - reference)  # gradient / a
        weight = gradient / inverse
        zero = torch.zeros_like(inverse)
        upstream = softmax.new_upstream(
            results, torch.stack([inverse, zero, zero if apart else -inverse, zero])
        )
        block = tiles._block(i, whole, config.bk)
        block.set_upstreams(upstream, None)
        tile_count = cdiv(size, TILE) * cdiv(b, TILE)
        softmax.masked_gradients.launch(
            cdiv(tile_count, 64),
            block,
            ds=new_descriptor(e, TILE),
            CHUNK=64,
            num_warps=8,
            num_stages=config.stages,
        )
        torch.mul(x[i], weight[:, None], out=scaled[:size])
        add_product(dy, e.T, scaled[:size], start == 0)
        add_product(t, e, y, True)
        parts = x.new_empty(cdiv(size, 16), dtype=torch.float32)
        own_weight[i] = -gradient
        finish_rows.launch(
            len(parts),
            total=t,
            weight=weight,
            other=y[i] if apart else None,
            other_weight=own_weight[i] if apart else None,
            features=x[i],
            factor=scale,
            out=dx[i],
            parts=parts,
            size=size,
            d=d,
            BM=16,
            BN=128,
        )
        dscale += parts.sum()
    of_y = torch.empty_like(y)
    finish_rows.launch(
        cdiv(b, 16),
        total=dy,
        weight=None,
        other=x if apart else None,
        other_weight=own_weight if apart else None,
        features=None,
        factor=scale,
        out=of_y,
        parts=None,
        size=b,
        d=d,
        BM=16,
        BN=128,
    )
    return loss / b, dx, of_y, dscale
