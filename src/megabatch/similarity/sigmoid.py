"""The sigmoid loss's sum over all pairs, with its gradients, from one sweep.

The loss is SigLIP's (Zhai et al. 2023, arXiv 2303.15343). A pair's gradient needs no statistic of
its row or column, so the sweep that sums the loss computes the gradients too: 6 m n d operations
for both, where a second sweep would make it 8. The gradients of x and y are stored for the backward
pass (`Deferred`). Labels may be soft, the sigmoids of a teacher's logits; torch operations
compute these on all devices.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from megabatch.similarity import backends, settings
from megabatch.similarity.arguments import (
    accumulator_dtype,
    cast_for_autocast,
    check_ids,
    check_same_rows,
    check_scalar,
    check_teacher,
    check_two,
    check_vector,
)
from megabatch.similarity.distributed import comm, schedule
from megabatch.similarity.distributed.comm import group_name
from megabatch.similarity.distributed.means import replicated
from megabatch.similarity.distributed.schedule import Ranks
from megabatch.similarity.eager_sigmoid import Deferred, Need, SigmoidCall, SigmoidTiles
from megabatch.similarity.matrix import PAIRED, PLAIN, Matrix, Orders, Side, sort_by_id, strips
from megabatch.similarity.ops import Reduction, new_gradient
from megabatch.similarity.settings import applied
from megabatch.similarity.sweep import Sweep, write_products
from megabatch.similarity.tiles import STRIP
from megabatch.torch_internals import transforms_active

Ids: TypeAlias = "str | tuple[Tensor, Tensor]"


def softplus_sum(
    x: Tensor,
    y: Tensor,
    scale: float | Tensor,
    bias: float | Tensor,
    *,
    ids: Ids = "paired",
    weight: Tensor | None = None,
    teacher: tuple[Tensor, Tensor, float | Tensor, float | Tensor] | None = None,
    group: object = None,
) -> Tensor:
    """Sum over all pairs (i, j) of weight_i * softplus(-z_ij * (scale * <x_i, y_j> + bias)).

    z_ij is +1 if the ids of a pair are equal and -1 otherwise. If gradients are needed, the forward
    pass computes the gradients of x and y in the same sweep and stores them for the backward pass,
    in the dtype of x, in as much memory as x and y take.

    Args:
        x: (m, d) features, any floating dtype. y: (n, d), same device and dtype; under autocast
            dtypes may differ if it casts both to one.
        scale, bias: numbers, or tensors of shape () or (1,); differentiable.
        ids: "paired" (row i belongs to column i), or `(row_ids (m,), column_ids (n,))`, integers. A
            negative id equals nothing.
        weight: (m,) factors, one for all pairs of a row of x, without a gradient.
        teacher: `(u (m, d'), v (n, d'), scale, bias)`, for soft labels T_ij = sigmoid(scale *
            <u_i, v_j> + bias) instead of `ids`: a pair's loss is T softplus(-logit) + (1 - T)
            softplus(logit). Dtypes as of a guide in `split_logsumexp`. Torch operations compute
            this, even on GPUs.
        group: the processes that share the matrix, each with its own rows of x and of y; as in
            `logsumexp`. The sum is over this process's rows and all columns, in a grid over the
            block that this process computes. The gradients are computed before the upstream
            gradient is known, so it must be the same on all processes; if it differs, they are
            NaN.

    Returns:
        A scalar in float32 (float64 for float64 features).

    Raises:
        TypeError, ValueError: the message names the argument, its value and what was expected, or
            what each process had where they disagree.
        CommunicationError: another process is gone, or did not make its call in time.
    """
    check_two(x, y)
    x, y = cast_for_autocast(x, y)
    row_ids, col_ids = check_ids(ids, x, y)
    labels: tuple[Tensor | None, ...] = (None,) * 4
    if teacher is not None:
        if row_ids is not None:
            raise ValueError("ids: expected 'paired' with a teacher's labels, got tensors")
        labels = check_teacher(teacher, x, y)
    elif row_ids is None:
        check_same_rows(x, y)
    scale, bias = check_scalar("scale", scale, x), check_scalar("bias", bias, x)
    if weight is not None:
        weight = check_vector("weight", weight, x.shape[0], x)
        if weight.requires_grad:
            raise ValueError("weight: expected a tensor that needs no gradient, got one that does")
    backends.warn_of_float32(x)
    need = Need(*(torch.is_grad_enabled() and t.requires_grad for t in (x, y, scale, bias)))
    if not torch.compiler.is_compiling() and transforms_active():
        need = Need(*(True,) * 4)  # torch.func.vmap hides what needs a gradient outside of it
    diagonal = PAIRED if row_ids is None and teacher is None else PLAIN
    name = group_name(group)
    if name:
        scale, bias = replicated(scale, group), replicated(bias, group)
    tensors = x, y, scale, bias, row_ids, col_ids, weight, *labels
    return softplus_sums(*tensors, diagonal, *need, name, settings.of_call(x))[0]


# --- the operators --------------------------------------------------------------------------------


class Operands(NamedTuple):
    """Operands of the operators."""

    x: Tensor
    y: Tensor
    scale: Tensor
    bias: Tensor
    row_ids: Tensor | None
    col_ids: Tensor | None
    weight: Tensor | None
    teacher_x: Tensor | None
    teacher_y: Tensor | None
    teacher_scale: Tensor | None
    teacher_bias: Tensor | None
    diagonal: str  #: of `Matrix`
    need_x: bool
    need_y: bool
    need_scale: bool
    need_bias: bool
    group: str
    settings: Sequence[int]

    @property
    def need(self) -> Need:
        """The gradients that the forward pass computes."""
        return Need(self.need_x, self.need_y, self.need_scale, self.need_bias)


class Results(NamedTuple):
    """The sum and its gradients; of x and y they are `Deferred`s, empty if not needed.

    In a group scale's and bias's gradients are of this rank's sum, y's (in a grid x's, too) is of
    the sum over ranks.
    """

    loss: Tensor
    dx: Tensor
    x_row_scale: Tensor
    dy: Tensor
    y_row_scale: Tensor
    dscale: Tensor
    dbias: Tensor


def _forward(*flat: Any) -> Results:
    o = Operands(*flat)
    with applied(o.settings, o.x), torch.cuda.device_of(o.x):
        terms, own_sizes = _terms(o) if o.group else "", (len(o.x), len(o.y))
        ranks, _ = schedule.agree(o.group, "softplus_sum", terms, own_sizes, o.x, False)
        sweep = _sweep(o, ranks)
        dx, dy = Deferred.like(o.x, o.need_x), Deferred.like(o.y, o.need_y)
        dx, dy = dx._replace(order=sweep.orders.rows), dy._replace(order=sweep.orders.cols)
        sums = _sum_and_gradients(sweep, o.need, dx, dy)
        dtype = accumulator_dtype(o.x.dtype)
        # Copies: the results of an operator may not share memory.
        loss, dbias, dscale = (number.to(dtype, copy=True) for number in sums)
        return Results(loss, *dx[:2], *dy[:2], dscale, dbias)


def _sum_and_gradients(
    sweep: Sweep, need: Need, dx: Deferred, dy: Deferred
) -> tuple[Tensor, Tensor, Tensor]:
    """The sum and its gradients of bias and scale; gradients of x and y go to `dx` and `dy`."""
    own = sweep.make(sweep.matrix)
    factor = own.factor(divisor(sweep.matrix.rows.features))
    out = dx if need.x else None, dy if need.y else None
    parts = write_products(sweep, own, factor, out, need.scale and need.features)
    loss, dbias, dscale = own.sums()
    if parts:  # one launch less if there is one part
        dscale = parts[0] if len(parts) == 1 else torch.stack(parts).sum()
    return loss, dbias, dscale


def _forward_fake(*flat: Any) -> Results:
    o = Operands(*flat)
    dtype = accumulator_dtype(o.x.dtype)
    total, dscale, dbias = (o.x.new_empty((), dtype=dtype) for _ in range(3))
    deferred = *Deferred.like(o.x, o.need_x)[:2], *Deferred.like(o.y, o.need_y)[:2]
    return Results(total, *deferred, dscale, dbias)


def _backward(*flat: Any) -> tuple[Tensor, ...]:
    """The deferred gradients times the upstream one.

    It is an operator without a derivative that takes all inputs, so that a second derivative is an
    error and not silently incomplete.
    """
    o, results, (gradient,), need = softplus_sums.split(flat)
    if gradient is None:
        gradient = torch.zeros_like(results.loss)
    if o.group:  # other ranks' parts were formed as if they had the same upstream gradient
        gradient = _same_on_all_ranks(gradient, o.group)
    dx, dy = new_gradient(o.x, need[0], o.x), new_gradient(o.y, need[1], o.x)
    with torch.cuda.device_of(o.x):
        for out, deferred in (
            (dx, Deferred(results.dx, results.x_row_scale)),
            (dy, Deferred(results.dy, results.y_row_scale)),
        ):
            if len(out):
                _write(out, deferred, gradient, divisor(o.x))
        dscale, dbias = (
            number * gradient if needed else o.x.new_empty(0)
            for number, needed in zip(results[-2:], need[2:], strict=True)
        )
        return dx, dy, dscale, dbias


def _write(out: Tensor, deferred: Deferred, factor: Tensor, divisor: int) -> None:
    """out = the gradient times two factors, in its dtype."""
    if backends.uses_kernels(out):
        from megabatch.similarity.triton.blocks import scale_rows

        row_scale = deferred.row_scale if len(deferred.row_scale) else None
        scale_rows(deferred.values, out, factor, out.shape[1], divisor, row_scale=row_scale)
        return
    # Two dimensions, so that the product is formed in the factor's dtype and rounded once.
    factors = (factor * divisor).reshape(1, 1)
    for i in strips(len(out), STRIP):
        by_row = deferred.row_scale[i, None] * factors if len(deferred.row_scale) else factors
        torch.mul(deferred.values[i], by_row, out=out[i])


def _same_on_all_ranks(value: Tensor, group: str) -> Tensor:
    """The value, or NaN if another rank's differs; the host reads nothing from the device."""
    extremes = torch.stack([value, -value])
    comm.all_reduce(extremes, group, "softplus_sum, backward", dist.ReduceOp.MAX)
    return value.masked_fill(extremes.sum() != 0, math.nan)


softplus_sums = Reduction(
    "softplus_sum",
    Operands,
    Results,
    (_forward, _forward_fake, _backward),
    wanted=4,
    outputs=1,
)


def divisor(x: Tensor) -> int:
    """The factor by which the sum is divided before its gradients are stored."""
    return max(1, len(x)) if x.element_size() == 2 else 1


def _terms(o: Operands) -> str:
    """Description of the call, on which all ranks must agree."""
    wanted = ", ".join(name for name, needed in o.need._asdict().items() if needed)
    return (
        f"{backends.described(o.x)}, gradients wanted: {wanted or 'none'}, "
        f"ids: {'given' if o.row_ids is not None else o.diagonal}, "
        f"weight: {'none' if o.weight is None else 'given'}, "
        f"teacher: {'none' if o.teacher_x is None else backends.described(o.teacher_x)}"
    )


def _sweep(o: Operands, ranks: Ranks | None) -> Sweep:
    """The matrix in the order of its ids, and its tiles."""
    # Each rank sorts its own shard, so that its pairs (i, i) stay on the diagonal.
    start = 0 if ranks is None else ranks.start
    rows = Side(o.x, o.row_ids, None, o.weight, o.teacher_x)
    matrix = Matrix(rows, Side(o.y, o.col_ids, None, None, o.teacher_y), o.diagonal, start, start)
    teacher = None
    if o.teacher_scale is not None and o.teacher_bias is not None:
        teacher = o.teacher_scale, o.teacher_bias
    call = SigmoidCall(o.scale, o.bias, o.need, _weight_divisor(o, ranks), teacher)
    if teacher is not None or not backends.uses_kernels(o.x):
        sums = SigmoidTiles.new_sums(o.x)
        return Sweep(matrix, Orders(), partial(SigmoidTiles, call=call, sums=sums), ranks)
    from megabatch.similarity.triton.sigmoid import SigmoidKernelTiles

    sums = SigmoidKernelTiles.new_sums(o.x)
    return Sweep(*sort_by_id(matrix), partial(SigmoidKernelTiles, call=call, sums=sums), ranks)


def _weight_divisor(o: Operands, ranks: Ranks | None) -> Tensor | None:
    """The largest weight of all ranks, if dS is in float16 and needs weights of at most 1."""
    if o.weight is None or o.x.dtype != torch.float16:
        return None
    largest = o.weight.abs().amax() if len(o.weight) else o.weight.new_zeros(())
    divisor = largest.masked_fill(largest == 0, 1)
    if ranks is not None:  # their gradients of y are summed
        comm.all_reduce(divisor, ranks.name, ranks.operation, dist.ReduceOp.MAX)
    return divisor
