"""Log-sum-exps and dS of a block of logits that is in memory, in one launch each.

They serve late interaction, whose logits are sums over tokens (`maxsim`). Torch operations would
take dozens of launches, for which a small batch waits. Exponents are in base 2, as in `softmax`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from megabatch.similarity.tiles import State
from megabatch.similarity.triton.launch import kernel
from megabatch.similarity.triton.softmax import begin_state, end_state, running_sum
from megabatch.similarity.triton.tiles import LOG2E, BlockSide, masks

#: Numbers of a side that a program of `merge_scores` takes, and of the other side at once; rows and
#: columns of a program of `score_gradients`. Tiles of 128 x 128 do not fit into the registers.
OWN, OTHERS = tl.constexpr(16), tl.constexpr(128)
ROWS, COLS = tl.constexpr(32), tl.constexpr(64)


class Scores(NamedTuple):
    """A block's scores inside a kernel, (m, n); the logits are these times weights and a scale."""

    numbers: Any
    row_weight: Any  #: (m,) or None
    col_weight: Any  #: likewise; rows and columns may be swapped
    row_stride: Any
    col_stride: Any


@triton.jit
def load_logits(
    scores, scale, rows, cols, i, j, diagonal_offset, DIAGONAL: tl.constexpr, PAIRED: tl.constexpr
):
    """Logits of rows i and columns j, their masks of negatives and of positives."""
    inside = (i < rows.size)[:, None] & (j < cols.size)[None, :]
    at = i.to(tl.int64)[:, None] * scores.row_stride + j.to(tl.int64)[None, :] * scores.col_stride
    s = tl.load(scores.numbers + at, mask=inside, other=0.0)
    if scores.row_weight is not None:
        s *= tl.load(scores.row_weight + i, mask=i < rows.size, other=0.0)[:, None]
    if scores.col_weight is not None:
        s *= tl.load(scores.col_weight + j, mask=j < cols.size, other=0.0)[None, :]
    s *= tl.load(scale)
    negative, positive = masks(s, rows, cols, i, j, diagonal_offset, DIAGONAL, PAIRED)
    return s, negative, positive


@kernel
def merge_scores(
    scores, weight, stride, scale, row_ids, col_ids, ceiling,
    row_state, row_state_stride, row_is_first, row_is_last,
    col_state, col_state_stride, col_is_first, col_is_last, m, n, diagonal_offset,
    DIAGONAL: tl.constexpr, PAIRED: tl.constexpr, HAS_POSITIVES: tl.constexpr,
):  # fmt: skip
    """Merge a block into the states of its rows and its columns, OWN of either a program."""
    rows = BlockSide(None, None, 0, m, row_ids, None, 0, ceiling)
    cols = BlockSide(None, None, 0, n, col_ids, None, 0, None)
    t = tl.program_id(0)
    tiles = tl.cdiv(m, OWN)
    if t < tiles:
        _merge_side(
            Scores(scores, weight, None, stride, 1), scale, rows, cols, t,
            State(row_state, row_state_stride, row_is_first, row_is_last),
            diagonal_offset, DIAGONAL, PAIRED, HAS_POSITIVES,
        )  # fmt: skip
    else:
        _merge_side(
            Scores(scores, None, weight, 1, stride), scale, cols, rows, t - tiles,
            State(col_state, col_state_stride, col_is_first, col_is_last),
            -diagonal_offset, DIAGONAL, PAIRED, HAS_POSITIVES,
        )  # fmt: skip


@triton.jit
def _merge_side(
    scores, scale, rows, cols, ti, state, diagonal_offset,
    DIAGONAL: tl.constexpr, PAIRED: tl.constexpr, HAS_POSITIVES: tl.constexpr,
):  # fmt: skip
    """Merge all columns into the state of the rows of tile ti."""
    i = ti * OWN + tl.arange(0, OWN)
    largest, total, p_largest, p_total, p_sum, p_count = begin_state(
        state, i, i < rows.size, HAS_POSITIVES
    )
    for first in tl.range(0, cols.size, OTHERS):
        j = first + tl.arange(0, OTHERS)
        s, negative, positive = load_logits(
            scores, scale, rows, cols, i, j, diagonal_offset, DIAGONAL, PAIRED
        )
        largest, total = running_sum(largest, total, s * LOG2E, negative)
        if HAS_POSITIVES:
            p_largest, p_total = running_sum(p_largest, p_total, s * LOG2E, positive)
            p_sum += tl.sum(tl.where(positive, s, 0.0), 1)
            p_count += tl.sum(positive.to(tl.float32), 1)
    end_state(
        state, i, i < rows.size, largest, total, p_largest, p_total, p_sum, p_count, HAS_POSITIVES
    )


@kernel
def score_gradients(
    scores, weight, stride, scale, row_ids, col_ids, ceiling,
    row_upstream, row_stride, col_upstream, col_stride, ds, transposed, m, n, diagonal_offset,
    DIAGONAL: tl.constexpr, PAIRED: tl.constexpr, HAS_POSITIVES: tl.constexpr,
):  # fmt: skip
    """ds = dS of the block, times the rows' weights; its transpose too. `scores` may be `ds`."""
    rows = BlockSide(None, None, 0, m, row_ids, None, 0, ceiling)
    cols = BlockSide(None, None, 0, n, col_ids, None, 0, None)
    tiles = tl.cdiv(n, COLS)
    i = tl.program_id(0) // tiles * ROWS + tl.arange(0, ROWS)
    j = tl.program_id(0) % tiles * COLS + tl.arange(0, COLS)
    s, negative, positive = load_logits(
        Scores(scores, weight, None, stride, 1), scale, rows, cols, i, j,
        diagonal_offset, DIAGONAL, PAIRED,
    )  # fmt: skip
    gradient = tl.zeros((ROWS, COLS), tl.float32)
    if row_upstream is not None:
        gradient += _of_side(
            row_upstream, row_stride, i, i < m, s, negative, positive, 1, HAS_POSITIVES
        )
    if col_upstream is not None:
        gradient += _of_side(
            col_upstream, col_stride, j, j < n, s, negative, positive, 0, HAS_POSITIVES
        )
    if weight is not None:
        gradient *= tl.load(weight + i, mask=i < m, other=0.0)[:, None]
    inside = (i < m)[:, None] & (j < n)[None, :]
    tl.store(ds + i.to(tl.int64)[:, None] * n + j[None, :], gradient, mask=inside)
    if transposed is not None:
        at = transposed + j.to(tl.int64)[:, None] * m + i[None, :]
        tl.store(at, tl.trans(gradient), mask=(j < n)[:, None] & (i < m)[None, :])


@triton.jit
def _of_side(
    upstream, stride, i, inside, s, negative, positive, axis: tl.constexpr,
    HAS_POSITIVES: tl.constexpr,
):  # fmt: skip
    """The gradients of logits for the results of one side; `axis`: along which its numbers vary."""
    gradient = _exponentials(upstream, stride, 0, i, inside, s, negative, axis)
    if HAS_POSITIVES:
        own = tl.load(upstream + 4 * stride + i, mask=inside, other=0.0)
        own = tl.expand_dims(own, axis) + tl.zeros_like(s)
        gradient += _exponentials(upstream, stride, 2, i, inside, s, positive, axis)
        gradient += tl.where(positive, own, 0.0)
    return gradient


@triton.jit
def _exponentials(upstream, stride, k, i, inside, s, mask, axis: tl.constexpr):
    """Upstream gradients times e^(s - log-sum-exp), numbers k and k + 1 of an upstream."""
    lse = tl.load(upstream + k * stride + i, mask=inside, other=float("inf"))
    factor = tl.load(upstream + (k + 1) * stride + i, mask=inside, other=0.0)
    e = tl.exp2((s - tl.expand_dims(lse, axis)) * LOG2E) * tl.expand_dims(factor, axis)
    return tl.where(mask, e, 0.0)
