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


@triton.jit(do_not_specialize=["row_start", "column_start", "m", "n", "diagonal_offset"])
def reference(
    x,
    y,
    y_stride,
    scale,
    out,
    row_start,
    column_start,
    m,
    n,
    d,
    diagonal_offset,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    DIAGONAL: tl.constexpr,
):
    """out[i] = largest of row i's logits against BN columns spread over all, in log2, less 20.

    Rows past m get +inf, whose exponentials are 0. The 20 centre the sums in float32's range: a
    column's sum is relative to the largest of a group of rows, so it is rather too small.
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
    if DIAGONAL:
        present = present[None, :] & (i[:, None] != (j + diagonal_offset)[None, :])
    else:
        present = present[None, :] & (i >= 0)[:, None]
    largest = tl.max(tl.where(present, s * (tl.load(scale) * LOG2E), float("-inf")), 1)
    largest = tl.where(largest == float("-inf"), 0.0, largest) - 20.0
    tl.store(out + i, tl.where(i < m, largest, float("inf")))


@triton.jit(
    do_not_specialize=[
        "row_start",
        "column_start",
        "m",
        "n",
        "diagonal_offset",
        "first_column_tile",
        "column_tiles",
    ]
)
def tile(
    x,
    y,
    scale,
    references,
    tops,
    row_sums,
    column_sums,
    row_start,
    column_start,
    m,
    n,
    d,
    first_column_tile,
    column_tiles,
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

    tops[group] becomes the largest reference of a group. With DIAGONAL the tiles that hold a pair
    (i, i), at row = column + diagonal_offset, are left out. Not EVEN: some of these column_tiles
    reaches past n.
    """
    group, tj = swizzle(tl.program_id(0), tl.cdiv(m, BM * R), column_tiles, GROUP)
    tj += first_column_tile
    j0 = tj * BN
    k = tl.load(scale) * LOG2E
    top = _top(references, group, R * BM)
    tl.store(tops + group, top)  # every program of the group writes the same
    # The columns' sums stay spread over the threads until all R tiles are in: reducing each tile
    # across a warp costs 4% of the kernel.
    columns = tl.zeros((32, BN), tl.float32)
    for r in tl.range(0, R, flatten=True):
        i0 = (group * R + r) * BM
        i = i0 + tl.arange(0, BM)
        acc = tl.zeros((BM, BN), tl.float32)
        for c in tl.range(0, d, BK):
            a = x.load([row_start + i0, c])
            acc = tl.dot(a, y.load([column_start + j0, c]).T, acc, input_precision="tf32")
        own = _clamped(references, i, top)
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
def _top(references, group, SIZE: tl.constexpr):
    """Largest reference of a group of rows; those past the end are +inf."""
    own = tl.load(references + group * SIZE + tl.arange(0, SIZE))
    return tl.max(tl.where(own == float("inf"), float("-inf"), own), 0)


@triton.jit
def _clamped(references, i, top):
    """A row far below its group would vanish in the columns' weights: its reference is raised."""
    return tl.maximum(tl.load(references + i), top - 100.0)


@triton.jit(
    do_not_specialize=["m", "n", "row_parts", "column_parts", "row_stride", "column_stride"]
)
def merge(
    row_sums,
    references,
    row_state,
    row_stride,
    row_flags,
    row_parts,
    m,
    column_sums,
    tops,
    column_state,
    column_stride,
    column_flags,
    column_parts,
    n,
    SIZE: tl.constexpr,
    B: tl.constexpr,
    P: tl.constexpr,
):
    """Add both sides' sums, `parts` a row, to the running states (reference, sum), P at a time.

    A tile of B rows any of which left float32's range is flagged and not merged. SIZE rows are
    a group.
    """
    t = tl.program_id(0)
    tiles = tl.cdiv(m, B)
    if t < tiles:
        i = t * B + tl.arange(0, B)
        new = _clamped(references, i, tl.load(tops + t * B // SIZE))
        total = tl.zeros((B,), tl.float32)
        for first in range(0, row_parts, P):
            total += tl.sum(_parts(row_sums, first, row_parts, i, m, P), 0)
        _merge(row_state, row_stride, row_flags + t, i, m, new, total)
    else:
        t = t - tiles
        j = t * B + tl.arange(0, B)
        top = tl.full((P,), float("-inf"), tl.float32)
        for first in range(0, column_parts, P):
            p = first + tl.arange(0, P)
            top = tl.maximum(top, tl.load(tops + p, mask=p < column_parts, other=float("-inf")))
        largest = tl.max(top, 0)
        total = tl.zeros((B,), tl.float32)
        for first in range(0, column_parts, P):
            p = first + tl.arange(0, P)
            own = tl.load(tops + p, mask=p < column_parts, other=float("-inf"))
            parts = _parts(column_sums, first, column_parts, j, n, P)
            total += tl.sum(parts * tl.exp2(own - largest)[:, None], 0)
        new = tl.zeros((B,), tl.float32) + largest
        _merge(column_state, column_stride, column_flags + t, j, n, new, total)


@triton.jit
def _parts(sums, first, parts, i, size, P: tl.constexpr):
    p = first + tl.arange(0, P)
    mask = (p < parts)[:, None] & (i < size)[None, :]
    return tl.load(sums + p.to(tl.int64)[:, None] * size + i[None, :], mask=mask, other=0.0)


@triton.jit
def _merge(state, stride, flag, i, size, new, total):
    inside = i < size
    bad = inside & ~((total >= LOWEST) & (total <= HIGHEST))
    flagged = tl.max(bad.to(tl.int32), 0)
    tl.store(flag, flagged)
    old = tl.load(state + i, mask=inside, other=0.0)
    old_sum = tl.load(state + stride + i, mask=inside, other=0.0)
    largest = tl.maximum(old, new)
    total = old_sum * tl.exp2(old - largest) + total * tl.exp2(new - largest)
    # A power of two moves from the sum to the reference, exactly, so that neither leaves range.
    power = tl.floor(tl.log2(total))
    merged = inside.to(tl.int32) > flagged
    tl.store(state + i, largest + power, mask=merged)
    tl.store(state + stride + i, total * tl.exp2(-power), mask=merged)


@triton.jit(
    do_not_specialize=[
        "row_start",
        "column_start",
        "m",
        "n",
        "diagonal_offset",
        "row_state_stride",
        "column_state_stride",
    ]
)
def exact(
    x,
    y,
    scale,
    row_state,
    row_state_stride,
    row_flags,
    column_state,
    column_state_stride,
    column_flags,
    row_ids,
    column_ids,
    ceiling,
    row_start,
    column_start,
    m,
    n,
    d,
    diagonal_offset,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    DIAGONAL: tl.constexpr,
    IDS: tl.constexpr,
    OWN: tl.constexpr,
    CEILING: tl.constexpr,
    POSITIVES: tl.constexpr,
):
    """Both sides with masks and a running maximum, added to their states, a row tile a program.

    All columns where the row tile is flagged, else only the tiles on the diagonal.
    """
    t = tl.program_id(0)
    tiles = tl.cdiv(m, BM)
    if t < tiles:
        _exact(
            x, y, scale, row_state, row_state_stride, row_flags, row_ids, column_ids, ceiling,
            row_start, column_start, m, n, d, diagonal_offset, t,
            BM, BN, BK, DIAGONAL, IDS, OWN, 1 if CEILING else 0, POSITIVES,
        )  # fmt: skip
    else:
        _exact(
            y, x, scale, column_state, column_state_stride, column_flags, column_ids, row_ids,
            ceiling, column_start, row_start, n, m, d, -diagonal_offset, t - tiles,
            BM, BN, BK, DIAGONAL, IDS, OWN, 2 if CEILING else 0, POSITIVES,
        )  # fmt: skip


@triton.jit
def _exact(
    x,
    y,
    scale,
    state,
    state_stride,
    flags,
    row_ids,
    column_ids,
    ceiling,
    row_start,
    column_start,
    m,
    n,
    d,
    diagonal_offset,
    ti,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    DIAGONAL: tl.constexpr,
    IDS: tl.constexpr,
    OWN: tl.constexpr,
    CEILING: tl.constexpr,
    POSITIVES: tl.constexpr,
):
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
    if first < last:
        largest = tl.load(state + i, mask=inside, other=float("-inf"))
        total = tl.load(state + state_stride + i, mask=inside, other=0.0)
        p_largest = tl.full((BM,), float("-inf"), tl.float32)
        p_total = tl.zeros((BM,), tl.float32)
        p_sum = tl.zeros((BM,), tl.float32)
        p_count = tl.zeros((BM,), tl.float32)
        if POSITIVES:
            p_largest = tl.load(state + 2 * state_stride + i, mask=inside, other=float("-inf"))
            p_total = tl.load(state + 3 * state_stride + i, mask=inside, other=0.0)
            p_sum = tl.load(state + 4 * state_stride + i, mask=inside, other=0.0)
            p_count = tl.load(state + 5 * state_stride + i, mask=inside, other=0.0)
        k = tl.load(scale)
        for tj in tl.range(first, last):
            s = logits_tile(x, y, row_start + i0, column_start + tj * BN, d, BM, BN, BK) * k
            negative, positive = mask_tile(
                s, i0, tj * BN, m, n, diagonal_offset, row_ids, column_ids, ceiling,
                BM, BN, DIAGONAL, IDS, OWN, CEILING,
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
