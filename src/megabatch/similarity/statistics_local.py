"""Log-sum-exps of a matrix on one process: the operators behind `statistics`.

Registered with torch, so that torch.compile takes each as one node. y=None means "x itself". They
return a stack of what the public functions hand out: one row (negative), or the four of `Split`.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megabatch.similarity import sweep
from megabatch.similarity.arguments import accumulator_dtype
from megabatch.similarity.pairs import PAIRED, Pairs

if TYPE_CHECKING:
    from megabatch.similarity.fused.blocks import FusedBlocks


def kinds_of(diagonal: str, row_ids: Tensor | None) -> int:
    """1 where all pairs are negatives, 2 where some may be positive."""
    return 2 if row_ids is not None or diagonal == PAIRED else 1


@torch.library.custom_op("megabatch::statistics", mutates_args=())
def statistics(
    x: Tensor,
    y: Tensor | None,
    scale: Tensor,
    row_ids: Tensor | None,
    column_ids: Tensor | None,
    ceiling: Tensor | None,
    diagonal: str,
    columns: bool,
    keep: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Forward sweep; see `split_logsumexp`. Without `columns` the second result is empty.

    The third is what `keep` leaves for the backward pass: see `sweep.blocks`.
    """
    pairs = Pairs(diagonal, row_ids, column_ids, ceiling)
    kinds = kinds_of(diagonal, row_ids)
    with torch.cuda.device_of(x):
        kept = _kept(x, y, keep)
        blocks = sweep.blocks(x, x if y is None else y, pairs, y is None, kept)
        row_state = sweep.empty_state(x.shape[0], kinds, x)
        size = (x if y is None else y).shape[0]
        column_state = sweep.empty_state(size, kinds, x) if columns else None
        blocks.forward(scale, row_state, column_state)
        finished = finish(row_state, blocks.unit)
        if column_state is None:
            return finished, finished.new_empty(0), kept
        return finished, finish(column_state, blocks.unit), kept


def _kept(x: Tensor, y: Tensor | None, keep: bool) -> Tensor:
    size = sweep.kept_size(x, x if y is None else y) if keep else 0
    return x.new_empty(size, dtype=accumulator_dtype(x.dtype))


@statistics.register_fake
def _(
    x: Tensor,
    y: Tensor | None,
    scale: Tensor,
    row_ids: Tensor | None,
    column_ids: Tensor | None,
    ceiling: Tensor | None,
    diagonal: str,
    columns: bool,
    keep: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    dtype, parts = accumulator_dtype(x.dtype), 1 if kinds_of(diagonal, row_ids) == 1 else 4
    rows = x.new_empty((parts, x.shape[0]), dtype=dtype)
    kept = _kept(x, y, keep)
    if not columns:
        return rows, x.new_empty(0, dtype=dtype), kept
    return rows, x.new_empty((parts, (x if y is None else y).shape[0]), dtype=dtype), kept


def finish(state: Tensor, unit: float) -> Tensor:
    """(reference, sum relative to it) -> log-sum-exp."""
    kinds = 1 if state.shape[0] == 2 else 2
    out = state.new_empty(1 if kinds == 1 else 4, state.shape[1])
    # Few launches: on a GPU a small batch's time is theirs.
    references, sums = state[0 : 2 * kinds : 2], state[1 : 2 * kinds : 2]
    torch.add(sums.log(), references, alpha=unit, out=out[:kinds])
    if kinds == 2:
        out[2:] = state[4:]
    return out


@torch.library.custom_op("megabatch::statistics_backward", mutates_args=())
def statistics_backward(
    x: Tensor,
    y: Tensor | None,
    scale: Tensor,
    row_ids: Tensor | None,
    column_ids: Tensor | None,
    ceiling: Tensor | None,
    diagonal: str,
    rows: Tensor,
    columns: Tensor,
    kept: Tensor,
    row_gradient: Tensor | None,
    column_gradient: Tensor | None,
    need_x: bool,
    need_y: bool,
    need_scale: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Backward sweep: gradients of x, y and scale; empty where not needed."""
    pairs = Pairs(diagonal, row_ids, column_ids, ceiling)
    pulls = pull_of(rows, row_gradient), pull_of(columns, column_gradient)
    with torch.cuda.device_of(x):
        blocks = sweep.blocks(x, x if y is None else y, pairs, y is None, kept)
        size = blocks.prepare(*pulls)
        if y is None:
            dx, dscale = _symmetric_gradients(x, blocks, scale, size, pulls[0], need_x)
            dy = x.new_empty(0)
        else:
            dx, dy, dscale = _gradients(
                x, y, blocks, scale, size, pulls, need_x, need_y, need_scale
            )
    return dx, dy, dscale if size is None else dscale * size


def _gradients(
    x: Tensor,
    y: Tensor,
    blocks: sweep.Blocks | FusedBlocks,
    scale: Tensor,
    size: Tensor | None,
    pulls: tuple[Tensor | None, Tensor | None],
    need_x: bool,
    need_y: bool,
    need_scale: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    factor = scale if size is None else scale * size
    dx, dy = (
        torch.empty_like(t) if need else t.new_empty(0) for t, need in ((x, need_x), (y, need_y))
    )
    dscale = torch.zeros_like(scale)
    # The scale's gradient comes with dx, or with dy where x is frozen.
    with_x = need_x or not need_y
    columns = blocks.accumulator(len(y)) if need_y else None
    # Rows strip by strip: dx then needs no accumulator of its own in the wider type.
    for i in sweep.strips(len(x), blocks.rows):
        total = blocks.accumulator(i.stop - i.start) if with_x else None
        blocks.backward(i, scale, *pulls, total, columns)
        if total is not None:
            out = dx[i] if need_x else None
            inner = blocks.finish(total, "x", i, factor, need_scale, out)
            dscale = dscale if inner is None else dscale + inner
    if columns is not None:
        inner = blocks.finish(columns, "y", slice(0, len(y)), factor, need_scale and not with_x, dy)
        dscale = dscale if inner is None else dscale + inner
    return dx, dy, dscale


def _symmetric_gradients(
    x: Tensor,
    blocks: sweep.Blocks | FusedBlocks,
    scale: Tensor,
    size: Tensor | None,
    pull: Tensor | None,
    need_x: bool,
) -> tuple[Tensor, Tensor]:
    """x against itself: dS + dS.T is symmetric, so the blocks above the diagonal suffice."""
    dx = torch.empty_like(x) if need_x else x.new_empty(0)
    total = blocks.accumulator(len(x))
    for i in sweep.strips(len(x), blocks.rows):
        blocks.backward(i, scale, pull, pull, total[i], total)
    factor = scale if size is None else scale * size
    inner = blocks.finish(total, "x", slice(0, len(x)), factor, True, dx if need_x else None)
    assert inner is not None
    return dx, inner / 2  # each pair was met as (i, j) and as (j, i)


@statistics_backward.register_fake
def _(
    x: Tensor,
    y: Tensor | None,
    scale: Tensor,
    row_ids: Tensor | None,
    column_ids: Tensor | None,
    ceiling: Tensor | None,
    diagonal: str,
    rows: Tensor,
    columns: Tensor,
    kept: Tensor,
    row_gradient: Tensor | None,
    column_gradient: Tensor | None,
    need_x: bool,
    need_y: bool,
    need_scale: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    dx = torch.empty_like(x) if need_x else x.new_empty(0)
    dy = torch.empty_like(y) if need_y and y is not None else x.new_empty(0)
    return dx, dy, torch.empty_like(scale)


def pull_of(values: Tensor, gradient: Tensor | None) -> Tensor | None:
    """What the backward tiles need of one side: see `tile_torch`."""
    if gradient is None:
        return None
    kinds = 1 if values.shape[0] == 1 else 2
    pull = values.new_empty(2 if kinds == 1 else 5, values.shape[1])
    # A side without any pair is -inf; a reference of +inf makes its exponentials 0, not NaN.
    empty = values[:kinds] == -math.inf
    pull[0 : 2 * kinds : 2] = values[:kinds].masked_fill(empty, math.inf)
    pull[1 : 2 * kinds : 2] = gradient[:kinds].masked_fill(empty, 0)
    if kinds == 2:
        pull[4] = gradient[2]
    return pull


def _setup_context(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    x, y, scale, row_ids, column_ids, ceiling, diagonal, *_ = inputs
    ctx.save_for_backward(x, y, scale, row_ids, column_ids, ceiling, *output)
    ctx.diagonal = diagonal
    ctx.set_materialize_grads(False)


def _autograd(ctx, row_gradient, column_gradient, _):  # type: ignore[no-untyped-def]
    x, y, scale, row_ids, column_ids, ceiling, rows, columns, kept = ctx.saved_tensors
    nothing = (None,) * 9
    if row_gradient is None and column_gradient is None:
        return nothing
    need_x, need_y, need_scale = ctx.needs_input_grad[:3]
    dx, dy, dscale = torch.ops.megabatch.statistics_backward(
        x,
        y,
        scale,
        row_ids,
        column_ids,
        ceiling,
        ctx.diagonal,
        rows,
        columns,
        kept,
        row_gradient,
        column_gradient if columns.numel() else None,
        need_x,
        need_y,
        need_scale,
    )
    return (dx if need_x else None, dy if need_y else None, dscale if need_scale else None) + (
        None,
    ) * 6


statistics.register_autograd(_autograd, setup_context=_setup_context)
