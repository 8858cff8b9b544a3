"""The forward pass's sums: a tile's logits live in registers only; exponents are in base 2.

`tile` takes one exponential a logit for both sides: row i's are relative to a reference of its
own (`reference`), and weighted by 2^(row's reference - the row group's) they sum to the columns'.
It leaves out the tiles that need masks for some pairs (`tiles.mixed`). `settle.settle` adds the
tiles' sums to the running state.
"""

from __future__ import annotations

import triton
import triton.language as tl

from megabatch.similarity.backends.triton.launch import kernel
from megabatch.similarity.backends.triton.tiles import LOG2E, mixed, swizzle


@kernel
def reference(
    x, y, y_stride, scale, out, row_ids, column_ids, ceiling, row_start, column_start, m, n, d,
    diagonal_offset,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, DIAGONAL: tl.constexpr,
    IDS: tl.constexpr, CEILING: tl.constexpr,
):  # fmt: skip
    """out[i] = largest of row i's logits against BN columns spread over all, in log2, less 20.

    Only negatives count: a positive far above them would push their sum out of range. Rows past m
    get +inf, whose exponentials are 0. The 20 centre the sums in float32's range: a column's sum
    is relative to the largest of a group of rows, so it is rather too small.
    """
    i0 = tl.program_id(0) * BM
    i = i0 + tl.arange(0, BM)
    j = tl.arange(0, BN) * tl.maximum(n // BN, 1)
    present = j < n
    columns = y + (column_start + j).to(tl.int64) * y_stride
    s = tl.zeros((BM, BN), tl.float32)
    for c in tl.range(0, d, BK):
        k = c + tl.arange(0, BK)
        mask = present[:, None] & (k < d)[None, :]
        b = tl.load(columns[:, None] + k[None, :], mask=mask, other=0.0)
        s = tl.dot(x.load([row_start + i0, c]), b.T, s, input_precision="tf32")
    s *= tl.load(scale)
    if IDS:
        own = tl.load(row_ids + i, mask=i < m, other=-1)
        others = tl.load(column_ids + j, mask=present, other=-2)
        present = present[None, :] & ((own[:, None] != others[None, :]) | (own < 0)[:, None])
    else:
        present = present[None, :] & (i >= 0)[:, None]
    if DIAGONAL:
        present = present & (i[:, None] != (j + diagonal_offset)[None, :])
    if CEILING:
        present = present & ~(s > tl.load(ceiling + i, mask=i < m, other=0.0)[:, None])
    largest = tl.max(tl.where(present, s * LOG2E, float("-inf")), 1)
    largest = tl.where(largest == float("-inf"), 0.0, largest) - 20.0
    tl.store(out + i, tl.where(i < m, largest, float("inf")))


@kernel
def tile(
    x, y, scale, references, tops, row_sums, column_sums, row_ranges, row_range_stride,
    column_ranges, column_range_stride, ceiling, row_start, column_start, m, n, d,
    first_column_tile, column_tiles, diagonal_offset,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, R: tl.constexpr, GROUP: tl.constexpr,
    DIAGONAL: tl.constexpr, IDS: tl.constexpr, CEILING: tl.constexpr, COLUMNS: tl.constexpr,
    EVEN: tl.constexpr, TRIANGLE: tl.constexpr,
):  # fmt: skip
    """row_sums[tile column, i], column_sums[group of R row tiles, j] of 2^(logit - reference).

    tops[group] becomes the largest reference of a group. Mixed tiles count nothing. Not EVEN: some
    of these column_tiles reaches past n. TRIANGLE: the block is symmetric, and left of a group's
    first tile on the diagonal nothing is written; `settle` takes columns' sums for it.
    """
    group, tj = swizzle(tl.program_id(0), tl.cdiv(m, BM * R), column_tiles, GROUP)
    tj += first_column_tile
    if TRIANGLE:  # noqa: SIM102 - one is known when the kernel is compiled
        if tj < group * R:
            return
    j0 = tj * BN
    factor = tl.load(scale)
    k = factor * LOG2E
    top = _top(references, group, R * BM)
    tl.store(tops + group, top)  # every program of the group writes the same
    # The columns' sums stay spread over the threads until all R tiles are in: reducing each tile
    # across a warp costs 4% of the kernel.
    columns = tl.zeros((32, BN), tl.float32)
    for r in tl.range(0, R, flatten=True):
        ti = group * R + r
        i0 = ti * BM
        i = i0 + tl.arange(0, BM)
        acc = tl.zeros((BM, BN), tl.float32)
        for c in tl.range(0, d, BK):
            a = x.load([row_start + i0, c])
            acc = tl.dot(a, y.load([column_start + j0, c]).T, acc, input_precision="tf32")
        own = clamped(references, i, top)
        shift = own
        if DIAGONAL or IDS:
            # The last group may reach past the rows' tiles.
            skipped = mixed(
                tl.minimum(ti, tl.cdiv(m, BM) - 1), tj, row_ranges, row_range_stride,
                column_ranges, column_range_stride, diagonal_offset, BM, BN, DIAGONAL, IDS,
            )  # fmt: skip
            shift = tl.where(skipped, float("inf"), own)
        if CEILING:
            highest = tl.load(ceiling + i, mask=i < m, other=0.0)
            acc = tl.where(acc * factor > highest[:, None], float("-inf"), acc)
        e = tl.exp2(acc * k - shift[:, None])
        if CEILING:  # a negative scale turns -inf round
            e = tl.where(acc == float("-inf"), 0.0, e)
        if not EVEN:
            e = tl.where((j0 + tl.arange(0, BN) < n)[None, :], e, 0.0)
        tl.store(row_sums + tj.to(tl.int64) * m + i, tl.sum(e, 1), mask=i < m)
        if COLUMNS:
            e = e * tl.exp2(tl.minimum(own - top, 0.0))[:, None]
            spread = tl.reshape(e, (BM // 64, 4, 2, 8, BN))
            columns += tl.reshape(tl.sum(tl.sum(spread, 2), 0), (32, BN))
    if COLUMNS:
        j = j0 + tl.arange(0, BN)
        tl.store(column_sums + group.to(tl.int64) * n + j, tl.sum(columns, 0), mask=j < n)


@triton.jit
def _top(references, group, SIZE: tl.constexpr):
    """Largest reference of a group of rows; those past the end are +inf."""
    own = tl.load(references + group * SIZE + tl.arange(0, SIZE))
    return tl.max(tl.where(own == float("inf"), float("-inf"), own), 0)


@triton.jit
def clamped(references, i, top):
    """A row far below its group would vanish in the columns' weights: its reference is raised."""
    return tl.maximum(tl.load(references + i), top - 100.0)
