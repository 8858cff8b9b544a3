"""What the kernels share: the order of tiles, a tile's logits, a tile's masks."""

from __future__ import annotations

import triton
import triton.language as tl

from megabatch.similarity.backends.triton.launch import kernel

# The kernels' `do_not_specialize`: numbers that change from block to block. Triton would compile a
# kernel anew, seconds each, for those that are 1 or divide by 16.
LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
#: DIAGONAL in the kernels: what the pairs (i, i) are.
NO_DIAGONAL, POSITIVE, DROPPED = 0, 1, 2


@triton.jit
def swizzle(pid, rows, columns, GROUP: tl.constexpr):
    """Tiles in an order that keeps GROUP tiles of rows and the passing columns in the L2 cache."""
    per_group = GROUP * columns
    first = pid // per_group * GROUP
    size = tl.minimum(rows - first, GROUP)
    return first + pid % per_group % size, pid % per_group // size


@triton.jit
def logits_tile(x, y, i0, j0, d, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    """x[i0:i0+BM] @ y[j0:j0+BN].T in float32; rows past the end are 0."""
    acc = tl.zeros((BM, BN), tl.float32)
    for c in tl.range(0, d, BK):
        acc = tl.dot(x.load([i0, c]), y.load([j0, c]).T, acc, input_precision="tf32")
    return acc


@kernel
def id_ranges(ids, out, size, tiles, B: tl.constexpr):
    """Smallest and largest id of each tile of B rows: out[0], out[1]; no negative ones."""
    t = tl.program_id(0)
    i = t * B + tl.arange(0, B)
    value = tl.load(ids + i, mask=i < size, other=-1)
    tl.store(out + t, tl.min(tl.where(value >= 0, value, 1 << 62), 0))
    tl.store(out + tiles + t, tl.max(value, 0))


@triton.jit
def mixed(
    ti,
    tj,
    row_ranges,
    row_stride,
    column_ranges,
    column_stride,
    diagonal_offset,
    BM: tl.constexpr,
    BN: tl.constexpr,
    DIAGONAL: tl.constexpr,
    IDS: tl.constexpr,
):
    """Whether tile (ti, tj) may hold pairs that are no negatives; either may be a vector.

    Those lie on the diagonal, or where the tiles' ranges of ids meet.
    """
    result = tj < 0
    if DIAGONAL != 0:
        j0 = tj * BN + diagonal_offset
        result = result | ((ti * BM < j0 + BN) & (j0 < ti * BM + BM))
    if IDS:
        apart = tl.load(row_ranges + ti) > tl.load(column_ranges + column_stride + tj)
        apart = apart | (tl.load(column_ranges + tj) > tl.load(row_ranges + row_stride + ti))
        result = result | ~apart
    return result


@triton.jit
def mask_tile(
    s,
    i0,
    j0,
    m,
    n,
    diagonal_offset,
    row_ids,
    column_ids,
    ceiling,
    BM: tl.constexpr,
    BN: tl.constexpr,
    DIAGONAL: tl.constexpr,
    IDS: tl.constexpr,
    OWN: tl.constexpr,
    CEILING: tl.constexpr,
):
    """(negative, positive) masks of a tile; pairs in neither are dropped, or past the end.

    OWN: the positives are the pairs (i, i), other pairs of equal ids are dropped. CEILING: 0 none,
    1 one a row, 2 one a column (where the sides are swapped).
    """
    i = i0 + tl.arange(0, BM)
    j = j0 + tl.arange(0, BN)
    inside = (i < m)[:, None] & (j < n)[None, :]
    if IDS:
        rows = tl.load(row_ids + i, mask=i < m, other=-1)
        columns = tl.load(column_ids + j, mask=j < n, other=-1)
        positive = inside & (rows[:, None] == columns[None, :]) & (rows >= 0)[:, None]
    else:
        positive = inside & (i < 0)[:, None]
    negative = inside & ~positive
    if OWN:
        positive = positive & (i < 0)[:, None]
    if DIAGONAL != 0:
        own = i[:, None] == (j + diagonal_offset)[None, :]
        negative = negative & ~own
        positive = (positive | (inside & own)) if DIAGONAL == 1 else (positive & ~own)
    if CEILING == 1:
        negative = negative & ~(s > tl.load(ceiling + i, mask=i < m, other=0.0)[:, None])
    if CEILING == 2:
        negative = negative & ~(s > tl.load(ceiling + j, mask=j < n, other=0.0)[None, :])
    return negative, positive
