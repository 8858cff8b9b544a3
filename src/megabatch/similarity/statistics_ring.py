"""Log-sum-exps of a matrix whose rows and columns lie on several processes: the operators.

What `statistics_local` does on one process, with columns that come around the ring, or of all ranks
at once (`ring`); what a rank computes meanwhile is in `statistics_shards`. For each row of a piece
travel, per step forward: its features, its id where there are ids, and 8 bytes of column statistics
(24 where pairs can be positive; twice that for float64 features); backward: its features, id, what
its column pulls (8 or 20 bytes), and its gradient so far, 4 d bytes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megabatch.similarity import id_order, statistics_shards, sweep
from megabatch.similarity.distributed import comm, ring
from megabatch.similarity.distributed.ring import Ring
from megabatch.similarity.ops import operator, ops
from megabatch.similarity.settings import Holding, Settings
from megabatch.similarity.shards import Shards
from megabatch.similarity.states import kinds_of
from megabatch.similarity.statistics_local import statistics

# --- forward --------------------------------------------------------------------------------------


@operator("ring_statistics", alone=False)
def ring_statistics(
    x: Tensor,
    y: Tensor | None,
    scale: Tensor,
    row_ids: Tensor | None,
    column_ids: Tensor | None,
    ceiling: Tensor | None,
    diagonal: str,
    columns: bool,
    group: str,
    call: str,
    wanted: str,
    settings: Sequence[int],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """As `statistics`, over the ranks of a group; then how many rows and columns each rank has.

    That is (2, ranks), on the CPU. Last what the backward pass may start from: see `_kept_rows`.
    `call` is the public function's name and what else all ranks must do alike, `wanted` names the
    inputs that need gradients, `settings` are those of the call.
    """
    with Holding(settings, x), torch.cuda.device_of(x):
        terms = _terms(x, y, row_ids, ceiling, diagonal, columns, call, wanted)
        own = [x.shape[0], (x if y is None else y).shape[0]]
        sizes = torch.tensor(comm.agree(group, terms, own, x.device), device="cpu").T
        circle = Ring(group, sizes[1].tolist(), call.split(",", 1)[0])
        shards = Shards(x, y, (row_ids, column_ids), ceiling, diagonal, circle)
        near, far = statistics_shards.forward(shards, scale, kinds_of(diagonal, row_ids), columns)
    far = id_order.restore(far, shards.order.columns, 1) if columns else far
    kept = x.new_empty(0)
    if y is not None and (rows_kept := _kept_rows(y, circle.n, wanted, settings)):
        kept = y.new_empty(rows_kept, y.shape[1]) if circle.gathered is None else circle.gathered
    return id_order.restore(near, shards.order.rows, 1), far, sizes, kept


def _kept_rows(y: Tensor, ranks: int, wanted: str, settings: Sequence[int]) -> int:
    """How many gathered columns stay for the backward pass; known without the other ranks.

    So they may be there and hold nothing: where shards differ in size, which is not gathered.
    """
    whole_lines = y.shape[1] * y.element_size() % 16 == 0  # else what is gathered is wider
    kept = wanted and whole_lines and ring.keeps(y, ranks, Settings(*settings).gather)
    return ranks * y.shape[0] if kept else 0


def _terms(
    x: Tensor,
    y: Tensor | None,
    row_ids: Tensor | None,
    ceiling: Tensor | None,
    diagonal: str,
    columns: bool,
    call: str,
    wanted: str,
) -> str:
    """What all ranks must do alike, for `comm.agree`."""
    return (
        f"{call}, {'x against itself' if y is None else 'x against y'}, width {x.shape[1]}, "
        f"{str(x.dtype).removeprefix('torch.')}, {x.device.type}, "
        f"gradients wanted: {wanted or 'none'}, "
        f"sides: {'both' if columns or y is None else 'rows'}, "
        f"ids: {'given' if row_ids is not None else 'none'}, diagonal: {diagonal}, "
        f"ceiling: {'none' if ceiling is None else 'given'}, "
        f"{sweep.arithmetic(x)}, {ring.plan(x)}"
    )


@ring_statistics.register_fake
def _(
    x: Tensor,
    y: Tensor | None,
    scale: Tensor,
    row_ids: Tensor | None,
    column_ids: Tensor | None,
    ceiling: Tensor | None,
    diagonal: str,
    columns: bool,
    group: str,
    call: str,
    wanted: str,
    settings: Sequence[int],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    matrix = (x, y, scale, row_ids, column_ids, ceiling, diagonal, columns)
    *results, _ = statistics(*matrix, False, settings)
    ranks = comm.resolve(group).size()
    sizes = x.new_empty(2, ranks, dtype=torch.int64, device="cpu")
    kept = x.new_empty(0)
    if y is not None and (rows_kept := _kept_rows(y, ranks, wanted, settings)):
        kept = y.new_empty(rows_kept, y.shape[1])
    return results[0], results[1], sizes, kept


# --- backward -------------------------------------------------------------------------------------


@operator("ring_statistics_backward", alone=False)
def ring_statistics_backward(
    x: Tensor,
    y: Tensor | None,
    scale: Tensor,
    row_ids: Tensor | None,
    column_ids: Tensor | None,
    ceiling: Tensor | None,
    diagonal: str,
    rows: Tensor,
    columns: Tensor,
    sizes: Tensor,
    kept: Tensor,
    row_gradient: Tensor | None,
    column_gradient: Tensor | None,
    need_x: bool,
    need_y: bool,
    need_scale: bool,
    group: str,
    call: str,
    settings: Sequence[int],
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of x, y and scale, empty where not needed; scale's is the mean over ranks.

    As `parallel.replicated` makes it, without operators of its own.
    """
    circle = Ring(group, sizes[1].tolist(), f"{call.split(',', 1)[0]}, backward")
    if kept.numel() and len(set(circle.sizes)) == 1:
        circle.gathered = kept
    with Holding(settings, x), torch.cuda.device_of(x):
        shards = Shards(x, y, (row_ids, column_ids), ceiling, diagonal, circle)
        near = statistics_shards.pull_of(shards.own, rows, row_gradient, shards.order.rows)
        far = statistics_shards.pull_of(shards.own, columns, column_gradient, shards.order.columns)
        size = statistics_shards.common_size(shards, near, far)
        factor = scale if size is None else scale * size
        numbers = shards, scale, factor, near
        if y is None:
            dy = x.new_empty(0)
            dx, dscale = statistics_shards.mirrored_gradients(*numbers, need_x, need_scale)
        else:
            dx, dy, dscale = statistics_shards.gradients(*numbers, far, need_x, need_y, need_scale)
    dx = id_order.restore(dx, shards.order.rows if need_x else None, 0)
    dy = id_order.restore(dy, shards.order.columns if need_y and y is not None else None, 0)
    if size is not None:
        dscale = dscale * size
    if need_scale:
        dscale = comm.all_reduce(dscale, group, circle.operation) / circle.n
    return dx, dy, dscale


@ring_statistics_backward.register_fake
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
    sizes: Tensor,
    kept: Tensor,
    row_gradient: Tensor | None,
    column_gradient: Tensor | None,
    need_x: bool,
    need_y: bool,
    need_scale: bool,
    group: str,
    call: str,
    settings: Sequence[int],
) -> tuple[Tensor, Tensor, Tensor]:
    dx = torch.empty_like(x) if need_x else x.new_empty(0)
    dy = torch.empty_like(y) if need_y and y is not None else x.new_empty(0)
    return dx, dy, torch.empty_like(scale)


def _setup_context(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    x, y, scale, row_ids, column_ids, ceiling, ctx.diagonal, ctx.columns, *names = inputs
    ctx.group, ctx.call, _, ctx.settings = names
    ctx.save_for_backward(x, y, scale, row_ids, column_ids, ceiling, *output)
    ctx.set_materialize_grads(False)


def _autograd(ctx, row_gradient, column_gradient, *_):  # type: ignore[no-untyped-def]
    *inputs, rows, columns, sizes, kept = ctx.saved_tensors
    x, y, scale, row_ids, column_ids, ceiling = inputs
    # Other ranks count on this one's columns, whether or not its own loss used them.
    if ctx.columns and column_gradient is None:
        column_gradient = torch.zeros_like(columns)
    if y is None and row_gradient is None:
        row_gradient = torch.zeros_like(rows)
    need_x, need_y, need_scale = ctx.needs_input_grad[:3]
    dx, dy, dscale = ops.ring_statistics_backward(
        x,
        y,
        scale,
        row_ids,
        column_ids,
        ceiling,
        ctx.diagonal,
        rows,
        columns,
        sizes,
        kept,
        row_gradient,
        column_gradient if ctx.columns else None,
        need_x,
        need_y,
        need_scale,
        ctx.group,
        ctx.call,
        ctx.settings,
    )
    return (dx if need_x else None, dy if need_y else None, dscale if need_scale else None) + (
        None,
    ) * 9


ring_statistics.register_autograd(_autograd, setup_context=_setup_context)
