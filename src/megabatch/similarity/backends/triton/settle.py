"""The forward pass's states: what the tiles' sums add to them.

`settle` adds the sums to the running state, does the tiles left out of them with a running maximum,
and does rows anew whose sums left float32's range.
"""

from __future__ import annotations

import triton
import triton.language as tl

from megabatch.similarity.backends.triton.forward import clamped
from megabatch.similarity.backends.triton.launch import kernel
from megabatch.similarity.backends.triton.tiles import LN2, LOG2E, logits_tile, mask_tile, mixed

#: Sums outside are redone exactly. Below, terms lost under 2^-126 would count (4M of them: 2^-29).
LOWEST = tl.constexpr(2.0**-75)
HIGHEST = tl.constexpr(2.0**126)


@kernel
def settle(
    x, y, scale, row_sums, references, row_parts, row_state, row_state_stride, row_first,
    row_last, column_sums, tops, column_parts, column_state, column_state_stride, column_first,
    column_last, row_ids, row_ranges, row_range_stride, column_ids, column_ranges,
    column_range_stride, ceiling, row_start, column_start, m, n, d, diagonal_offset,
    SIZE: tl.constexpr, P: tl.constexpr, B: tl.constexpr, BK: tl.constexpr,
    DIAGONAL: tl.constexpr, IDS: tl.constexpr, OWN: tl.constexpr, CEILING: tl.constexpr,
    POSITIVES: tl.constexpr, TRIANGLE: tl.constexpr,
):  # fmt: skip
    """Add a block to both sides' running states, a tile of B rows or columns a program.

    `parts` sums a row are added P at a time; SIZE rows are a group. Where it is a side's `first`
    block the state holds nothing yet; after the `last` it holds what `states.finish` would return.
    TRIANGLE: rows' sums begin at their group's first tile on the diagonal; for what lies left of it
    there are the columns' sums of the groups above.
    """
    t = tl.program_id(0)
    tiles = tl.cdiv(m, B)
    if t < tiles:
        i = t * B + tl.arange(0, B)
        group = t * B // SIZE
        new = clamped(references, i, tl.load(tops + group))
        total = tl.zeros((B,), tl.float32)
        for start in range(group * (SIZE // B) if TRIANGLE else 0, row_parts, P):
            total += tl.sum(_parts(row_sums, start, row_parts, i, m, P), 0)
        above = tl.full((B,), float("-inf"), tl.float32)
        above_total = tl.zeros((B,), tl.float32)
        if TRIANGLE:  # noqa: SIM102 - one is known when the kernel is compiled
            if group > 0:
                largest = _largest(tops, group, P)
                above_total = _column_total(column_sums, tops, largest, group, i, m, B, P)
                above = tl.zeros((B,), tl.float32) + largest
        _settle(
            x, y, scale, new, total, above, above_total,
            row_state, row_state_stride, row_first, row_last,
            row_ids, row_ranges, row_range_stride, column_ids, column_ranges, column_range_stride,
            ceiling, row_start, column_start, m, n, d, diagonal_offset, t,
            B, BK, DIAGONAL, IDS, OWN, 1 if CEILING else 0, POSITIVES,
        )  # fmt: skip
    else:
        t = t - tiles
        j = t * B + tl.arange(0, B)
        largest = _largest(tops, column_parts, P)
        total = _column_total(column_sums, tops, largest, column_parts, j, n, B, P)
        new = tl.zeros((B,), tl.float32) + largest
        above = tl.full((B,), float("-inf"), tl.float32)
        _settle(
            y, x, scale, new, total, above, tl.zeros((B,), tl.float32),
            column_state, column_state_stride, column_first, column_last,
            column_ids, column_ranges, column_range_stride, row_ids, row_ranges, row_range_stride,
            ceiling, column_start, row_start, n, m, d, -diagonal_offset, t,
            B, BK, DIAGONAL, IDS, OWN, 2 if CEILING else 0, POSITIVES,
        )  # fmt: skip


@triton.jit
def _largest(tops, parts, P: tl.constexpr):
    top = tl.full((P,), float("-inf"), tl.float32)
    for start in range(0, parts, P):
        p = start + tl.arange(0, P)
        top = tl.maximum(top, tl.load(tops + p, mask=p < parts, other=float("-inf")))
    return tl.max(top, 0)


@triton.jit
def _column_total(sums, tops, largest, parts, j, n, B: tl.constexpr, P: tl.constexpr):
    """The sums of these columns over the first groups of rows, relative to `largest`."""
    total = tl.zeros((B,), tl.float32)
    for start in range(0, parts, P):
        p = start + tl.arange(0, P)
        own = tl.load(tops + p, mask=p < parts, other=float("-inf"))
        total += tl.sum(_parts(sums, start, parts, j, n, P) * tl.exp2(own - largest)[:, None], 0)
    return total


@triton.jit
def _parts(sums, start, parts, i, size, P: tl.constexpr):
    p = start + tl.arange(0, P)
    mask = (p < parts)[:, None] & (i < size)[None, :]
    return tl.load(sums + p.to(tl.int64)[:, None] * size + i[None, :], mask=mask, other=0.0)


@triton.jit
def _settle(
    x,
    y,
    scale,
    new,
    new_total,
    above,
    above_total,
    state,
    stride,
    is_first,
    is_last,
    row_ids,
    row_ranges,
    row_range_stride,
    column_ids,
    column_ranges,
    column_range_stride,
    ceiling,
    row_start,
    column_start,
    m,
    n,
    d,
    diagonal_offset,
    ti,
    B: tl.constexpr,
    BK: tl.constexpr,
    DIAGONAL: tl.constexpr,
    IDS: tl.constexpr,
    OWN: tl.constexpr,
    CEILING: tl.constexpr,
    POSITIVES: tl.constexpr,
):
    i0 = ti * B
    i = i0 + tl.arange(0, B)
    inside = i < m
    begun = inside.to(tl.int32) > is_first
    largest = tl.load(state + i, mask=begun, other=float("-inf"))
    total = tl.load(state + stride + i, mask=begun, other=0.0)
    p_largest = tl.full((B,), float("-inf"), tl.float32)
    p_total = tl.zeros((B,), tl.float32)
    p_sum = tl.zeros((B,), tl.float32)
    p_count = tl.zeros((B,), tl.float32)
    if POSITIVES:
        p_largest = tl.load(state + 2 * stride + i, mask=begun, other=float("-inf"))
        p_total = tl.load(state + 3 * stride + i, mask=begun, other=0.0)
        p_sum = tl.load(state + 4 * stride + i, mask=begun, other=0.0)
        p_count = tl.load(state + 5 * stride + i, mask=begun, other=0.0)
    # A tile of rows any of which left float32's range is done anew, all columns of it.
    bad = inside & ~((new_total >= LOWEST) & (new_total <= HIGHEST))
    some = above > float("-inf")
    bad = bad | (inside & some & ~((above_total >= LOWEST) & (above_total <= HIGHEST)))
    above = tl.where(some, above, new)  # nothing is added, at any reference
    merged_new, merged_total = _merge(new, new_total, above, above_total)
    new, new_total = merged_new, merged_total
    flagged = tl.max(bad.to(tl.int32), 0) != 0
    merged, merged_total = _merge(largest, total, new, new_total)
    largest = tl.where(flagged, largest, merged)
    total = tl.where(flagged, total, merged_total)
    k = tl.load(scale)
    tiles = tl.cdiv(n, B)
    for start in tl.range(0, tiles, 64):
        # 64 tiles are looked at in one go, then those from the first to the last that is wanted.
        index = start + tl.arange(0, 64)
        wanted = (index < tiles) & (flagged | mixed(
            ti, tl.minimum(index, tiles - 1), row_ranges, row_range_stride,
            column_ranges, column_range_stride, diagonal_offset, B, B, DIAGONAL, IDS,
        ))  # fmt: skip
        first = tl.min(tl.where(wanted, index, tiles), 0)
        last = tl.max(tl.where(wanted, index, -1), 0)
        for tj in tl.range(first, last + 1):
            if flagged | mixed(
                ti, tj, row_ranges, row_range_stride, column_ranges, column_range_stride,
                diagonal_offset, B, B, DIAGONAL, IDS,
            ):  # fmt: skip
                s = logits_tile(x, y, row_start + i0, column_start + tj * B, d, B, B, BK) * k
                negative, positive = mask_tile(
                    s, i0, tj * B, m, n, diagonal_offset, row_ids, column_ids, ceiling,
                    B, B, DIAGONAL, IDS, OWN, CEILING,
                )  # fmt: skip
                largest, total = _running_sum(largest, total, s * LOG2E, negative)
                if POSITIVES:
                    p_largest, p_total = _running_sum(p_largest, p_total, s * LOG2E, positive)
                    p_sum += tl.sum(tl.where(positive, s, 0.0), 1)
                    p_count += tl.sum(positive.to(tl.float32), 1)
    done = is_last != 0
    tl.store(state + i, tl.where(done, _logarithm(largest, total), largest), mask=inside)
    if POSITIVES:
        second = tl.where(done, _logarithm(p_largest, p_total), total)
        tl.store(state + stride + i, second, mask=inside)
        tl.store(state + 2 * stride + i, tl.where(done, p_sum, p_largest), mask=inside)
        tl.store(state + 3 * stride + i, tl.where(done, p_count, p_total), mask=inside)
        tl.store(state + 4 * stride + i, p_sum, mask=inside)
        tl.store(state + 5 * stride + i, p_count, mask=inside)
    else:
        tl.store(state + stride + i, total, mask=inside)


@triton.jit
def _merge(old, old_total, new, new_total):
    largest = tl.maximum(old, new)
    total = old_total * tl.exp2(old - largest) + new_total * tl.exp2(new - largest)
    # A power of two moves from the sum to the reference, exactly, so that neither leaves range.
    power = tl.floor(tl.log2(total))
    return largest + power, total * tl.exp2(-power)


@triton.jit
def _logarithm(largest, total):
    return tl.log(total) + largest * LN2


@triton.jit
def _running_sum(largest, total, s, mask):
    s = tl.where(mask, s, float("-inf"))
    new = tl.maximum(largest, tl.max(s, 1))
    shift = tl.where(new == float("-inf"), 0.0, new)
    total = total * tl.exp2(largest - shift) + tl.sum(tl.exp2(s - shift[:, None]), 1)
    return new, total
