"""Device functions that several kernels share: order of tiles, logits and masks of a tile."""

from __future__ import annotations

import triton
import triton.language as tl

from megabatch.similarity.triton.launch import kernel

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
#: Values of DIAGONAL in the kernels: the kind of the pairs (i, i).
NO_DIAGONAL, POSITIVE, DROPPED = 0, 1, 2


@triton.jit
def swizzle(pid, row_tiles, col_tiles, GROUP: tl.constexpr):
    """(row tile, column tile) of a program, so that GROUP row tiles stay in the L2 cache."""
    per_group = GROUP * col_tiles
    first = pid // per_group * GROUP
    size = tl.minimum(row_tiles - first, GROUP)
    return first + pid % per_group % size, pid % per_group // size


@triton.jit
def logits_tile(x, y, i0, j0, d, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    """x[i0:i0+BM] @ y[j0:j0+BN].T in float32; rows past the end are 0."""
    acc = tl.zeros((BM, BN), tl.float32)
    for c in tl.range(0, d, BK):
        acc = tl.dot(x.load([i0, c]), y.load([j0, c]).T, acc, input_precision="tf32")
    return acc


@triton.jit
def first_sums(
    guide_x, guide_y, ceiling, i, i0, j0, m, guide_d,
    BM: tl.constexpr, BN: tl.constexpr, GUIDE_BK: tl.constexpr, GUIDE: tl.constexpr,
):  # fmt: skip
    """The sums that a tile's logits start from: 0, or -inf where a guide leaves the pair out.

    An accumulator of -inf stays there, so that the guide's decision takes no registers besides the
    logits. `i`: rows of the ceiling.
    """
    if GUIDE:
        similarity = logits_tile(guide_x, guide_y, i0, j0, guide_d, BM, BN, GUIDE_BK)
        highest = tl.load(ceiling + i, mask=i < m, other=0.0)
        return tl.where(similarity > highest[:, None], float("-inf"), 0.0)
    else:
        return tl.zeros((BM, BN), tl.float32)


@kernel
def id_ranges(ids, out, size, tiles, B: tl.constexpr):
    """Smallest and largest id of each tile of B rows: out[0], out[1]; negative ids do not count."""
    t = tl.program_id(0)
    i = t * B + tl.arange(0, B)
    value = tl.load(ids + i, mask=i < size, other=-1)
    tl.store(out + t, tl.min(tl.where(value >= 0, value, 1 << 62), 0))
    tl.store(out + tiles + t, tl.max(value, 0))


@triton.jit
def needs_mask(
    ti, tj, row_ranges, row_stride, col_ranges, col_stride, diagonal_offset,
    BM: tl.constexpr, BN: tl.constexpr, DIAGONAL: tl.constexpr, IDS: tl.constexpr,
):  # fmt: skip
    """Whether tile (ti, tj) may hold pairs that are not negatives; ti or tj may be a vector.

    Such pairs lie on the diagonal, or where the tiles' ranges of ids overlap.
    """
    result = tj < 0
    if DIAGONAL != 0:
        j0 = tj * BN + diagonal_offset
        result = result | ((ti * BM < j0 + BN) & (j0 < ti * BM + BM))
    if IDS:
        disjoint = tl.load(row_ranges + ti) > tl.load(col_ranges + col_stride + tj)
        disjoint = disjoint | (tl.load(col_ranges + tj) > tl.load(row_ranges + row_stride + ti))
        result = result | ~disjoint
    return result


@triton.jit
def mask_tile(
    s, i0, j0, m, n, diagonal_offset, row_ids, col_ids, ceiling,
    BM: tl.constexpr, BN: tl.constexpr, DIAGONAL: tl.constexpr, IDS: tl.constexpr,
    PAIRED: tl.constexpr, CEILING: tl.constexpr,
):  # fmt: skip
    """(negative, positive) masks of a tile; pairs in neither are dropped, or past the end.

    s: the logits, or with a guide its similarities; only the ceiling is about them. PAIRED: the
    positives are the pairs (i, i), other pairs of equal ids are dropped. CEILING: 0 for none, 1 for
    one per row, 2 for one per column (if the sides are swapped).
    """
    i = i0 + tl.arange(0, BM)
    j = j0 + tl.arange(0, BN)
    inside = (i < m)[:, None] & (j < n)[None, :]
    if IDS:
        rows = tl.load(row_ids + i, mask=i < m, other=-1)
        cols = tl.load(col_ids + j, mask=j < n, other=-1)
        positive = inside & (rows[:, None] == cols[None, :]) & (rows >= 0)[:, None]
    else:
        positive = inside & (i < 0)[:, None]
    negative = inside & ~positive
    if PAIRED:
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
