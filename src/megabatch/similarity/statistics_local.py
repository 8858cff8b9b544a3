"""Log-sum-exps of a matrix on one process: the operators behind `statistics`.

Registered with torch, so that torch.compile takes each as one node. y=None means "x itself". They
return a stack of what the public functions hand out: one row (negative), or the four of `Split`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor

from megabatch.similarity import id_order, sweep
from megabatch.similarity.arguments import accumulator_dtype
from megabatch.similarity.id_order import IdOrder
from megabatch.similarity.ops import operator, ops
from megabatch.similarity.pairs import Pairs
from megabatch.similarity.settings import Holding, Settings
from megabatch.similarity.states import kinds_of

if TYPE_CHECKING:
    from megabatch.similarity.backends.triton.blocks import FusedBlocks

Blocks: TypeAlias = "sweep.Blocks | FusedBlocks"
Pull: TypeAlias = Any  # of one side: whatever these blocks make of it


@operator("statistics")
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
    settings: Sequence[int],
) -> tuple[Tensor, Tensor, Tensor]:
    """Forward sweep; see `split_logsumexp`. Without `columns` the second result is empty.

    The third is what `keep` leaves for the backward pass: see `sweep.blocks`. `settings`: those of
    the call, see `settings.Settings`.
    """
    pairs = Pairs(diagonal, row_ids, column_ids, ceiling)
    kinds = kinds_of(diagonal, row_ids)
    with Holding(settings, x), torch.cuda.device_of(x):
        kept = _kept(x, y, keep, settings)
        matrix = sweep.ordered(x, y, pairs)
        blocks = sweep.blocks(matrix.x, matrix.y, matrix.pairs, y is None, kept)
        near, far = blocks.values(scale, kinds, columns)
        near = id_order.restore(near, matrix.rows, 1)
        if far is None:
            return near, near.new_empty(0), kept
        return near, id_order.restore(far, matrix.columns, 1), kept


def _kept(x: Tensor, y: Tensor | None, keep: bool, settings: Sequence[int]) -> Tensor:
    limit = Settings(*settings).workspace
    size = sweep.kept_size(x, x if y is None else y, limit) if keep else 0
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
    settings: Sequence[int],
) -> tuple[Tensor, Tensor, Tensor]:
    dtype, parts = accumulator_dtype(x.dtype), 1 if kinds_of(diagonal, row_ids) == 1 else 4
    rows = x.new_empty((parts, x.shape[0]), dtype=dtype)
    kept = _kept(x, y, keep, settings)
    if not columns:
        return rows, x.new_empty(0, dtype=dtype), kept
    return rows, x.new_empty((parts, (x if y is None else y).shape[0]), dtype=dtype), kept


@operator("statistics_backward")
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
    settings: Sequence[int],
) -> tuple[Tensor, Tensor, Tensor]:
    """Backward sweep: gradients of x, y and scale; empty where not needed."""
    pairs = Pairs(diagonal, row_ids, column_ids, ceiling)
    with Holding(settings, x), torch.cuda.device_of(x):
        matrix = sweep.ordered(x, y, pairs)
        blocks = sweep.blocks(matrix.x, matrix.y, matrix.pairs, y is None, kept)
        near = _pull(blocks, rows, row_gradient, matrix.rows)
        far = near if y is None else _pull(blocks, columns, column_gradient, matrix.columns)
        size = blocks.prepare(near, None if y is None else far)
        factor = scale if size is None else scale * size
        if y is None:
            dx, dscale = _symmetric_gradients(blocks, scale, factor, near, matrix.x, need_x)
            dy = x.new_empty(0)
        else:
            needed = need_x, need_y, need_scale
            dx, dy, dscale = _gradients(blocks, scale, factor, (near, far), matrix, needed)
    dx = id_order.restore(dx, matrix.rows if need_x else None, 0)
    dy = id_order.restore(dy, matrix.columns if need_y and y is not None else None, 0)
    return dx, dy, dscale if size is None else dscale * size


def _pull(
    blocks: Blocks, values: Tensor, gradient: Tensor | None, order: Tensor | None
) -> Pull | None:
    if gradient is None:
        return None
    return blocks.pull(id_order.sort(values, order, 1), id_order.sort(gradient, order, 1))


def _gradients(
    blocks: Blocks,
    scale: Tensor,
    factor: Tensor,
    pulls: tuple[Pull | None, Pull | None],
    matrix: IdOrder,
    needed: tuple[bool, bool, bool],
) -> tuple[Tensor, Tensor, Tensor]:
    (x, y), (need_x, need_y, need_scale) = matrix[:2], needed
    dx, dy = (
        torch.empty_like(t) if need else t.new_empty(0) for t, need in ((x, need_x), (y, need_y))
    )
    parts: list[Tensor] = []  # of the scale's gradient
    # The scale's gradient comes with dx, or with dy where x is frozen.
    with_x = need_x or not need_y
    columns = blocks.buffer(len(y)) if need_y else None
    # Rows strip by strip: dx then needs no accumulator of its own in the wider type.
    for i in blocks.strips():
        total = blocks.buffer(i.stop - i.start) if with_x else None
        blocks.backward(i, scale, *pulls, total, columns, (True, i.start == 0))
        if total is not None:
            out = dx[i] if need_x else None
            inner = blocks.finish(total, "x", i, factor, need_scale, out)
            parts += [] if inner is None else [inner]
        del total  # before the next strip's is made
    if columns is not None:
        inner = blocks.finish(columns, "y", slice(0, len(y)), factor, need_scale and not with_x, dy)
        parts += [] if inner is None else [inner]
    # One launch less where there is one strip.
    return dx, dy, parts[0] if len(parts) == 1 else sum(parts, torch.zeros_like(scale))


def _symmetric_gradients(
    blocks: Blocks, scale: Tensor, factor: Tensor, pull: Pull | None, x: Tensor, need_x: bool
) -> tuple[Tensor, Tensor]:
    """x against itself: dS + dS.T is symmetric, so the blocks above the diagonal suffice."""
    dx = torch.empty_like(x) if need_x else x.new_empty(0)
    total = blocks.buffer(len(x))
    for i in blocks.strips():
        first = i.start == 0
        blocks.backward(i, scale, pull, pull, total[i], total, (first, first))
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
    settings: Sequence[int],
) -> tuple[Tensor, Tensor, Tensor]:
    dx = torch.empty_like(x) if need_x else x.new_empty(0)
    dy = torch.empty_like(y) if need_y and y is not None else x.new_empty(0)
    return dx, dy, torch.empty_like(scale)


def _setup_context(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    x, y, scale, row_ids, column_ids, ceiling, diagonal, *_, settings = inputs
    ctx.save_for_backward(x, y, scale, row_ids, column_ids, ceiling, *output)
    ctx.diagonal, ctx.settings = diagonal, settings
    ctx.set_materialize_grads(False)


def _autograd(ctx, row_gradient, column_gradient, _):  # type: ignore[no-untyped-def]
    x, y, scale, row_ids, column_ids, ceiling, rows, columns, kept = ctx.saved_tensors
    nothing = (None,) * 10
    if row_gradient is None and column_gradient is None:
        return nothing
    need_x, need_y, need_scale = ctx.needs_input_grad[:3]
    dx, dy, dscale = ops.statistics_backward(
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
        ctx.settings,
    )
    return (dx if need_x else None, dy if need_y else None, dscale if need_scale else None) + (
        None,
    ) * 7


statistics.register_autograd(_autograd, setup_context=_setup_context)
