"""Log-sum-exps along both sides of a similarity matrix, from one sweep, differentiable.

The method is Inf-CL's (arXiv 2410.17243, section 3: tiles that are never stored) with one sweep
for both directions, and FlashAttention's running sums (arXiv 2205.14135).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from megabatch.similarity import sweep
from megabatch.similarity.arguments import (
    accumulator_dtype,
    cast_for_autocast,
    check_features,
    check_integers,
    check_same_rows,
    check_scalar,
    check_two,
    check_vector,
)
from megabatch.similarity.exchange import group_name
from megabatch.similarity.pairs import DROPPED, PAIRED, PLAIN, Pairs
from megabatch.similarity.parallel import replicated

if TYPE_CHECKING:
    from megabatch.similarity.fused.blocks import FusedBlocks

Ids: TypeAlias = "str | Tensor | tuple[Tensor, Tensor]"


class Split(NamedTuple):
    """One side of a similarity matrix, split by whether a pair's ids are equal; each (rows,)."""

    negative: Tensor  #: log-sum-exp over pairs of different ids; -inf where there is none
    positive: Tensor  #: log-sum-exp over pairs of equal ids; -inf where there is none
    positive_sum: Tensor  #: sum of the logits of the pairs of equal ids
    positive_count: Tensor  #: number of the pairs of equal ids; no gradient


def logsumexp(
    x: Tensor,
    y: Tensor,
    scale: float | Tensor = 1.0,
    *,
    sides: str = "both",
    group: object = None,
) -> tuple[Tensor, Tensor | None]:
    """Log-sum-exp of scale * x @ y.T along each axis, from one sweep that never stores it.

    Args:
        x: (m, d) features, any floating dtype. y: (n, d), same dtype and device.
        scale: a number, or a tensor of shape () or (1,); differentiable.
        sides: "both", or "rows" where the columns' side is not wanted and costs nothing.
        group: the processes that share the matrix, each with its own rows of x and of y: None for
            the default group where torch.distributed is initialised, a process group, or "local"
            for this process alone. `rows` and `columns` are those of this process's x and y.

    Returns:
        `(rows (m,), columns (n,))` in float32 (float64 for float64 features); columns is None
        with `sides="rows"`. A side without any pair is -inf and has zero gradient.

    Raises:
        TypeError, ValueError: the message names the argument, what came and what was expected, or
            what each process had where they disagree.
        CommunicationError: another process is gone or did not come in time.
    """
    check_two(x, y)
    both = _both(sides)
    x, y = cast_for_autocast(x, y)
    scale = check_scalar("scale", scale, x)
    matrix = (x, y, scale, None, None, None, PLAIN, both)
    rows, columns = _statistics(matrix, group, "logsumexp")
    return rows[0], columns[0] if both else None


def split_logsumexp(
    x: Tensor,
    y: Tensor | None = None,
    scale: float | Tensor = 1.0,
    *,
    ids: Ids = "paired",
    ceiling: Tensor | None = None,
    sides: str = "both",
    group: object = None,
) -> tuple[Split, Split | None]:
    """Log-sum-exps of scale * x @ y.T split by whether the ids of a pair are equal.

    Args:
        x: (m, d) features, any floating dtype.
        y: (n, d), same dtype and device; None: x against itself, each row's pair with itself
            left out everywhere, and half the work, as the matrix is symmetric.
        scale: a number, or a tensor of shape () or (1,); differentiable.
        ids: "paired" (row i belongs to column i), or `(row_ids (m,), column_ids (n,))` int64;
            with y=None one vector of ids serves both. A negative id equals nothing.
        ceiling: (m,) logits; pairs of different ids whose logit exceeds their row's ceiling are
            left out (margin-based false negatives). No gradient flows into it.
        sides: "both", or "rows" where the columns' side is not wanted and costs nothing.
        group: as in `logsumexp`. "paired" means row i and column i of the same process; ids are
            compared over all processes.

    Returns:
        `(rows, columns)`, a `Split` each, in float32 (float64 for float64 features); columns is
        None with `sides="rows"`. A part without any pair is -inf and has zero gradient.

    Raises:
        TypeError, ValueError, CommunicationError: as `logsumexp`.
    """
    both = _both(sides)
    if y is None:
        check_features("x", x)
        (x,) = cast_for_autocast(x)
    else:
        check_two(x, y)
        x, y = cast_for_autocast(x, y)
    row_ids, column_ids = _check_ids(ids, x, y)
    if row_ids is None and y is not None:
        check_same_rows(x, y)
    scale = check_scalar("scale", scale, x)
    if ceiling is not None:
        ceiling = check_vector("ceiling", ceiling, x.shape[0], x)
    diagonal = DROPPED if y is None else PAIRED if row_ids is None else PLAIN
    if y is None and (ceiling is not None or row_ids is not column_ids):
        y = x  # these make the matrix asymmetric: the general path, on all tiles
    columns_wanted = both and y is not None
    matrix = (x, y, scale, row_ids, column_ids, ceiling, diagonal, columns_wanted)
    rows, columns = _statistics(matrix, group, "split_logsumexp")
    first = _split(rows)
    if not both:
        return first, None
    return first, _split(columns) if columns_wanted else first


def _statistics(matrix: tuple[Any, ...], group: object, call: str) -> tuple[Tensor, Tensor]:
    """The operator of one process, or the one of `statistics_ring`."""
    name = group_name(group)
    if not name:
        return torch.ops.megabatch.statistics(*matrix)
    x, y, scale, *rest = matrix
    inputs = {"x": x, "y": y, "scale": scale}
    grad = torch.is_grad_enabled()
    wanted = [key for key, t in inputs.items() if grad and t is not None and t.requires_grad]
    around_the_ring = torch.ops.megabatch.ring_statistics
    group_arguments = (name, call, ", ".join(wanted))
    return around_the_ring(x, y, replicated(scale, group), *rest, *group_arguments)[:2]


def _both(sides: str) -> bool:
    if sides not in ("both", "rows"):
        raise ValueError(f"sides: expected 'both' or 'rows', got {sides!r}")
    return sides == "both"


def _check_ids(ids: Ids, x: Tensor, y: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    if isinstance(ids, str):
        if ids != "paired":
            raise ValueError(f"ids: expected 'paired' or int64 tensors, got {ids!r}")
        return None, None
    if isinstance(ids, Tensor):
        if y is not None:
            raise TypeError("ids: expected 'paired' or (row_ids, column_ids), got one tensor")
        both = check_integers("ids", ids, x.shape[0], x)
        return both, both
    if not isinstance(ids, (tuple, list)) or len(ids) != 2:
        came = f"{len(ids)} items" if isinstance(ids, (tuple, list)) else type(ids).__name__
        raise TypeError(f"ids: expected 'paired' or (row_ids, column_ids), got {came}")
    row_ids = check_integers("ids[0]", ids[0], x.shape[0], x)
    return row_ids, check_integers("ids[1]", ids[1], (x if y is None else y).shape[0], x)


def _split(values: Tensor) -> Split:
    if values.shape[0] == 4:
        negative, positive, positive_sum, positive_count = values.unbind()
        return Split(negative, positive, positive_sum, positive_count.detach())
    (negative,) = values.unbind()  # no pair can be positive
    nothing = torch.zeros_like(negative)
    return Split(negative, torch.full_like(negative, -math.inf), nothing, nothing)


# --- the operator ---------------------------------------------------------------------------------
#
# Registered with torch, so that torch.compile takes it as one node. y=None means "x itself". It
# returns a stack of what the public functions hand out: one row (negative), or the four of `Split`.


def _kinds(diagonal: str, row_ids: Tensor | None) -> int:
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
) -> tuple[Tensor, Tensor]:
    """Forward sweep; see `split_logsumexp`. Without `columns` the second result is empty."""
    pairs = Pairs(diagonal, row_ids, column_ids, ceiling)
    kinds = _kinds(diagonal, row_ids)
    with torch.cuda.device_of(x):
        blocks = sweep.blocks(x, x if y is None else y, pairs, symmetric=y is None)
        row_state = sweep.empty_state(x.shape[0], kinds, x)
        size = (x if y is None else y).shape[0]
        column_state = sweep.empty_state(size, kinds, x) if columns else None
        blocks.forward(scale, row_state, column_state)
        finished = _finish(row_state, blocks.unit)
        if column_state is None:
            return finished, finished.new_empty(0)
        return finished, _finish(column_state, blocks.unit)


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
) -> tuple[Tensor, Tensor]:
    dtype, parts = accumulator_dtype(x.dtype), 1 if _kinds(diagonal, row_ids) == 1 else 4
    rows = x.new_empty((parts, x.shape[0]), dtype=dtype)
    if not columns:
        return rows, x.new_empty(0, dtype=dtype)
    return rows, x.new_empty((parts, (x if y is None else y).shape[0]), dtype=dtype)


def _finish(state: Tensor, unit: float) -> Tensor:
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
    row_gradient: Tensor | None,
    column_gradient: Tensor | None,
    need_x: bool,
    need_y: bool,
    need_scale: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Backward sweep: gradients of x, y and scale; empty where not needed."""
    pairs = Pairs(diagonal, row_ids, column_ids, ceiling)
    pulls = _pull(rows, row_gradient), _pull(columns, column_gradient)
    with torch.cuda.device_of(x):
        blocks = sweep.blocks(x, x if y is None else y, pairs, symmetric=y is None)
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
    row_gradient: Tensor | None,
    column_gradient: Tensor | None,
    need_x: bool,
    need_y: bool,
    need_scale: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    dx = torch.empty_like(x) if need_x else x.new_empty(0)
    dy = torch.empty_like(y) if need_y and y is not None else x.new_empty(0)
    return dx, dy, torch.empty_like(scale)


def _pull(values: Tensor, gradient: Tensor | None) -> Tensor | None:
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
    x, y, scale, row_ids, column_ids, ceiling, diagonal, _ = inputs
    ctx.save_for_backward(x, y, scale, row_ids, column_ids, ceiling, *output)
    ctx.diagonal = diagonal
    ctx.set_materialize_grads(False)


def _autograd(ctx, row_gradient, column_gradient):  # type: ignore[no-untyped-def]
    x, y, scale, row_ids, column_ids, ceiling, rows, columns = ctx.saved_tensors
    nothing = (None,) * 8
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
        row_gradient,
        column_gradient if columns.numel() else None,
        need_x,
        need_y,
        need_scale,
    )
    return (dx if need_x else None, dy if need_y else None, dscale if need_scale else None) + (
        None,
    ) * 5


statistics.register_autograd(_autograd, setup_context=_setup_context)
