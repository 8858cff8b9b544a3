"""Backward kernels of the cross-entropy against soft targets.

Each program computes a tile of the student's logits and the same tile of the teacher's.
`unmasked_backward` takes one exponential of each for both sides, as
`softmax_backward.unmasked_tiles` does; `masked_backward` takes two, with masks. Exponents are in
base 2.
"""

from __future__ import annotations

import triton
import triton.language as tl

from megabatch.similarity.triton.blocks import Upstream, block_kernel
from megabatch.similarity.triton.soft_target_forward import CHUNK
from megabatch.similarity.triton.softmax_backward import needs_two_exponentials, softmax_grad
from megabatch.similarity.triton.tiles import (
    LOG2E,
    B,
    BlockSide,
    guide_tile,
    logits_tile,
    needs_mask,
    swizzle,
)


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


@block_kernel
def unmasked_backward(
    x, y, ds, scale, guide_x, guide_y, teacher_scale,
    row_upstream, row_stride, col_upstream, col_stride,
    row_start, col_start, m, n, d, guide_d, BK: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """dS of all tiles, as if none needed a mask or two exponentials.

    One product after the other, which leaves registers for the results of the first.
    """
    rows = BlockSide(x, guide_x, row_start, m, None, None, None, None)
    cols = BlockSide(y, guide_y, col_start, n, None, None, None, None)
    ti, tj = swizzle(tl.program_id(0), tl.cdiv(m, B), tl.cdiv(n, B), GROUP)
    i = ti * B + tl.arange(0, B)
    j = tj * B + tl.arange(0, B)
    # Loaded before the products, which take longer than this load.
    of_rows = _load_upstream(row_upstream, row_stride, i, m, 0, float("-inf"))
    of_cols = _load_upstream(col_upstream, col_stride, j, n, 0, float("inf"))
    s = logits_tile(rows, cols, ti, tj, d, BK) * (tl.load(scale) * LOG2E)
    g = _shared_exponential(s, of_rows, of_cols)
    of_rows = _load_upstream(row_upstream, row_stride, i, m, 2, float("-inf"))
    of_cols = _load_upstream(col_upstream, col_stride, j, n, 2, float("inf"))
    t = guide_tile(rows, cols, ti, tj, guide_d, BK) * (tl.load(teacher_scale) * LOG2E)
    g -= _shared_exponential(t, of_rows, of_cols)
    ds.store([ti * B, tj * B], g.to(ds.dtype))


@triton.jit
def _is_masked(ti, tj, rows, cols, of_rows, of_cols, diagonal_offset, DIAGONAL: tl.constexpr):
    """Whether `masked_backward` must take a tile; ti and tj may be vectors."""
    student = needs_two_exponentials(ti, tj, of_rows, of_cols, 0)
    teacher = needs_two_exponentials(ti, tj, of_rows, of_cols, 2)
    return needs_mask(ti, tj, rows, cols, diagonal_offset, DIAGONAL) | student | teacher


@block_kernel
def masked_backward(
    x, y, ds, scale, guide_x, guide_y, teacher_scale,
    row_upstream, row_stride, col_upstream, col_stride,
    row_extremes, row_extremes_stride, col_extremes,
    col_extremes_stride,
    row_start, col_start, m, n, d, guide_d, diagonal_offset,
    BK: tl.constexpr, DIAGONAL: tl.constexpr,
):  # fmt: skip
    """dS of the tiles that need masks or two exponentials; a program looks at CHUNK tiles."""
    rows = BlockSide(x, guide_x, row_start, m, None, None, None, None)
    cols = BlockSide(y, guide_y, col_start, n, None, None, None, None)
    of_rows = Upstream(row_upstream, row_stride, row_extremes, row_extremes_stride)
    of_cols = Upstream(col_upstream, col_stride, col_extremes, col_extremes_stride)
    width = tl.cdiv(n, B)
    start = tl.program_id(0) * CHUNK
    end = tl.minimum(start + CHUNK, tl.cdiv(m, B) * width)
    index = tl.minimum(start + tl.arange(0, CHUNK), end - 1)
    some = _is_masked(
        index // width, index % width, rows, cols, of_rows, of_cols, diagonal_offset, DIAGONAL
    )  # fmt: skip
    if tl.max(some.to(tl.int32), 0) == 0:
        return
    for k in tl.range(start, end):
        ti = k // width
        tj = k % width
        if _is_masked(ti, tj, rows, cols, of_rows, of_cols, diagonal_offset, DIAGONAL):
            i = ti * B + tl.arange(0, B)
            j = tj * B + tl.arange(0, B)
            inside = (i < m)[:, None] & (j < n)[None, :]
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
            g = tl.where(inside, g, 0.0)
            ds.store([ti * B, tj * B], g.to(ds.dtype))
