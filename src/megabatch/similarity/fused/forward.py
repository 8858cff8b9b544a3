"""The forward kernels: a tile's logits live in registers only; exponents are in base 2.

`tile` takes one exponential a logit for both sides: row i's are relative to a reference of its
own (`reference`), and weighted by 2^(row's reference - the row group's) they sum to the columns'.
`merge` adds the tiles' sums to the running state and notices sums that left float32's range;
`exact` redoes those rows with a running maximum, and all tiles with masks.
"""

from __future__ import annotations

import triton
import triton.language as tl

from megabatch.similarity.fused.tiles import LOG2E, logits_tile, mask_tile, swizzle

#: Sums outside are redone exactly. Below, terms lost under 2^-126 would count (4M of them: 2^-29).
LOWEST = tl.constexpr(2.0**-75)
HIGHEST = tl.constexpr(2.0**126)


@triton.jit
def reference(
    x,
    sample,
    sample_index,
    scale,
    out,
    m,
    d,
    row_start,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    DIAGONAL: tl.constexpr,
):
    """out[i] = largest of row i's logits against BN sampled columns, in units of log2, less 20.

    Rows past m get +inf, whose exponentials are 0. The 20 centre the sums in float32's range: a
    column's sum is relative to the largest of a group of rows, so it is rather too small.
    """
    i0 = tl.program_id(0) * BM
    i = i0 + tl.arange(0, BM)
    s = logits_tile(x, sample, i0, 0, d, BM, BN, BK) * (tl.load(scale) * LOG2E)
    index = tl.load(sample_index + tl.arange(0, BN))
    absent = (index < 0)[None, :]
    if DIAGONAL:
        absent = absent | ((row_start + i)[:, None] == index[None, :])
    largest = tl.max(tl.where(absent, float("-inf"), s), 1)
    largest = tl.where(largest == float("-inf"), 0.0, largest) - 20.0
    tl.store(out + i, tl.where(i < m, largest, float("inf")))


@triton.jit
def tile(
    x,
    y,
    scale,
    references,
    row_sums,
    column_sums,
    m,
    n,
    d,
    first_column_tile,
    diagonal_offset,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    R: tl.constexpr,
    GROUP: tl.constexpr,
    DIAGONAL: tl.constexpr,
    COLUMNS: tl.constexpr,
    EVEN: tl.constexpr,
):
    """row_sums[tile column, i], column_sums[group of R row tiles, j] of 2^(logit - reference).

    With DIAGONAL the tiles that hold a pair (i, i), at row = column + diagonal_offset, are left
    out. Not EVEN: the last column tile reaches past n.
    """
    tiles = tl.cdiv(n, BN) - first_column_tile
    group, tj = swizzle(tl.program_id(0), tl.cdiv(m, BM * R), tiles, GROUP)
    tj += first_column_tile
    j0 = tj * BN
    k = tl.load(scale) * LOG2E
    all_rows = tl.load(references + group * R * BM + tl.arange(0, R * BM))
    top = tl.max(tl.where(all_rows == float("inf"), float("-inf"), all_rows), 0)
    # The columns' sums stay spread over the threads until all R tiles are in: reducing each tile
    # across a warp costs 4% of the kernel.
    columns = tl.zeros((32, BN), tl.float32)
    for r in tl.range(0, R, flatten=True):
        i0 = (group * R + r) * BM
        i = i0 + tl.arange(0, BM)
        acc = tl.zeros((BM, BN), tl.float32)
        for c in tl.range(0, d, BK):
            acc = tl.dot(x.load([i0, c]), y.load([j0, c]).T, acc, input_precision="tf32")
        own = tl.load(references + i)
        shift = own
        if DIAGONAL:
            skipped = (i0 < j0 + diagonal_offset + BN) & (j0 + diagonal_offset < i0 + BM)
            shift = tl.where(skipped, float("inf"), own)
        e = tl.exp2(acc * k - shift[:, None])
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
def merge(
    sums,
    references,
    state,
    state_stride,
    flags,
    parts,
    size,
    B: tl.constexpr,
    P: tl.constexpr,
    COMMON: tl.constexpr,
):
    """Add `parts` sums a row, sums[part, row], to its state (reference, sum), P at a time.

    Not COMMON: all are relative to references[row]; COMMON: part p is relative to
    references[p], the same for all rows. A tile of rows any of which left float32's range is
    flagged and not merged.
    """
    i = tl.program_id(0) * B + tl.arange(0, B)
    inside = i < size
    if COMMON:
        tops = tl.full((P,), float("-inf"), tl.float32)
        for first in range(0, parts, P):
            p = first + tl.arange(0, P)
            tops = tl.maximum(tops, tl.load(references + p, mask=p < parts, other=float("-inf")))
        new = tl.zeros((B,), tl.float32) + tl.max(tops, 0)
    else:
        new = tl.load(references + i)
    total = tl.zeros((B,), tl.float32)
    for first in range(0, parts, P):
        p = first + tl.arange(0, P)
        mask = (p < parts)[:, None] & inside[None, :]
        part = tl.load(sums + p.to(tl.int64)[:, None] * size + i[None, :], mask=mask, other=0.0)
        if COMMON:
            own = tl.load(references + p, mask=p < parts, other=float("-inf"))
            part = part * tl.exp2(own - tl.max(tops, 0))[:, None]
        total += tl.sum(part, 0)
    bad = inside & ~((total >= LOWEST) & (total <= HIGHEST))
    flagged = tl.max(bad.to(tl.int32), 0)
    tl.store(flags + tl.program_id(0), flagged)
    old = tl.load(state + i, mask=inside, other=0.0)
    old_sum = tl.load(state + state_stride + i, mask=inside, other=0.0)
    largest = tl.maximum(old, new)
    total = old_sum * tl.exp2(old - largest) + total * tl.exp2(new - largest)
    # A power of two moves from the sum to the reference, exactly, so that neither leaves range.
    power = tl.floor(tl.log2(total))
    merged = inside.to(tl.int32) > flagged
    tl.store(state + i, largest + power, mask=merged)
    tl.store(state + state_stride + i, total * tl.exp2(-power), mask=merged)


@triton.jit
def exact(
    x,
    y,
    scale,
    state,
    state_stride,
    flags,
    row_ids,
    column_ids,
    ceiling,
    m,
    n,
    d,
    diagonal_offset,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    DIAGONAL: tl.constexpr,
    IDS: tl.constexpr,
    CEILING: tl.constexpr,
    POSITIVES: tl.constexpr,
):
    """Rows of x against columns of y with masks and a running maximum, added to the rows' state.

    All columns where the row tile is flagged, else only the tiles on the diagonal.
    """
    ti = tl.program_id(0)
    i0 = ti * BM
    i = i0 + tl.arange(0, BM)
    inside = i < m
    first = 0
    last = 0
    if DIAGONAL != 0:
        # Pairs (i, i) stand at column i - offset. Tiles are cut alike on both sides only where
        # the offset is a multiple of the tile, so a row tile may meet two column tiles.
        first = tl.maximum(0, (i0 - diagonal_offset) // BN)
        last = tl.minimum(tl.cdiv(n, BN), (i0 + BM - 1 - diagonal_offset) // BN + 1)
        last = tl.where(i0 + BM <= diagonal_offset, 0, last)
    flagged = tl.load(flags + ti) != 0
    first = tl.where(flagged, 0, first)
    last = tl.where(flagged, tl.cdiv(n, BN), last)
    if first >= last:
        return
    largest = tl.load(state + i, mask=inside, other=float("-inf"))
    total = tl.load(state + state_stride + i, mask=inside, other=0.0)
    if POSITIVES:
        p_largest = tl.load(state + 2 * state_stride + i, mask=inside, other=float("-inf"))
        p_total = tl.load(state + 3 * state_stride + i, mask=inside, other=0.0)
        p_sum = tl.load(state + 4 * state_stride + i, mask=inside, other=0.0)
        p_count = tl.load(state + 5 * state_stride + i, mask=inside, other=0.0)
    k = tl.load(scale)
    for tj in tl.range(first, last):
        s = logits_tile(x, y, i0, tj * BN, d, BM, BN, BK) * k
        negative, positive = mask_tile(
            s, i0, tj * BN, m, n, diagonal_offset, row_ids, column_ids, ceiling,
            BM, BN, DIAGONAL, IDS, CEILING,
        )  # fmt: skip
        largest, total = _running_sum(largest, total, s * LOG2E, negative)
        if POSITIVES:
            p_largest, p_total = _running_sum(p_largest, p_total, s * LOG2E, positive)
            p_sum += tl.sum(tl.where(positive, s, 0.0), 1)
            p_count += tl.sum(positive.to(tl.float32), 1)
    tl.store(state + i, largest, mask=inside)
    tl.store(state + state_stride + i, total, mask=inside)
    if POSITIVES:
        tl.store(state + 2 * state_stride + i, p_largest, mask=inside)
        tl.store(state + 3 * state_stride + i, p_total, mask=inside)
        tl.store(state + 4 * state_stride + i, p_sum, mask=inside)
        tl.store(state + 5 * state_stride + i, p_count, mask=inside)


@triton.jit
def _running_sum(largest, total, s, mask):
    s = tl.where(mask, s, float("-inf"))
    new = tl.maximum(largest, tl.max(s, 1))
    shift = tl.where(new == float("-inf"), 0.0, new)
    total = total * tl.exp2(largest - shift) + tl.sum(tl.exp2(s - shift[:, None]), 1)
    return new, total
