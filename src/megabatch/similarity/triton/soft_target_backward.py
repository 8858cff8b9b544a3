"""Backward kernels of the cross-entropy against soft targets.

Each program computes a tile of the student's logits and the same tile of the teacher's.
`unmasked_backward` takes one exponential of each for both sides, as
`softmax_backward.unmasked_tiles` does; `masked_backward` takes two, with masks. Exponents are in
base 2.
"""

from __future__ import annotations

import triton
import triton.language as tl

from megabatch.similarity.triton.launch import kernel
from megabatch.similarity.triton.tiles import LOG2E, logits_tile, needs_mask, swizzle


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


@kernel
def unmasked_backward(
    x, y, ds, scale, teacher_x, teacher_y, teacher_scale,
    row_upstream, row_stride, col_upstream, col_stride,
    row_start, col_start, m, n, d, teacher_d,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """dS of all tiles, as if none needed a mask or two exponentials.

    One product after the other, which leaves registers for the results of the first.
    """
    ti, tj = swizzle(tl.program_id(0), tl.cdiv(m, BM), tl.cdiv(n, BN), GROUP)
    i = ti * BM + tl.arange(0, BM)
    j = tj * BN + tl.arange(0, BN)
    # Loaded before the products, which take longer than this load.
    rows = _load_upstream(row_upstream, row_stride, i, m, 0, float("-inf"))
    cols = _load_upstream(col_upstream, col_stride, j, n, 0, float("inf"))
    s = logits_tile(x, y, row_start + ti * BM, col_start + tj * BN, d, BM, BN, BK)
    s = s * (tl.load(scale) * LOG2E)
    g = _shared_exponential(s, rows, cols)
    rows = _load_upstream(row_upstream, row_stride, i, m, 2, float("-inf"))
    cols = _load_upstream(col_upstream, col_stride, j, n, 2, float("inf"))
    t = logits_tile(
        teacher_x, teacher_y, row_start + ti * BM, col_start + tj * BN, teacher_d, BM, BN, BK
    )
    t = t * (tl.load(teacher_scale) * LOG2E)
    g -= _shared_exponential(t, rows, cols)
    ds.store([ti * BM, tj * BN], g.to(ds.dtype))


@triton.jit
def _spread(
    ti, tj, row_extremes, row_tiles, col_extremes, col_tiles, START: tl.constexpr,
):  # fmt: skip
    """Largest difference of a tile's log-sum-exps; ti and tj may be vectors."""
    rows = row_extremes + START * row_tiles
    cols = col_extremes + START * col_tiles
    low = tl.minimum(tl.load(rows + ti), tl.load(cols + tj))
    high = tl.maximum(tl.load(rows + row_tiles + ti), tl.load(cols + col_tiles + tj))
    return high - low


@triton.jit
def _is_masked(
    ti, tj, row_extremes, row_tiles, col_extremes, col_tiles, diagonal_offset,
    BM: tl.constexpr, BN: tl.constexpr, DIAGONAL: tl.constexpr, LIMIT: tl.constexpr,
):  # fmt: skip
    """Whether `masked_backward` must take a tile; infinite and NaN spreads count as too large."""
    close = _spread(ti, tj, row_extremes, row_tiles, col_extremes, col_tiles, 0) <= LIMIT
    teacher = _spread(ti, tj, row_extremes, row_tiles, col_extremes, col_tiles, 2) <= LIMIT
    on_diagonal = needs_mask(ti, tj, None, 0, None, 0, diagonal_offset, BM, BN, DIAGONAL, False)
    return on_diagonal | (close == 0) | (teacher == 0)


@triton.jit
def _exponential(logits, upstream, stride, index, size, LSE: tl.constexpr, AXIS: tl.constexpr):
    """upstream gradient * e^(logit - log-sum-exp) of one side (AXIS 1: rows), logits in base e."""
    inside = index < size
    lse = tl.load(upstream + LSE * stride + index, mask=inside, other=float("inf"))
    grad = tl.load(upstream + (LSE + 1) * stride + index, mask=inside, other=0.0)
    e = tl.exp2((logits - tl.expand_dims(lse, AXIS)) * LOG2E)
    return e * tl.expand_dims(grad, AXIS)


@kernel
def masked_backward(
    x, y, ds, scale, teacher_x, teacher_y, teacher_scale,
    row_upstream, row_stride, col_upstream, col_stride,
    row_extremes, row_tiles, col_extremes, col_tiles,
    row_start, col_start, m, n, d, teacher_d, diagonal_offset,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, CHUNK: tl.constexpr,
    DIAGONAL: tl.constexpr, LIMIT: tl.constexpr,
):  # fmt: skip
    """dS of the tiles that need masks or two exponentials; a program looks at CHUNK tiles."""
    width = tl.cdiv(n, BN)
    start = tl.program_id(0) * CHUNK
    end = tl.minimum(start + CHUNK, tl.cdiv(m, BM) * width)
    index = tl.minimum(start + tl.arange(0, CHUNK), end - 1)
    some = _is_masked(
        index // width, index % width, row_extremes, row_tiles, col_extremes, col_tiles,
        diagonal_offset, BM, BN, DIAGONAL, LIMIT,
    )  # fmt: skip
    if tl.max(some.to(tl.int32), 0) == 0:
        return
    for k in tl.range(start, end):
        ti = k // width
        tj = k % width
        if _is_masked(
            ti, tj, row_extremes, row_tiles, col_extremes, col_tiles,
            diagonal_offset, BM, BN, DIAGONAL, LIMIT,
        ):  # fmt: skip
            i = ti * BM + tl.arange(0, BM)
            j = tj * BN + tl.arange(0, BN)
            inside = (i < m)[:, None] & (j < n)[None, :]
            s = logits_tile(x, y, row_start + ti * BM, col_start + tj * BN, d, BM, BN, BK)
            s = s * tl.load(scale)
            g = _exponential(s, row_upstream, row_stride, i, m, 0, 1)
            g += _exponential(s, col_upstream, col_stride, j, n, 0, 0)
            t = logits_tile(
                teacher_x, teacher_y, row_start + ti * BM, col_start + tj * BN, teacher_d,
                BM, BN, BK,
            )  # fmt: skip
            t = t * tl.load(teacher_scale)
            g -= _exponential(t, row_upstream, row_stride, i, m, 2, 1)
            g -= _exponential(t, col_upstream, col_stride, j, n, 2, 0)
            if DIAGONAL != 0:
                own = tl.load(row_upstream + 4 * row_stride + i, mask=i < m, other=0.0)[:, None]
                others = tl.load(col_upstream + 4 * col_stride + j, mask=j < n, other=0.0)[None, :]
                same = i[:, None] == (j + diagonal_offset)[None, :]
                g = tl.where(same, own + others, g)
            g = tl.where(inside, g, 0.0)
            ds.store([ti * BM, tj * BN], g.to(ds.dtype))
