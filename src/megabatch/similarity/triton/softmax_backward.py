"""Backward kernels of log-sum-exp: dS of a block, rounded once to the features' dtype.

Two cuBLAS products with dS then give dx and dy.

1. `lse_and_grad` gathers, for one side, the log-sum-exps and their upstream gradients.
2. `unmasked_tiles` takes one exponential a logit for both sides, relative to the tile's largest row
   log-sum-exp.
3. `masked_tiles` takes two exponentials, with masks. It overwrites the tiles that need masks and
   those whose log-sum-exps lie too far apart to share a reference.

A side's upstream has these rows: log-sum-exp over negatives, its upstream gradient; if pairs can be
positive, the same two over positives, and the upstream gradient of their sum of logits.
"""

from __future__ import annotations

import triton
import triton.language as tl

from megabatch.similarity.triton.blocks import Upstream, block_kernel
from megabatch.similarity.triton.launch import kernel
from megabatch.similarity.triton.tiles import (
    LOG2E,
    B,
    BlockSide,
    halves,
    logits_tile,
    mask_tile,
    needs_mask,
    store_extremes,
    swizzle,
    unmasked_logits,
)

#: Largest difference of log2 log-sum-exps that share one exponential's reference. Sharing loses
#: probabilities under 2^(80 - 126) = 2^-46, 4M of them under 2^-24.
SPREAD = tl.constexpr(80.0)


@kernel
def lse_and_grad(
    results, result_stride, gradients, gradient_stride, out, extremes, size, tiles,
    HAS_POSITIVES: tl.constexpr,
):  # fmt: skip
    """A side's rows of log-sum-exps and gradients, and its tiles' `lse_extremes`, in one launch.

    A log-sum-exp over no pair, -inf, becomes +inf with gradient 0: its exponentials are then 0.
    """
    t = tl.program_id(0)
    i = t * B + tl.arange(0, B)
    inside = i < size
    for kind in tl.static_range(2 if HAS_POSITIVES else 1):  # negatives, positives
        lse = tl.load(results + kind * result_stride + i, mask=inside, other=0.0)
        gradient = tl.load(gradients + kind * gradient_stride + i, mask=inside, other=0.0)
        empty = lse == float("-inf")
        lse = tl.where(empty, float("inf"), lse)
        tl.store(out + 2 * kind * size.to(tl.int64) + i, lse, mask=inside)
        gradient = tl.where(empty, 0.0, gradient)
        tl.store(out + (2 * kind + 1) * size.to(tl.int64) + i, gradient, mask=inside)
        if kind == 0:
            store_extremes(lse, inside, extremes + t, tiles)
    if HAS_POSITIVES:
        gradient = tl.load(gradients + 2 * gradient_stride + i, mask=inside, other=0.0)
        tl.store(out + 4 * size.to(tl.int64) + i, gradient, mask=inside)


@triton.jit
def needs_two_exponentials(ti, tj, rows, cols, LSE: tl.constexpr):
    """Whether the log-sum-exps of a tile lie more than SPREAD apart; ti and tj may be vectors.

    rows, cols: `Upstream`s. LSE: 0 for their first extremes, 2 for the second.
    """
    low = tl.load(rows.extremes + LSE * rows.extremes_stride + ti)
    high = tl.load(rows.extremes + (LSE + 1) * rows.extremes_stride + ti)
    if cols.extremes is not None:
        low = tl.minimum(low, tl.load(cols.extremes + LSE * cols.extremes_stride + tj))
        high = tl.maximum(high, tl.load(cols.extremes + (LSE + 1) * cols.extremes_stride + tj))
    return (high - low <= SPREAD) == 0  # infinite and NaN differences count as too large


@block_kernel
def unmasked_tiles(
    x, y, ds, scale, row_upstream, row_stride, col_upstream, col_stride, ceiling,
    guide_x, guide_y, guide_d, row_start, col_start, m, n, d,
    BK: tl.constexpr, ROW_TILES: tl.constexpr, GROUP: tl.constexpr, SPLIT: tl.constexpr,
    GUIDE_BK: tl.constexpr, TRIANGLE: tl.constexpr,
):  # fmt: skip
    """dS of ROW_TILES row tiles per program, as if no tile needed masks or two exponentials.

    dS is stored in SPLIT pieces. TRIANGLE, with ROW_TILES = 1: the block is symmetric; tiles above
    the diagonal are computed and stored twice, once transposed.
    """
    rows = BlockSide(x, guide_x, row_start, m, None, None, None, ceiling)
    cols = BlockSide(y, guide_y, col_start, n, None, None, None, None)
    group, tj = swizzle(tl.program_id(0), tl.cdiv(m, B * ROW_TILES), tl.cdiv(n, B), GROUP)
    if TRIANGLE:  # noqa: SIM102 - one is known when the kernel is compiled
        if tj < group:
            return
    j0 = tj * B
    j = j0 + tl.arange(0, B)
    scale_factor = tl.load(scale)
    k = scale_factor * LOG2E
    if col_upstream is not None:
        col_lse = tl.load(col_upstream + j, mask=j < n, other=float("inf")) * LOG2E
        col_grad = tl.load(col_upstream + col_stride + j, mask=j < n, other=0.0)
    for r in tl.range(0, ROW_TILES, flatten=True):
        ti = group * ROW_TILES + r
        i0 = ti * B
        i = i0 + tl.arange(0, B)
        acc = unmasked_logits(rows, cols, ti, tj, d, guide_d, BK, GUIDE_BK)
        row_lse = tl.load(row_upstream + i, mask=i < m, other=float("-inf")) * LOG2E
        reference = tl.max(row_lse, 0)
        row_grad = tl.load(row_upstream + row_stride + i, mask=i < m, other=0.0)
        row_grad = tl.where(i < m, row_grad * tl.exp2(reference - row_lse), 0.0)
        e = tl.exp2(acc * k - reference)
        if col_upstream is not None:
            e = e * (row_grad[:, None] + (col_grad * tl.exp2(reference - col_lse))[None, :])
        else:
            e = e * row_grad[:, None]
        if guide_x is not None:
            e = tl.where(acc == float("-inf"), 0.0, e)
        elif ceiling is not None:
            highest = tl.load(ceiling + i, mask=i < m, other=0.0)
            e = tl.where(acc * scale_factor > highest[:, None], 0.0, e)
        e = e.to(ds.dtype)
        _store_ds(ds, i0, j0, e, SPLIT)
        if TRIANGLE:  # noqa: SIM102 - one is known when the kernel is compiled
            if group < tj:
                _store_ds(ds, j0, i0, tl.trans(e), SPLIT)


@triton.jit
def _store_ds(ds, i0, j0, e, SPLIT: tl.constexpr):
    if SPLIT == 1:
        ds.store([i0, j0], e)
    else:
        left, right = halves(e)
        ds.store([i0, j0], left)
        ds.store([i0, j0 + B // 2], right)


@block_kernel
def masked_tiles(
    x, y, ds, scale, row_upstream, row_stride, col_upstream, col_stride,
    row_extremes, row_extremes_stride, col_extremes,
    col_extremes_stride,
    row_ids, row_ranges, row_range_stride, col_ids, col_ranges, col_range_stride, ceiling,
    guide_x, guide_y, guide_d, row_start, col_start, m, n, d, diagonal_offset,
    BK: tl.constexpr, CHUNK: tl.constexpr, DIAGONAL: tl.constexpr, PAIRED: tl.constexpr,
    GUIDE_BK: tl.constexpr, HAS_POSITIVES: tl.constexpr,
):  # fmt: skip
    """dS of the tiles that need masks or two exponentials; of all without upstream of the rows.

    Each program looks at CHUNK tiles at once and leaves early if none is its own.
    """
    rows = BlockSide(x, guide_x, row_start, m, row_ids, row_ranges, row_range_stride, ceiling)
    cols = BlockSide(y, guide_y, col_start, n, col_ids, col_ranges, col_range_stride, None)
    of_rows = Upstream(row_upstream, row_stride, row_extremes, row_extremes_stride)
    of_cols = Upstream(col_upstream, col_stride, col_extremes, col_extremes_stride)
    tiles = tl.cdiv(n, B)
    start = tl.program_id(0) * CHUNK
    total = tl.cdiv(m, B) * tiles
    if row_upstream is not None:
        index = tl.minimum(start + tl.arange(0, CHUNK), total - 1)
        candidates = _is_masked(
            index // tiles, index % tiles, rows, cols, of_rows, of_cols, diagonal_offset, DIAGONAL
        )  # fmt: skip
        if tl.max(candidates.to(tl.int32), 0) == 0:
            return
    k = tl.load(scale)
    for t in tl.range(start, tl.minimum(start + CHUNK, total)):
        ti = t // tiles
        tj = t % tiles
        wanted = True
        if row_upstream is not None:
            wanted = _is_masked(ti, tj, rows, cols, of_rows, of_cols, diagonal_offset, DIAGONAL)
        if wanted:
            s = logits_tile(rows, cols, ti, tj, d, BK) * k
            negative, positive = mask_tile(
                s, rows, cols, ti, tj, diagonal_offset, guide_d, DIAGONAL, PAIRED, GUIDE_BK
            )  # fmt: skip
            g = tl.zeros((B, B), tl.float32)  # of a negative
            h = tl.zeros((B, B), tl.float32)  # of a positive
            if row_upstream is not None:
                i = ti * B + tl.arange(0, B)
                g += softmax_grad(s, of_rows, i, m, 0, 1)
                if HAS_POSITIVES:
                    h += softmax_grad(s, of_rows, i, m, 2, 1)
                    of_sum = tl.load(row_upstream + 4 * row_stride + i, mask=i < m, other=0.0)
                    h += of_sum[:, None]
            if col_upstream is not None:
                j = tj * B + tl.arange(0, B)
                g += softmax_grad(s, of_cols, j, n, 0, 0)
                if HAS_POSITIVES:
                    h += softmax_grad(s, of_cols, j, n, 2, 0)
                    of_sum = tl.load(col_upstream + 4 * col_stride + j, mask=j < n, other=0.0)
                    h += of_sum[None, :]
            g = tl.where(negative, g, tl.where(positive, h, 0.0))
            ds.store([ti * B, tj * B], g.to(ds.dtype))


@triton.jit
def _is_masked(ti, tj, rows, cols, of_rows, of_cols, diagonal_offset, DIAGONAL: tl.constexpr):
    """Whether `masked_tiles` must take a tile; ti and tj may be vectors."""
    spread = needs_two_exponentials(ti, tj, of_rows, of_cols, 0)
    return spread | needs_mask(ti, tj, rows, cols, diagonal_offset, DIAGONAL)


@triton.jit
def softmax_grad(s, upstream, index, size, LSE: tl.constexpr, AXIS: tl.constexpr):
    """upstream gradient * e^(s - log-sum-exp) of one side; AXIS 1: of the rows.

    LSE: the number of the upstream that is the log-sum-exp; its gradient is the next.
    """
    inside = index < size
    packed, stride = upstream.packed, upstream.stride
    lse = tl.load(packed + LSE * stride + index, mask=inside, other=float("inf"))
    gradient = tl.load(packed + (LSE + 1) * stride + index, mask=inside, other=0.0)
    e = tl.exp2((s - tl.expand_dims(lse, AXIS)) * LOG2E)
    # For a pair of the other kind the exponential may overflow; the caller masks it out.
    return e * tl.expand_dims(gradient, AXIS)
