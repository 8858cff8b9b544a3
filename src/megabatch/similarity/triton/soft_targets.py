"""Cross-entropy of one device's matrix against soft targets.

Each program computes a tile of the student's logits and the same tile of the teacher's.

`forward_tiles` takes one exponential of each for both sides. A row's sums are relative to its
largest logit in the tile, a column's to the tile's largest; where that is too large for some
column, the tile is computed again with a reference for each column. So are the tiles that the
diagonal crosses, whose pairs (i, i) are left to `combine_partials`. The latter merges all sums into
the running states, relative to the largest logit of the student: a sum of terms of one sign.

`backward_tiles` takes one exponential of each for both sides, as `softmax.unmasked_gradients`
does, or two, with masks.

Exponents, references and states are in base 2. A tile's partial sums for a side are `[largest
logit, sum of 2^(s - largest), the teacher's two, sum of 2^(t - largest) * (largest of s - s)]`. The
guide of a `Block` is the teacher.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from megabatch.similarity import states
from megabatch.similarity.matrix import Matrix
from megabatch.similarity.tiles import State
from megabatch.similarity.triton.blocking import TILE, cdiv
from megabatch.similarity.triton.blocks import Upstream, block_kernel, new_descriptor
from megabatch.similarity.triton.configs import launch_config
from megabatch.similarity.triton.softmax import (
    SoftmaxKernelTiles,
    needs_two_exponentials,
    softmax_grad,
)
from megabatch.similarity.triton.tiles import (
    LN2,
    LOG2E,
    NO_DIAGONAL,
    B,
    BlockSide,
    finite,
    guide_tile,
    load_partials,
    load_sum,
    logits_tile,
    needs_mask,
    store_rows,
    swizzle,
    to_logsumexp,
)

#: Numbers of a tile's partial sums for a row or column.
PARTS = 5
#: A column's sums of the student lose precision if they are relative to a logit that far above:
#: at 2^-20, the sum of one-signed terms is 14 too large, 8e-7 in float32.
LOWEST = tl.constexpr(2.0**-20)
#: The teacher's sums only have to stay in float32's range.
TEACHER_LOWEST = tl.constexpr(2.0**-75)
#: Partial sums that are added at once.
P = tl.constexpr(16)


class SoftTargetKernelTiles(SoftmaxKernelTiles):
    """See `sweep.StateTiles`; an upstream is an `Upstream`."""

    _lses = 2

    def __init__(self, matrix: Matrix, scale: Tensor, teacher_scale: Tensor) -> None:
        super().__init__(matrix, scale)
        self.numbers, self.teacher_scale = states.TARGETS, teacher_scale

    def forward_block(self, i: slice, j: slice, rows: State, cols: State | None) -> None:
        config = launch_config("soft_targets", self.features)
        block = self._block(i, j, config.bk)
        block.set_states(rows, cols)
        m, n = block.m, block.n
        row_tiles, col_tiles = cdiv(m, TILE), cdiv(n, TILE)
        row_partials = self._empty(PARTS, col_tiles, m)
        col_partials = self._empty(PARTS, row_tiles, n)
        own = self._empty(2, m)
        if block.diagonal != NO_DIAGONAL:
            own.fill_(-torch.inf)
        forward_tiles.launch(
            row_tiles * col_tiles, block, teacher_scale=self.teacher_scale,
            row_partials=row_partials, col_partials=col_partials, own=own, stride=own.stride(0),
            GROUP=config.group, EVEN=m % TILE == 0 and n % TILE == 0,
            num_warps=config.warps, num_stages=config.stages,
        )  # fmt: skip
        combine_partials.launch(
            row_tiles + (0 if cols is None else col_tiles), block, row_partials=row_partials,
            col_partials=col_partials, own=own, stride=own.stride(0),
        )  # fmt: skip

    def make_upstream(self, results: Tensor, gradient: Tensor) -> Upstream:
        return Upstream.of(states.upstream(results, gradient), self._lses)

    def gradient_block(
        self, i: slice, j: slice, rows: Upstream | None, cols: Upstream | None
    ) -> Tensor:
        config = launch_config("soft_targets_backward", self.features)
        block, ds = self._block(i, j, config.bk), self._workspace(i, j)
        block.set_upstreams(
            self._without_gradient(block.m) if rows is None else rows.view(i),
            self._without_gradient(block.n) if cols is None else cols.view(j),
        )
        backward_tiles.launch(
            cdiv(block.m, TILE) * cdiv(block.n, TILE), block, ds=new_descriptor(ds, TILE),
            teacher_scale=self.teacher_scale, GROUP=config.group,
            num_warps=config.warps, num_stages=config.stages,
        )  # fmt: skip
        return ds

    def _without_gradient(self, size: int) -> Upstream:
        """The upstream of a side that has none: gradients of 0, and log-sum-exps of +inf.

        At a finite one an exponential could overflow, and infinity times 0 is NaN.
        """
        packed = self._empty(5, size).zero_()
        packed[0:3:2] = torch.inf
        return Upstream.of(packed, self._lses)


# --- forward --------------------------------------------------------------------------------------


@block_kernel
def forward_tiles(
    x, y, scale, guide_x, guide_y, teacher_scale, row_partials, col_partials, own, stride,
    row_start, col_start, m, n, d, guide_d, diagonal_offset,
    BK: tl.constexpr, GROUP: tl.constexpr, EVEN: tl.constexpr, DIAGONAL: tl.constexpr,
):  # fmt: skip
    """Partial sums of all tiles. EVEN: no tile reaches past m or n.

    The pairs (i, i) count in none of them: own[0, i] and own[1, i] become their logits, the
    student's and the teacher's.
    """
    rows = BlockSide(x, guide_x, row_start, m, None, None, None, None)
    cols = BlockSide(y, guide_y, col_start, n, None, None, None, None)
    row_tiles = tl.cdiv(m, B)
    col_tiles = tl.cdiv(n, B)
    ti, tj = swizzle(tl.program_id(0), row_tiles, col_tiles, GROUP)
    i = ti * B + tl.arange(0, B)
    j = tj * B + tl.arange(0, B)
    k = tl.load(scale) * LOG2E
    teacher_k = tl.load(teacher_scale) * LOG2E
    masked = needs_mask(ti, tj, rows, cols, diagonal_offset, DIAGONAL)
    if masked == 0:
        s, t = _both_logits(rows, cols, ti, tj, d, guide_d, BK)
        s = s * k
        t = t * teacher_k
        if not EVEN:
            inside = (i < m)[:, None] & (j < n)[None, :]
            s = tl.where(inside, s, float("-inf"))
            t = tl.where(inside, t, float("-inf"))
        largest = finite(tl.max(s, 1))
        top = tl.max(largest, 0)
        s = s - largest[:, None]
        e = tl.exp2(s)
        row_total = tl.sum(e, 1)
        col_total = tl.sum(e * tl.exp2(largest - top)[:, None], 0)
        if not EVEN:
            s = tl.where(inside, s, 0.0)
        teacher_largest = finite(tl.max(t, 1))
        teacher_top = tl.max(teacher_largest, 0)
        e = tl.exp2(t - teacher_largest[:, None])
        teacher_row_total = tl.sum(e, 1)
        below = e * -s
        row_below = tl.sum(below, 1)
        # Columns' sums from the rows' terms: logits that are kept as well would spill registers.
        weight = tl.exp2(teacher_largest - teacher_top)
        teacher_col_total = tl.sum(e * weight[:, None], 0)
        gap = weight * (top - largest)
        col_below = tl.sum(below * weight[:, None] + e * gap[:, None], 0)
        partials = (largest, row_total, teacher_largest, teacher_row_total, row_below)
        _store_partials(row_partials, tj, col_tiles, i, m, partials)
        tops = tl.zeros((B,), tl.float32)
        partials = (tops + top, col_total, tops + teacher_top, teacher_col_total, col_below)
        _store_partials(col_partials, ti, row_tiles, j, n, partials)
        good = (col_total >= LOWEST) & (teacher_col_total >= TEACHER_LOWEST)
        masked = tl.max(((j < n) & ~good).to(tl.int32), 0) != 0
    if masked:
        s = logits_tile(rows, cols, ti, tj, d, BK) * k
        t = guide_tile(rows, cols, ti, tj, guide_d, BK) * teacher_k
        inside = (i < m)[:, None] & (j < n)[None, :]
        if DIAGONAL != 0:
            same = inside & (i[:, None] == (j + diagonal_offset)[None, :])
            some = tl.max(same.to(tl.int32), 1) > 0
            tl.store(own + i, tl.sum(tl.where(same, s, 0.0), 1), mask=some)
            tl.store(own + stride + i, tl.sum(tl.where(same, t, 0.0), 1), mask=some)
            inside = inside & ~same
        student = tl.where(inside, s, float("-inf"))
        teacher = tl.where(inside, t, float("-inf"))
        s = tl.where(inside, s, 0.0)
        partials = _masked_partials(student, teacher, s, 1)
        _store_partials(row_partials, tj, col_tiles, i, m, partials)
        partials = _masked_partials(student, teacher, s, 0)
        _store_partials(col_partials, ti, row_tiles, j, n, partials)


@triton.jit
def _both_logits(rows, cols, ti, tj, d, guide_d, BK: tl.constexpr):
    """The same tile of both matrices, in float32, without their scales.

    One loop computes both products as far as both widths go: separate loops would each wait for
    their first features.
    """
    i0 = rows.start + ti * B
    j0 = cols.start + tj * B
    x, y, teacher_x, teacher_y = rows.features, cols.features, rows.guide, cols.guide
    s = tl.zeros((B, B), tl.float32)
    t = tl.zeros((B, B), tl.float32)
    shared = tl.cdiv(tl.minimum(d, guide_d), BK) * BK
    for c in tl.range(0, shared, BK):
        s = tl.dot(x.load([i0, c]), y.load([j0, c]).T, s, input_precision="tf32")
        t = tl.dot(teacher_x.load([i0, c]), teacher_y.load([j0, c]).T, t, input_precision="tf32")
    for c in tl.range(shared, d, BK):
        s = tl.dot(x.load([i0, c]), y.load([j0, c]).T, s, input_precision="tf32")
    for c in tl.range(shared, guide_d, BK):
        t = tl.dot(teacher_x.load([i0, c]), teacher_y.load([j0, c]).T, t, input_precision="tf32")
    return s, t


@triton.jit
def _store_partials(out, tile, tiles, i, size, partials):
    """Write a tile's partial sums for rows i; `out` has PARTS numbers of each tile and row."""
    place = out + tile.to(tl.int64) * size + i
    store_rows(place, tiles.to(tl.int64) * size, 0, partials, i < size)


@triton.jit
def _masked_partials(student, teacher, s, AXIS: tl.constexpr):
    """Partial sums of one side; student, teacher: -inf, s: 0 for a pair that does not count."""
    largest = finite(tl.max(student, AXIS))
    teacher_largest = finite(tl.max(teacher, AXIS))
    e = tl.exp2(teacher - tl.expand_dims(teacher_largest, AXIS))
    total = tl.sum(tl.exp2(student - tl.expand_dims(largest, AXIS)), AXIS)
    teacher_total = tl.sum(e, AXIS)
    below = tl.sum(e * (tl.expand_dims(largest, AXIS) - s), AXIS)
    return largest, total, teacher_largest, teacher_total, below


@block_kernel
def combine_partials(
    row_partials, row_state, row_state_stride, row_is_first, row_is_last,
    col_partials, col_state, col_state_stride, col_is_first, col_is_last,
    own, stride, m, n, diagonal_offset, DIAGONAL: tl.constexpr,
):  # fmt: skip
    """Merge a block's partial sums into the states of B of its rows, or of B of its columns.

    A side's first block finds an uninitialised state; its last one leaves the results.
    """
    k = tl.program_id(0)
    row_tiles = tl.cdiv(m, B)
    col_tiles = tl.cdiv(n, B)
    if k < row_tiles:
        i = k * B + tl.arange(0, B)
        own_s, own_t = _own(own, stride, i, i < m, DIAGONAL)
        if DIAGONAL != 0:
            j = i - diagonal_offset
            here = (j >= 0) & (j < n)
            own_s = tl.where(here, own_s, float("-inf"))
        state = State(row_state, row_state_stride, row_is_first, row_is_last)
        _combine(row_partials, col_tiles, i, m, own_s, own_t, state)
    else:
        j = (k - row_tiles) * B + tl.arange(0, B)
        i = j + diagonal_offset
        own_s, own_t = _own(own, stride, i, (j < n) & (i >= 0) & (i < m), DIAGONAL)
        state = State(col_state, col_state_stride, col_is_first, col_is_last)
        _combine(col_partials, row_tiles, j, n, own_s, own_t, state)


@triton.jit
def _own(own, stride, i, here, DIAGONAL: tl.constexpr):
    """The logits of the pairs (i, i), -inf if there are none here."""
    if DIAGONAL == 0:
        nothing = tl.where(here, float("-inf"), float("-inf"))
        return nothing, nothing
    s = tl.load(own + i, mask=here, other=float("-inf"))
    return s, tl.load(own + stride + i, mask=here, other=0.0)


@triton.jit
def _combine(partials, tiles, i, size, own_s, own_t, state):
    inside = i < size
    old = inside.to(tl.int32) > state.is_first
    numbers, stride = state.numbers, state.stride
    low = float("-inf")
    negative, negative_total = load_sum(numbers, stride, 0, i, old)
    positive, positive_total = load_sum(numbers, stride, 2, i, old)
    positive_sum = tl.load(numbers + 4 * stride + i, mask=old, other=0.0)
    positive_count = tl.load(numbers + 5 * stride + i, mask=old, other=0.0)
    teacher, teacher_total = load_sum(numbers, stride, 6, i, old)
    below = tl.load(numbers + 8 * stride + i, mask=old, other=0.0)
    teacher_own = tl.load(numbers + 9 * stride + i, mask=old, other=low)
    before = tl.maximum(negative, positive)

    has_own = own_s > low
    has_own = has_own | (own_s != own_s)  # a NaN counts
    step = tiles.to(tl.int64) * size
    new, new_teacher = negative, teacher
    for start in range(0, tiles, P):
        # A tile without any pair has a sum of 0.
        some = load_partials(partials + step, start, tiles, i, size, P) != 0.0
        largest = load_partials(partials, start, tiles, i, size, P)
        new = tl.maximum(new, tl.max(tl.where(some, largest, low), 0))
        largest = load_partials(partials + 2 * step, start, tiles, i, size, P)
        new_teacher = tl.maximum(new_teacher, tl.max(tl.where(some, largest, low), 0))
    new_positive = tl.maximum(positive, own_s)
    teacher_own = tl.where(has_own, own_t, teacher_own)
    top = finite(tl.maximum(new, new_positive))

    shift, positive_shift = finite(new), finite(new_positive)
    teacher_shift = finite(new_teacher)
    weight = tl.exp2(teacher - teacher_shift)
    # The sum so far was relative to the largest logit before.
    gap = tl.where(before == low, 0.0, top - before)
    below = weight * (below + gap * teacher_total)
    teacher_total = weight * teacher_total
    negative_total = negative_total * tl.exp2(negative - shift)
    for start in range(0, tiles, P):
        largest = load_partials(partials, start, tiles, i, size, P)
        total = load_partials(partials + step, start, tiles, i, size, P)
        of_teacher = load_partials(partials + 2 * step, start, tiles, i, size, P)
        of_teacher_total = load_partials(partials + 3 * step, start, tiles, i, size, P)
        of_below = load_partials(partials + 4 * step, start, tiles, i, size, P)
        some = total != 0.0
        total = tl.where(some, total * tl.exp2(largest - shift[None, :]), 0.0)
        negative_total += tl.sum(total, 0)
        weights = tl.where(some, tl.exp2(of_teacher - teacher_shift[None, :]), 0.0)
        teacher_total += tl.sum(weights * of_teacher_total, 0)
        below += tl.sum(weights * (of_below + (top[None, :] - largest) * of_teacher_total), 0)
    positive_total = positive_total * tl.exp2(positive - positive_shift)
    positive_total += tl.where(has_own, tl.exp2(own_s - positive_shift), 0.0)
    positive_sum += tl.where(has_own, own_s * LN2, 0.0)
    positive_count += tl.where(has_own, 1.0, 0.0)

    if state.is_last != 0:
        sums = negative_total * tl.exp2(new - top) + positive_total * tl.exp2(new_positive - top)
        reference = finite(tl.maximum(new_teacher, teacher_own))
        others = tl.exp2(new_teacher - reference)
        own_weight = tl.exp2(teacher_own - reference)
        total = others * teacher_total + own_weight
        empty = (sums == 0.0) & (total == 0.0)
        mean = others * below + tl.where(own_weight == 0.0, 0.0, own_weight * (top - new_positive))
        mean = mean / tl.where(empty, 1.0, total)
        cross_entropy = tl.where(empty, 0.0, tl.log(sums) + mean * LN2)
        results = (
            to_logsumexp(new, negative_total), to_logsumexp(new_positive, positive_total),
            positive_sum, positive_count, cross_entropy, to_logsumexp(new_teacher, teacher_total),
            teacher_own * LN2,
        )  # fmt: skip
        store_rows(numbers, stride, i, results, inside)
    else:
        new_state = (
            new, negative_total, new_positive, positive_total, positive_sum, positive_count,
            new_teacher, teacher_total, below, teacher_own,
        )  # fmt: skip
        store_rows(numbers, stride, i, new_state, inside)


# --- backward -------------------------------------------------------------------------------------


@block_kernel
def backward_tiles(
    x, y, ds, scale, guide_x, guide_y, teacher_scale,
    row_upstream, row_stride, row_extremes, row_extremes_stride,
    col_upstream, col_stride, col_extremes, col_extremes_stride,
    row_start, col_start, m, n, d, guide_d, diagonal_offset,
    BK: tl.constexpr, GROUP: tl.constexpr, DIAGONAL: tl.constexpr,
):  # fmt: skip
    """dS of all tiles.

    One product after the other, which leaves registers for the results of the first.
    """
    rows = BlockSide(x, guide_x, row_start, m, None, None, None, None)
    cols = BlockSide(y, guide_y, col_start, n, None, None, None, None)
    of_rows = Upstream(row_upstream, row_stride, row_extremes, row_extremes_stride)
    of_cols = Upstream(col_upstream, col_stride, col_extremes, col_extremes_stride)
    ti, tj = swizzle(tl.program_id(0), tl.cdiv(m, B), tl.cdiv(n, B), GROUP)
    i = ti * B + tl.arange(0, B)
    j = tj * B + tl.arange(0, B)
    masked = needs_mask(ti, tj, rows, cols, diagonal_offset, DIAGONAL)
    masked = masked | needs_two_exponentials(ti, tj, of_rows, of_cols, 0)
    if masked | needs_two_exponentials(ti, tj, of_rows, of_cols, 2):
        s = logits_tile(rows, cols, ti, tj, d, BK) * tl.load(scale)
        g = softmax_grad(s, of_rows, i, m, 0, 1)
        g += softmax_grad(s, of_cols, j, n, 0, 0)
        t = guide_tile(rows, cols, ti, tj, guide_d, BK) * tl.load(teacher_scale)
        g -= softmax_grad(t, of_rows, i, m, 2, 1)
        g -= softmax_grad(t, of_cols, j, n, 2, 0)
        if DIAGONAL != 0:
            own = tl.load(row_upstream + 4 * row_stride + i, mask=i < m, other=0.0)[:, None]
            others = tl.load(col_upstream + 4 * col_stride + j, mask=j < n, other=0.0)[None, :]
            same = i[:, None] == (j + diagonal_offset)[None, :]
            g = tl.where(same, own + others, g)
        g = tl.where((i < m)[:, None] & (j < n)[None, :], g, 0.0)
        ds.store([ti * B, tj * B], g.to(ds.dtype))
    else:
        # Loaded before the products, which take longer than this load.
        row_numbers = _load_upstream(row_upstream, row_stride, i, m, 0, float("-inf"))
        col_numbers = _load_upstream(col_upstream, col_stride, j, n, 0, float("inf"))
        s = logits_tile(rows, cols, ti, tj, d, BK) * (tl.load(scale) * LOG2E)
        g = _shared_exponential(s, row_numbers, col_numbers)
        row_numbers = _load_upstream(row_upstream, row_stride, i, m, 2, float("-inf"))
        col_numbers = _load_upstream(col_upstream, col_stride, j, n, 2, float("inf"))
        t = guide_tile(rows, cols, ti, tj, guide_d, BK) * (tl.load(teacher_scale) * LOG2E)
        g -= _shared_exponential(t, row_numbers, col_numbers)
        ds.store([ti * B, tj * B], g.to(ds.dtype))


@triton.jit
def _load_upstream(upstream, stride, index, size, LSE: tl.constexpr, absent):
    """A tile's (log-sum-exp in base 2, gradient) of each row or column, as (B, 2).

    LSE: the number of an upstream that is the log-sum-exp; its gradient is the next. `absent`: the
    log-sum-exp of rows past the end. One load of 256 numbers for both: for a smaller load, Triton
    has each thread load all that it needs, one after the other (140 loads per thread).
    """
    number = tl.arange(0, 2)[None, :]
    inside = (index < size)[:, None]
    numbers = tl.load(upstream + (LSE + number) * stride + index[:, None], mask=inside, other=0.0)
    return tl.where(number == 0, tl.where(inside, numbers * LOG2E, absent), numbers)


@triton.jit
def _weights(numbers, reference):
    """gradient * 2^(reference - log-sum-exp), (B,).

    Sums separate the two numbers: after `tl.split` Triton would compute the exponential anew in
    each thread that needs it.
    """
    number = tl.arange(0, 2)[None, :]
    present = (number == 0) & (numbers > float("-inf"))
    exponentials = tl.sum(tl.where(present, tl.exp2(reference - numbers), 0.0), 1)
    return exponentials * tl.sum(tl.where(number == 1, numbers, 0.0), 1)


@triton.jit
def _shared_exponential(logits, rows, cols):
    """Both sides' gradients of a tile of logits in base 2, from one exponential of each."""
    is_lse = tl.arange(0, 2)[None, :] == 0
    reference = tl.max(tl.max(tl.where(is_lse, rows, float("-inf")), 1), 0)
    weights = _weights(rows, reference)[:, None] + _weights(cols, reference)[None, :]
    return tl.exp2(logits - reference) * weights
