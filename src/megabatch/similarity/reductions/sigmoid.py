"""The sigmoid loss's sum over all pairs, with its gradients, from one sweep.

The loss is SigLIP's (Zhai et al. 2023, arXiv 2303.15343). A pair's gradient needs no statistic of
its row or column, so the sweep that sums the loss computes the gradients too: 6 m n d operations
for both, where a second sweep would make it 8. The gradients of x and y are stored for the backward
pass (`DeferredGrad`). Labels may be soft, the sigmoids of a teacher's logits; torch operations
compute these on all devices.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from megabatch.similarity import backends, engine, masks
from megabatch.similarity.arguments import accumulator_dtype
from megabatch.similarity.backends.eager import STRIP
from megabatch.similarity.distributed import comm, ranks
from megabatch.similarity.distributed.ranks import Ranks
from megabatch.similarity.distributed.schedule import Chunk, Gathered, Schedule, Shard
from megabatch.similarity.masks import Pairs
from megabatch.similarity.memory import Run
from megabatch.similarity.ops import Body, reduction_operators
from megabatch.similarity.reductions.base import handshake, kind_of, sort_by_id
from megabatch.similarity.reductions.operands import DeferredGrad, Need, SigmoidParams, Teacher
from megabatch.similarity.reductions.sigmoid_tiles import SigmoidTiles, SoftLabelTiles
from megabatch.similarity.settings import AppliedSettings
from megabatch.similarity.slices import strips

if TYPE_CHECKING:
    from megabatch.similarity.backends.triton.sigmoid_tiles import SigmoidKernelTiles

Tiles: TypeAlias = "SigmoidTiles | SigmoidKernelTiles"


def _times(deferred: DeferredGrad, like: Tensor, factor: Tensor, divisor: int) -> Tensor:
    """The gradient times two factors, in the dtype of `like`; empty if it is not needed."""
    out = torch.empty_like(deferred.values, dtype=like.dtype)
    if len(out) and backends.uses_kernels(like):
        from megabatch.similarity.backends.triton.sigmoid_tiles import write_deferred

        write_deferred(deferred, out, factor, divisor)
        return out
    # Two dimensions, so that the product is formed in the factor's dtype and rounded once.
    factors = (factor * divisor).reshape(1, 1)
    for i in strips(len(out), STRIP):
        by_row = deferred.row_scale[i, None] * factors if len(deferred.row_scale) else factors
        torch.mul(deferred.values[i], by_row, out=out[i])
    return out


def divisor(x: Tensor) -> int:
    """The factor by which the sum is divided before its gradients are stored."""
    return max(1, len(x)) if x.element_size() == 2 else 1


# --- the operators --------------------------------------------------------------------------------


def _forward(
    x: Tensor,
    y: Tensor,
    scale: Tensor,
    bias: Tensor,
    row_ids: Tensor | None,
    col_ids: Tensor | None,
    weight: Tensor | None,
    teacher_x: Tensor | None,
    teacher_y: Tensor | None,
    teacher_scale: Tensor | None,
    teacher_bias: Tensor | None,
    diagonal: str,
    need_x: bool,
    need_y: bool,
    need_scale: bool,
    need_bias: bool,
    group: str,
    settings: Sequence[int],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The sum; its gradients of x and y as `DeferredGrad`, empty if not needed; of scale and bias.

    In a group the sum is over this rank's rows and all columns, scale's and bias's gradients are of
    that sum, and y's is of the sum over ranks.
    """
    need = Need(need_x, need_y, need_scale, need_bias)
    pairs = Pairs(diagonal, row_ids, col_ids)
    teacher = None
    if teacher_x is not None and teacher_y is not None and teacher_scale is not None:
        teacher = Teacher(teacher_x, teacher_y, teacher_scale, teacher_bias)
    with AppliedSettings(settings, x), torch.cuda.device_of(x):
        terms = _terms(x, y, pairs, weight, teacher_x, need) if group else ""
        schedule, _ = handshake(group, "softplus_sum", terms, len(x), len(y), x)
        matrix = sort_by_id(x, y, pairs)
        own_weight = weight if weight is None else masks.sort(weight, matrix.row_order, 0)
        params = SigmoidParams(scale, bias, own_weight, _weight_divisor(x, weight, schedule))
        sweep = _sweep(matrix, params, teacher, need, schedule)
        dx, dy = DeferredGrad.like(x, need_x), DeferredGrad.like(y, need_y)
        sums = _sum_and_gradients(sweep, matrix, need, dx, dy)
        dtype = accumulator_dtype(x.dtype)
        # Copies: the results of an operator may not share memory.
        loss, dbias, dscale = (number.to(dtype, copy=True) for number in sums)
        return loss, *dx, *dy, dscale, dbias


def _sum_and_gradients(
    sweep: engine.Sweep[Tiles],
    matrix: masks.SortedMatrix,
    need: Need,
    dx: DeferredGrad,
    dy: DeferredGrad,
) -> tuple[Tensor, Tensor, Tensor]:
    """The sum and its gradients of bias and scale; those of x and y go to `dx` and `dy`."""
    own, rows = sweep.own, sweep.schedule.rows
    factor = own.factor(divisor(matrix.x))
    sums: list[Tensor] = []  # of the rows of each rank that shares them, (ranks, 3)
    scale_parts: list[Tensor] = []

    def write(side: str, part: slice, total: Tensor) -> None:
        out, order = (dx, matrix.row_order) if side == "x" else (dy, matrix.col_order)
        given = part if order is None else order[part]
        with_scale = need.scale and need.x == (side == "x")
        found = own.defer_grad(total, side, part, factor, out, given, with_scale)
        scale_parts.extend([] if found is None else [found])

    engine.accumulate_gradients(
        sweep, write, need.x, need.y, after=lambda tiles: sums.append(tiles.sums())
    )
    ranks = len(rows.bounds(own.m)) - 1
    parts = sums[0] if len(sums) == 1 else sum(sums, own.sums().new_zeros(ranks, 3))
    loss, dbias, dscale = rows.sum_by_rank(parts)
    if scale_parts:  # one launch less if there is one part
        dscale = scale_parts[0] if len(scale_parts) == 1 else torch.stack(scale_parts).sum()
    return loss, dbias, dscale


def _forward_fake(x: Tensor, y: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    need_x, need_y = rest[10:12]
    dtype = accumulator_dtype(x.dtype)
    total, dscale, dbias = (x.new_empty((), dtype=dtype) for _ in range(3))
    deferred = *DeferredGrad.like(x, need_x), *DeferredGrad.like(y, need_y)
    return total, *deferred, dscale, dbias


def _backward(
    x: Tensor,
    y: Tensor,
    scale: Tensor,
    bias: Tensor,
    row_ids: Tensor | None,
    col_ids: Tensor | None,
    weight: Tensor | None,
    teacher_x: Tensor | None,
    teacher_y: Tensor | None,
    teacher_scale: Tensor | None,
    teacher_bias: Tensor | None,
    loss: Tensor,
    dx: Tensor,
    x_row_scale: Tensor,
    dy: Tensor,
    y_row_scale: Tensor,
    dscale: Tensor,
    dbias: Tensor,
    gradient: Tensor | None,
    need_x: bool,
    need_y: bool,
    need_scale: bool,
    need_bias: bool,
    diagonal: str,
    needed_x: bool,
    needed_y: bool,
    needed_scale: bool,
    needed_bias: bool,
    group: str,
    settings: Sequence[int],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The deferred gradients times the upstream one, those of x and y in their dtypes.

    It is an operator without a derivative that takes all inputs, so that a second derivative is an
    error and not silently incomplete.
    """
    if gradient is None:
        gradient = torch.zeros_like(loss)
    # The other ranks' part of y's gradient was formed as if they had the same upstream gradient.
    common = _same_on_all_ranks(gradient, group) if group and need_y else gradient
    times = divisor(x)
    with torch.cuda.device_of(x):
        return (
            _times(DeferredGrad(dx, x_row_scale), x, gradient, times),
            _times(DeferredGrad(dy, y_row_scale), y, common, times),
            dscale * gradient,
            dbias * gradient,
        )


def _backward_fake(*arguments: Any) -> tuple[Tensor, ...]:
    return tuple(torch.empty_like(arguments[k]) for k in (12, 14, 16, 17))


def _forward_bytes(run: Run, x: Tensor, y: Tensor, *rest: Any) -> int:
    """Accumulators of all columns and a strip of rows; over ranks of all rows."""
    teacher = rest[5]
    block, rows = run.block(x, y) if teacher is None else run.eager_block(x, y)
    totals = len(y) + min(rows, len(x)) if run.ranks == 1 else run.rows(x, y)
    received = run.transfer_bytes(x, y)
    if teacher is not None:
        received += run.transfer_bytes(teacher, teacher)
    return block + run.totals(x, totals) + received


softplus_sums, softplus_sums_backward = reduction_operators(
    "softplus_sum",
    Body(_forward, _forward_fake, _forward_bytes),
    Body(_backward, _backward_fake),
    tensors=11,
    differentiable=(4, 1),
)


def _same_on_all_ranks(value: Tensor, group: str) -> Tensor:
    """The value, or NaN if another rank's differs; the host reads nothing from the device."""
    extremes = torch.stack([value, -value])
    comm.all_reduce(extremes, group, "softplus_sum, backward", dist.ReduceOp.MAX)
    return value.masked_fill(extremes.sum() != 0, math.nan)


# --- around the sweep -----------------------------------------------------------------------------


def _terms(
    x: Tensor,
    y: Tensor,
    pairs: Pairs,
    weight: Tensor | None,
    teacher: Tensor | None,
    need: Need,
) -> str:
    """Description of the call, on which all ranks must agree."""
    wanted = ", ".join(name for name, wanted in need._asdict().items() if wanted)
    return (
        f"width {x.shape[1]}, {str(x.dtype).removeprefix('torch.')}, "
        f"{x.device.type}, gradients wanted: {wanted or 'none'}, "
        f"ids: {'given' if pairs.row_ids is not None else pairs.diagonal}, "
        f"weight: {'none' if weight is None else 'given'}, "
        f"teacher: {kind_of(teacher)}, "
        f"{backends.arithmetic(x)}, {ranks.plan(y)}"
    )


def _weight_divisor(x: Tensor, weight: Tensor | None, schedule: Schedule) -> Tensor | None:
    """The largest weight of all ranks, if dS is in float16 and needs weights of at most 1."""
    if weight is None or x.dtype != torch.float16:
        return None
    largest = weight.abs().amax() if len(weight) else weight.new_zeros(())
    divisor = largest.masked_fill(largest == 0, 1)
    if isinstance(schedule, Ranks):  # their gradients of y are summed
        comm.all_reduce(divisor, schedule.name, schedule.operation, dist.ReduceOp.MAX)
    return divisor


def _sweep(
    matrix: masks.SortedMatrix,
    params: SigmoidParams,
    teacher: Teacher | None,
    need: Need,
    schedule: Schedule,
) -> engine.Sweep[Tiles]:
    pairs = matrix.pairs
    if not schedule.alone:
        # Each rank sorts its own shard, so that its pairs (i, i) stay on the diagonal.
        start = schedule.starts[schedule.rank]
        pairs = replace(pairs, row_start=start, col_start=start)
    own = _tiles(matrix.x, matrix.y, pairs, params, teacher, need, (0, len(matrix.x)))
    bounds = schedule.rows.bounds(own.m)

    def make_tiles(rows: Gathered, chunk: Chunk) -> Tiles:
        x, row_ids, weight, teacher_x, *_ = rows
        y, col_ids, teacher_y, *_ = chunk.tensors
        assert x is not None
        assert y is not None
        places = schedule.rows.start, chunk.start
        block = Pairs(pairs.diagonal, row_ids, col_ids, None, None, *places)
        block_teacher = None
        if teacher is not None and teacher_x is not None and teacher_y is not None:
            block_teacher = teacher._replace(x=teacher_x, y=teacher_y)
        block_params = params._replace(weight=weight)
        return _tiles(x, y, block, block_params, block_teacher, need, bounds)

    teacher_rows, teacher_cols = (None, None) if teacher is None else teacher[:2]
    rows = [Shard(own.x), Shard(pairs.row_ids), Shard(params.weight), Shard(teacher_rows)]
    cols = [Shard(own.y), Shard(pairs.col_ids), Shard(teacher_cols)]
    return engine.Sweep(schedule, own, (rows, cols), make_tiles)


def _tiles(
    x: Tensor,
    y: Tensor,
    pairs: Pairs,
    params: SigmoidParams,
    teacher: Teacher | None,
    need: Need,
    bounds: Sequence[int],
) -> Tiles:
    """The blocks of x (m, d) against y (n, d); see `SigmoidTiles`."""
    if teacher is not None:
        return SoftLabelTiles(x, y, pairs, params, need, bounds, teacher)
    if not backends.uses_kernels(x):
        return SigmoidTiles(x, y, pairs, params, need, bounds)
    from megabatch.similarity.backends.triton.sigmoid_tiles import SigmoidKernelTiles

    return SigmoidKernelTiles(x, y, pairs, params, need, bounds)
