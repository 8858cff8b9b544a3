"""The forward pass of log-sum-exps: kernels that sum exponentials tile by tile, in base 2.

1. `reference`: an upper guess of each row's largest logit.
2. `tile`: a tile's logits in registers, one exponential each, shared by both sides: row i's are
   relative to a reference of its own, and weighted by 2^(row's reference - the row group's) they
   sum to the columns'. It leaves out the tiles that need masks for some pairs (`tiles.mixed`).
3. `settle`: adds the tiles' sums to the running state, does the tiles left out of them with a
   running maximum, and does rows anew whose sums left float32's range.

`merged` and `results` join states of the same rows from several GPUs, in one launch each.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from megabatch.similarity.backends.triton.blocking import cdiv
from megabatch.similarity.backends.triton.launch import kernel
from megabatch.similarity.backends.triton.tiles import (
    LN2,
    LOG2E,
    logits_tile,
    mask_tile,
    mixed,
    swizzle,
)

#: Sums outside are redone exactly. Below, terms lost under 2^-126 would count (4M of them: 2^-29).
LOWEST = tl.constexpr(2.0**-75)
HIGHEST = tl.constexpr(2.0**126)
#: Rows a program of `combine`.
BLOCK = 256


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


def merged(states: Tensor) -> Tensor:
    """(k, rows of a state, size) -> (rows of a state, size); see `similarity.states`."""
    out = states.new_empty(states.shape[1:])
    _launch(states, out, False)
    return out


def results(states: Tensor, out: Tensor) -> None:
    """out = what `states.finish` makes of the states (k, ...) as one."""
    _launch(states, out, True)


def _launch(states: Tensor, out: Tensor, finish: bool) -> None:
    count, rows, size = states.shape
    if size:
        combine.launch(
            cdiv(size, BLOCK), states=states, part_stride=states.stride(0), stride=states.stride(1),
            result=out, result_stride=out.stride(0), count=count, size=size,
            KINDS=1 if rows == 2 else 2, FINISH=finish, B=BLOCK,
        )  # fmt: skip


@kernel
def combine(
    states, part_stride, stride, result, result_stride, count, size,
    KINDS: tl.constexpr, FINISH: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    """result = `count` states as one, or what `states.finish` would make of that."""
    i = tl.program_id(0) * B + tl.arange(0, B)
    inside = i < size
    part_stride = part_stride.to(tl.int64)
    for kind in tl.static_range(KINDS):
        own = states + 2 * kind * stride + i
        top = tl.full((B,), float("-inf"), tl.float32)
        for part in range(count):
            one = tl.load(own + part * part_stride, mask=inside, other=float("-inf"))
            top = tl.maximum(top, one)
        # A state without any pair has -inf; -inf - -inf would be NaN.
        shift = tl.where(top == float("-inf"), 0.0, top)
        total = tl.zeros((B,), tl.float32)
        for part in range(count):
            one = tl.load(own + part * part_stride, mask=inside, other=float("-inf"))
            of_one = tl.load(own + part * part_stride + stride, mask=inside, other=0.0)
            total += of_one * tl.exp2(one - shift)
        if FINISH:
            tl.store(result + kind * result_stride + i, tl.log(total) + top * LN2, mask=inside)
        else:
            tl.store(result + 2 * kind * result_stride + i, top, mask=inside)
            tl.store(result + (2 * kind + 1) * result_stride + i, total, mask=inside)
    if KINDS == 2:
        for number in tl.static_range(2):
            total = tl.zeros((B,), tl.float32)
            for part in range(count):
                place = states + part * part_stride + (4 + number) * stride + i
                total += tl.load(place, mask=inside, other=0.0)
            row = 2 + number if FINISH else 4 + number
            tl.store(result + row * result_stride + i, total, mask=inside)
