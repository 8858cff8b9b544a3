"""Kernels that combine log-sum-exps: partial sums of `softmax_forward` and states of several GPUs.

`combine_partials` adds the tiles' sums to the running state. It computes the tiles left out, with a
running maximum, and recomputes the rows whose sums left float32's range. `merge_states` joins
states of the same rows from several GPUs. States are laid out as `states` documents, with
references in base 2.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from megabatch.similarity.triton.blocking import cdiv
from megabatch.similarity.triton.launch import kernel
from megabatch.similarity.triton.operands import State, block_kernel
from megabatch.similarity.triton.softmax_forward import clamped_references
from megabatch.similarity.triton.tiles import (
    LN2,
    LOG2E,
    B,
    BlockSide,
    logits_tile,
    mask_tile,
    needs_mask,
)

#: Sums outside are recomputed. Below LOWEST, terms lost under 2^-126 would matter (4M: 2^-29).
LOWEST = tl.constexpr(2.0**-75)
HIGHEST = tl.constexpr(2.0**126)
#: Partial sums that are added at once.
P = tl.constexpr(64)
#: Rows per program of `merge_states`.
MERGED_ROWS = 256


@block_kernel
def combine_partials(
    x, y, scale,
    row_sums, references, row_partials, row_state, row_state_stride, row_is_first, row_is_last,
    col_sums, group_references, col_partials, col_state, col_state_stride, col_is_first,
    col_is_last,
    row_ids, row_ranges, row_range_stride, col_ids, col_ranges, col_range_stride, ceiling,
    guide_x, guide_y, guide_d, row_start, col_start, m, n, d, diagonal_offset,
    GROUP_ROWS: tl.constexpr, BK: tl.constexpr, DIAGONAL: tl.constexpr, PAIRED: tl.constexpr,
    GUIDE_BK: tl.constexpr, HAS_POSITIVES: tl.constexpr, TRIANGLE: tl.constexpr,
):  # fmt: skip
    """Add a block to the running states of both sides, B rows or B columns per program.

    A row has `row_partials` sums, a column `col_partials`; GROUP_ROWS rows are a row group. Before
    a side's first block, its state holds nothing; after its last one, the state holds the results,
    as of `states.to_logsumexp`. TRIANGLE: a row's sums begin at its group's first tile on the
    diagonal; the columns' sums of the groups above give the tiles left of it.
    """
    rows = BlockSide(x, guide_x, row_start, m, row_ids, row_ranges, row_range_stride, ceiling)
    cols = BlockSide(y, guide_y, col_start, n, col_ids, col_ranges, col_range_stride, None)
    t = tl.program_id(0)
    tiles = tl.cdiv(m, B)
    above_reference = tl.full((B,), float("-inf"), tl.float32)
    above_total = tl.zeros((B,), tl.float32)
    if t < tiles:
        i = t * B + tl.arange(0, B)
        group = t * B // GROUP_ROWS
        block_reference = clamped_references(references, i, tl.load(group_references + group))
        block_total = tl.zeros((B,), tl.float32)
        for start in range(group * (GROUP_ROWS // B) if TRIANGLE else 0, row_partials, P):
            block_total += tl.sum(_load_partials(row_sums, start, row_partials, i, m), 0)
        if TRIANGLE:  # noqa: SIM102 - one is known when the kernel is compiled
            if group > 0:
                largest = _largest_of_groups(group_references, group)
                above_total = _col_total(col_sums, group_references, largest, group, i, m)
                above_reference = tl.zeros((B,), tl.float32) + largest
        _combine_side(
            rows, cols, t, State(row_state, row_state_stride, row_is_first, row_is_last), scale,
            block_reference, block_total, above_reference, above_total, d, guide_d,
            diagonal_offset, BK, DIAGONAL, PAIRED, GUIDE_BK, HAS_POSITIVES,
        )  # fmt: skip
    else:
        t = t - tiles
        j = t * B + tl.arange(0, B)
        largest = _largest_of_groups(group_references, col_partials)
        block_total = _col_total(col_sums, group_references, largest, col_partials, j, n)
        block_reference = tl.zeros((B,), tl.float32) + largest
        _combine_side(
            cols, rows, t, State(col_state, col_state_stride, col_is_first, col_is_last), scale,
            block_reference, block_total, above_reference, above_total, d, guide_d,
            -diagonal_offset, BK, DIAGONAL, PAIRED, GUIDE_BK, HAS_POSITIVES,
        )  # fmt: skip


@triton.jit
def _largest_of_groups(group_references, groups):
    largest = tl.full((P,), float("-inf"), tl.float32)
    for start in range(0, groups, P):
        p = start + tl.arange(0, P)
        own = tl.load(group_references + p, mask=p < groups, other=float("-inf"))
        largest = tl.maximum(largest, own)
    return tl.max(largest, 0)


@triton.jit
def _col_total(sums, group_references, largest, groups, j, n):
    """Sums of columns j over the first groups of rows, relative to `largest`."""
    total = tl.zeros((B,), tl.float32)
    for start in range(0, groups, P):
        p = start + tl.arange(0, P)
        own = tl.load(group_references + p, mask=p < groups, other=float("-inf"))
        partials = _load_partials(sums, start, groups, j, n)
        total += tl.sum(partials * tl.exp2(own - largest)[:, None], 0)
    return total


@triton.jit
def _load_partials(sums, start, partials, i, size):
    p = start + tl.arange(0, P)
    mask = (p < partials)[:, None] & (i < size)[None, :]
    return tl.load(sums + p.to(tl.int64)[:, None] * size + i[None, :], mask=mask, other=0.0)


@triton.jit
def _combine_side(
    rows, cols, ti, state, scale, block_reference, block_total, above_reference, above_total,
    d, guide_d, diagonal_offset, BK: tl.constexpr, DIAGONAL: tl.constexpr, PAIRED: tl.constexpr,
    GUIDE_BK: tl.constexpr, HAS_POSITIVES: tl.constexpr,
):  # fmt: skip
    """Merge the block's sums of row tile ti and the tiles that need masks into the rows' state.

    If any row's sum left float32's range, the block's sums of this tile are dropped and all its
    column tiles recomputed.
    """
    i = ti * B + tl.arange(0, B)
    inside = i < rows.size
    begun = inside.to(tl.int32) > state.is_first
    place, stride = state.numbers + i, state.stride
    largest = tl.load(place, mask=begun, other=float("-inf"))
    total = tl.load(place + stride, mask=begun, other=0.0)
    p_largest = tl.full((B,), float("-inf"), tl.float32)
    p_total = tl.zeros((B,), tl.float32)
    p_sum = tl.zeros((B,), tl.float32)
    p_count = tl.zeros((B,), tl.float32)
    if HAS_POSITIVES:
        p_largest = tl.load(place + 2 * stride, mask=begun, other=float("-inf"))
        p_total = tl.load(place + 3 * stride, mask=begun, other=0.0)
        p_sum = tl.load(place + 4 * stride, mask=begun, other=0.0)
        p_count = tl.load(place + 5 * stride, mask=begun, other=0.0)
    bad = inside & ~((block_total >= LOWEST) & (block_total <= HIGHEST))
    some = above_reference > float("-inf")
    bad = bad | (inside & some & ~((above_total >= LOWEST) & (above_total <= HIGHEST)))
    above_reference = tl.where(some, above_reference, block_reference)  # a sum of 0 at any
    block_reference, block_total = _merge(
        block_reference, block_total, above_reference, above_total
    )  # fmt: skip
    recompute = tl.max(bad.to(tl.int32), 0) != 0
    merged, merged_total = _merge(largest, total, block_reference, block_total)
    largest = tl.where(recompute, largest, merged)
    total = tl.where(recompute, total, merged_total)
    k = tl.load(scale)
    tiles = tl.cdiv(cols.size, B)
    for start in tl.range(0, tiles, 64):
        # Check 64 tiles at once, then loop from the first to the last that is wanted.
        index = start + tl.arange(0, 64)
        masked = needs_mask(
            ti, tl.minimum(index, tiles - 1), rows, cols, diagonal_offset, DIAGONAL
        )  # fmt: skip
        wanted = (index < tiles) & (recompute | masked)
        first = tl.min(tl.where(wanted, index, tiles), 0)
        last = tl.max(tl.where(wanted, index, -1), 0)
        for tj in tl.range(first, last + 1):
            if recompute | needs_mask(ti, tj, rows, cols, diagonal_offset, DIAGONAL):
                s = logits_tile(rows, cols, ti, tj, d, BK) * k
                negative, positive = mask_tile(
                    s, rows, cols, ti, tj, diagonal_offset, guide_d, DIAGONAL, PAIRED, GUIDE_BK
                )  # fmt: skip
                largest, total = _running_sum(largest, total, s * LOG2E, negative)
                if HAS_POSITIVES:
                    p_largest, p_total = _running_sum(p_largest, p_total, s * LOG2E, positive)
                    p_sum += tl.sum(tl.where(positive, s, 0.0), 1)
                    p_count += tl.sum(positive.to(tl.float32), 1)
    done = state.is_last != 0
    tl.store(place, tl.where(done, _to_logsumexp(largest, total), largest), mask=inside)
    if HAS_POSITIVES:
        second = tl.where(done, _to_logsumexp(p_largest, p_total), total)
        tl.store(place + stride, second, mask=inside)
        tl.store(place + 2 * stride, tl.where(done, p_sum, p_largest), mask=inside)
        tl.store(place + 3 * stride, tl.where(done, p_count, p_total), mask=inside)
        tl.store(place + 4 * stride, p_sum, mask=inside)
        tl.store(place + 5 * stride, p_count, mask=inside)
    else:
        tl.store(place + stride, total, mask=inside)


@triton.jit
def _merge(old, old_total, new, new_total):
    largest = tl.maximum(old, new)
    total = old_total * tl.exp2(old - largest) + new_total * tl.exp2(new - largest)
    # A power of two moves from the sum to the reference, exactly, so that neither leaves range.
    power = tl.floor(tl.log2(total))
    return largest + power, total * tl.exp2(-power)


@triton.jit
def _to_logsumexp(largest, total):
    return tl.log(total) + largest * LN2


@triton.jit
def _running_sum(largest, total, s, mask):
    s = tl.where(mask, s, float("-inf"))
    new = tl.maximum(largest, tl.max(s, 1))
    shift = tl.where(new == float("-inf"), 0.0, new)
    total = total * tl.exp2(largest - shift) + tl.sum(tl.exp2(s - shift[:, None]), 1)
    return new, total


def merge(states: Tensor, out: Tensor, to_logsumexp: bool) -> None:
    """out = several states (k, 2 or 6, size) of the same rows as one, or its results."""
    count, rows, size = states.shape
    if size:
        merge_states.launch(
            cdiv(size, MERGED_ROWS), states=states, part_stride=states.stride(0),
            stride=states.stride(1), result=out, result_stride=out.stride(0), count=count,
            size=size, HAS_POSITIVES=rows == 6, TO_LOGSUMEXP=to_logsumexp, ROWS=MERGED_ROWS,
        )  # fmt: skip


@kernel
def merge_states(
    states, part_stride, stride, result, result_stride, count, size,
    HAS_POSITIVES: tl.constexpr, TO_LOGSUMEXP: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """result = `count` states as one, or the results of that one."""
    i = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = i < size
    part_stride = part_stride.to(tl.int64)
    for kind in tl.static_range(2 if HAS_POSITIVES else 1):  # negatives, positives
        own = states + 2 * kind * stride + i
        largest = tl.full((ROWS,), float("-inf"), tl.float32)
        for part in range(count):
            one = tl.load(own + part * part_stride, mask=inside, other=float("-inf"))
            largest = tl.maximum(largest, one)
        # A state without any pair has -inf; -inf - -inf would be NaN.
        shift = tl.where(largest == float("-inf"), 0.0, largest)
        total = tl.zeros((ROWS,), tl.float32)
        for part in range(count):
            one = tl.load(own + part * part_stride, mask=inside, other=float("-inf"))
            of_one = tl.load(own + part * part_stride + stride, mask=inside, other=0.0)
            total += of_one * tl.exp2(one - shift)
        if TO_LOGSUMEXP:
            tl.store(result + kind * result_stride + i, _to_logsumexp(largest, total), mask=inside)
        else:
            tl.store(result + 2 * kind * result_stride + i, largest, mask=inside)
            tl.store(result + (2 * kind + 1) * result_stride + i, total, mask=inside)
    if HAS_POSITIVES:
        for number in tl.static_range(2):  # sum of logits, count
            total = tl.zeros((ROWS,), tl.float32)
            for part in range(count):
                place = states + part * part_stride + (4 + number) * stride + i
                total += tl.load(place, mask=inside, other=0.0)
            row = 2 + number if TO_LOGSUMEXP else 4 + number
            tl.store(result + row * result_stride + i, total, mask=inside)
