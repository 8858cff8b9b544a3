"""Forward kernels of log-sum-exp: sums of exponentials, tile by tile, in base 2.

1. `reference` estimates each row's largest logit from a sample of the columns.
2. `unmasked_tiles` keeps a tile's logits in registers and takes one exponential each, which both
   sides share: row i's exponentials are relative to a reference of its own, and weighted by
   2^(row's reference - its row group's reference) they sum to the columns'. Tiles that need masks
   (`tiles.needs_mask`) are left out.
3. `softmax_combine.combine_partials` adds the tiles' sums to the running state.
"""

from __future__ import annotations

import triton
import triton.language as tl

from megabatch.similarity.triton.operands import block_kernel
from megabatch.similarity.triton.tiles import (
    LOG2E,
    B,
    BlockSide,
    needs_mask,
    swizzle,
    unmasked_logits,
)


@block_kernel
def reference(
    x, cols, cols_stride, scale, out, row_ids, col_ids, ceiling, guide_x, guide_cols,
    guide_cols_stride, guide_d, row_start, col_start, m, n, d, diagonal_offset,
    BK: tl.constexpr, DIAGONAL: tl.constexpr, GUIDE_BK: tl.constexpr,
):  # fmt: skip
    """out[i] = row i's largest logit among B columns spread over the block, in log2, minus 20.

    Only negatives count: a positive far above them would push the sum of the negatives out of
    range. Rows past m get +inf, so their exponentials are 0. Subtracting 20 centres the sums in
    float32's range: a column's sum is relative to the largest reference of a group of rows, so it
    tends to be small.
    """
    i0 = tl.program_id(0) * B
    i = i0 + tl.arange(0, B)
    j = tl.arange(0, B) * tl.maximum(n // B, 1)
    present = j < n
    at = cols + (col_start + j).to(tl.int64) * cols_stride
    s = _spread_logits(x, at, row_start + i0, present, d, BK) * tl.load(scale)
    if row_ids is not None:
        own = tl.load(row_ids + i, mask=i < m, other=-1)
        others = tl.load(col_ids + j, mask=present, other=-2)
        present = present[None, :] & ((own[:, None] != others[None, :]) | (own < 0)[:, None])
    else:
        present = present[None, :] & (i >= 0)[:, None]
    if DIAGONAL != 0:
        present = present & (i[:, None] != (j + diagonal_offset)[None, :])
    if ceiling is not None:
        compared = s
        if guide_x is not None:
            at = guide_cols + (col_start + j).to(tl.int64) * guide_cols_stride
            compared = _spread_logits(guide_x, at, row_start + i0, j < n, guide_d, GUIDE_BK)
        present = present & ~(compared > tl.load(ceiling + i, mask=i < m, other=0.0)[:, None])
    largest = tl.max(tl.where(present, s * LOG2E, float("-inf")), 1)
    largest = tl.where(largest == float("-inf"), 0.0, largest) - 20.0
    tl.store(out + i, tl.where(i < m, largest, float("inf")))


@triton.jit
def _spread_logits(x, at, i0, present, d, BK: tl.constexpr):
    """x[i0:i0+B] against the columns at B addresses, without the scale."""
    s = tl.zeros((B, B), tl.float32)
    for c in tl.range(0, d, BK):
        k = c + tl.arange(0, BK)
        mask = present[:, None] & (k < d)[None, :]
        b = tl.load(at[:, None] + k[None, :], mask=mask, other=0.0)
        s = tl.dot(x.load([i0, c]), b.T, s, input_precision="tf32")
    return s


@block_kernel
def unmasked_tiles(
    x, y, scale, references, group_references, row_sums, col_sums,
    row_ranges, row_range_stride, col_ranges, col_range_stride, ceiling, guide_x, guide_y, guide_d,
    row_start, col_start, m, n, d, first_col_tile, col_tiles, diagonal_offset,
    BK: tl.constexpr, ROW_TILES: tl.constexpr, GROUP: tl.constexpr, DIAGONAL: tl.constexpr,
    GUIDE_BK: tl.constexpr, COLS: tl.constexpr, EVEN_N: tl.constexpr, TRIANGLE: tl.constexpr,
):  # fmt: skip
    """row_sums[column tile, i] and col_sums[row group, j] of 2^(logit - reference).

    A row group is the ROW_TILES tiles of one program; group_references[group] becomes its largest
    reference. Tiles that need masks add nothing. Unless EVEN_N, the last of these column tiles
    reaches past n. TRIANGLE: the block is symmetric; nothing is written left of a group's first
    tile on the diagonal, where `softmax_combine` uses the columns' sums instead.
    """
    rows = BlockSide(x, guide_x, row_start, m, None, row_ranges, row_range_stride, ceiling)
    cols = BlockSide(y, guide_y, col_start, n, None, col_ranges, col_range_stride, None)
    group, tj = swizzle(tl.program_id(0), tl.cdiv(m, B * ROW_TILES), col_tiles, GROUP)
    tj += first_col_tile
    if TRIANGLE:  # noqa: SIM102 - one is known when the kernel is compiled
        if tj < group * ROW_TILES:
            return
    j0 = tj * B
    factor = tl.load(scale)
    k = factor * LOG2E
    group_reference = _largest_reference(references, group, ROW_TILES * B)
    tl.store(group_references + group, group_reference)  # all programs of a group write the same
    # The columns' sums stay spread over the threads until all row tiles are in: reducing each tile
    # across a warp costs 4% of the kernel.
    col_total = tl.zeros((32, B), tl.float32)
    for r in tl.range(0, ROW_TILES, flatten=True):
        ti = group * ROW_TILES + r
        i = ti * B + tl.arange(0, B)
        acc = unmasked_logits(rows, cols, ti, tj, d, guide_d, BK, GUIDE_BK)
        own = clamped_references(references, i, group_reference)
        shift = own
        if DIAGONAL != 0 or row_ranges is not None:
            last = tl.cdiv(m, B) - 1  # the last group may reach past the last row tile
            skipped = needs_mask(tl.minimum(ti, last), tj, rows, cols, diagonal_offset, DIAGONAL)
            shift = tl.where(skipped, float("inf"), own)
        if ceiling is not None and guide_x is None:
            highest = tl.load(ceiling + i, mask=i < m, other=0.0)
            acc = tl.where(acc * factor > highest[:, None], float("-inf"), acc)
        e = tl.exp2(acc * k - shift[:, None])
        if ceiling is not None:  # a scale of 0 turns -inf into NaN, a negative one into +inf
            e = tl.where(acc == float("-inf"), 0.0, e)
        if not EVEN_N:
            e = tl.where((j0 + tl.arange(0, B) < n)[None, :], e, 0.0)
        tl.store(row_sums + tj.to(tl.int64) * m + i, tl.sum(e, 1), mask=i < m)
        if COLS:
            e = e * tl.exp2(tl.minimum(own - group_reference, 0.0))[:, None]
            spread = tl.reshape(e, (B // 64, 4, 2, 8, B))
            col_total += tl.reshape(tl.sum(tl.sum(spread, 2), 0), (32, B))
    if COLS:
        j = j0 + tl.arange(0, B)
        tl.store(col_sums + group.to(tl.int64) * n + j, tl.sum(col_total, 0), mask=j < n)


@triton.jit
def _largest_reference(references, group, ROWS: tl.constexpr):
    """Largest reference of a group of rows; rows past the end have +inf and do not count."""
    own = tl.load(references + group * ROWS + tl.arange(0, ROWS))
    return tl.max(tl.where(own == float("inf"), float("-inf"), own), 0)


@triton.jit
def clamped_references(references, i, group_reference):
    """References of rows, raised if far below their group's: the columns' weights would vanish."""
    return tl.maximum(tl.load(references + i), group_reference - 100.0)
