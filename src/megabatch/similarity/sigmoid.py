"""The sigmoid loss's sum over all pairs, with its gradients, from one sweep.

The loss is SigLIP's (Zhai et al. 2023, arXiv 2303.15343). A pair's gradient needs no statistic of
its row or column, so the sweep that adds up the loss forms the gradients too: 6 m n d operations
for both where a second sweep would make it 8.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

import torch
from torch import Tensor

from megabatch.similarity import id_order, sweep
from megabatch.similarity.arguments import (
    accumulator_dtype,
    cast_for_autocast,
    check_same_rows,
    check_scalar,
    check_two,
    check_vector,
)
from megabatch.similarity.distributed.comm import group_name
from megabatch.similarity.distributed.means import replicated
from megabatch.similarity.functions import Ids, _check_ids
from megabatch.similarity.id_order import IdOrder
from megabatch.similarity.ops import operator, ops
from megabatch.similarity.pairs import PAIRED, PLAIN, Pairs
from megabatch.similarity.sigmoid_blocks import (
    Blocks,
    Kept,
    Need,
    Terms,
    blocks,
    divisor,
    release,
    weight_unit,
)
from megabatch.torch_internals import transforms_active

if TYPE_CHECKING:
    from megabatch.similarity.backends.triton.sigmoid_blocks import SigmoidBlocks

AnyBlocks: TypeAlias = "Blocks | SigmoidBlocks"


def softplus_sum(
    x: Tensor,
    y: Tensor,
    scale: float | Tensor,
    bias: float | Tensor,
    *,
    ids: Ids = "paired",
    weight: Tensor | None = None,
    group: object = None,
) -> Tensor:
    """Sum over all pairs (i, j) of weight_i * softplus(-z_ij * (scale * <x_i, y_j> + bias)).

    z_ij is +1 where the ids of a pair are equal and -1 elsewhere. Loss and gradients come from
    one sweep. Where gradients are wanted, those of x and y are formed in the forward pass and kept
    until the backward pass in the dtype of x: as much again as x and y take.

    Args:
        x: (m, d) features, any floating dtype. y: (n, d), same device and dtype; under autocast
            two that it casts to one.
        scale, bias: numbers, or tensors of shape () or (1,); differentiable.
        ids: "paired" (row i belongs to column i), or `(row_ids (m,), column_ids (n,))`, integers. A
            negative id equals nothing.
        weight: (m,) factors, one for all pairs of a row of x; data, without a gradient.
        group: the processes that share the matrix, each with its own rows of x and of y; as in
            `logsumexp`. The sum is over this process's rows and all columns. Since the gradients
            are formed before it is known what becomes of the sum, all processes must use it alike:
            where their upstream gradients differ, the gradient of y is NaN.

    Returns:
        A scalar in float32 (float64 for float64 features).

    Raises:
        TypeError, ValueError: the message names the argument, what came and what was expected, or
            what each process had where they disagree.
        CommunicationError: another process is gone or did not come in time.
    """
    check_two(x, y)
    x, y = cast_for_autocast(x, y)
    row_ids, column_ids = _check_ids(ids, x, y)
    if row_ids is None:
        check_same_rows(x, y)
    scale, bias = check_scalar("scale", scale, x), check_scalar("bias", bias, x)
    if weight is not None:
        weight = check_vector("weight", weight, x.shape[0], x)
        if weight.requires_grad:
            raise ValueError("weight: expected a tensor that needs no gradient, got one that does")
    sweep.tell_of_float32(x)
    wanted = [torch.is_grad_enabled() and t.requires_grad for t in (x, y, scale, bias)]
    if not torch.compiler.is_compiling() and transforms_active():
        wanted = [True] * 4  # torch.func.vmap hides what needs a gradient outside of it
    diagonal = PAIRED if row_ids is None else PLAIN
    name = group_name(group)
    matrix = (row_ids, column_ids, weight, diagonal, *wanted)
    if not name:
        return ops.softplus_sum(x, y, scale, bias, *matrix)[0]
    scale, bias = replicated(scale, group), replicated(bias, group)
    return ops.ring_softplus_sum(x, y, scale, bias, *matrix, name)[0]


# --- the operator ---------------------------------------------------------------------------------


@operator("softplus_sum")
def _softplus_sum(
    x: Tensor,
    y: Tensor,
    scale: Tensor,
    bias: Tensor,
    row_ids: Tensor | None,
    column_ids: Tensor | None,
    weight: Tensor | None,
    diagonal: str,
    need_x: bool,
    need_y: bool,
    need_scale: bool,
    need_bias: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The sum; its gradients of x and y as `Kept`, empty where not needed; of scale and bias."""
    need = Need(need_x, need_y, need_scale, need_bias)
    with torch.cuda.device_of(x):
        matrix = sweep.ordered(x, y, Pairs(diagonal, row_ids, column_ids))
        own = weight if weight is None else id_order.sort(weight, matrix.rows, 0)
        terms = Terms(scale, bias, own, weight_unit(x, weight))
        whole = blocks(matrix.x, matrix.y, matrix.pairs, terms, need)
        dx, dy = Kept.like(x, need_x), Kept.like(y, need_y)
        if len(x) == 0 or len(y) == 0:
            return results(whole.sums(), None, dx.zero_(), dy.zero_())
        inner = _sweep(whole, need, dx, dy, matrix)
        return results(whole.sums(), inner, dx, dy)


def _sweep(whole: AnyBlocks, need: Need, dx: Kept, dy: Kept, matrix: IdOrder) -> Tensor | None:
    """Fill in dx and dy; the scale's gradient, where it comes with them."""
    x, y = whole.x, whole.y
    factor = whole.factor(divisor(x))
    products = []
    columns = whole.accumulator(len(y)) if need.y else None
    strip = whole.accumulator(min(whole.rows, len(x))) if need.x else None
    # Rows strip by strip: dx then needs no accumulator of its own in the wider type.
    for i in whole.strips():
        total = None if strip is None else strip[: i.stop - i.start]
        whole.add(i, total, columns, (True, i.start == 0))
        if total is not None:
            rows = i if matrix.rows is None else matrix.rows[i]
            products.append(whole.keep(total, x[i], factor, dx, rows, need.scale))
    whole.free()
    if columns is not None:
        order = slice(0, len(y)) if matrix.columns is None else matrix.columns
        inner = need.scale and not need.x
        products.append(whole.keep(columns, y, factor, dy, order, inner))
    return total_of(products)


def total_of(products: list[Tensor | None]) -> Tensor | None:
    """The sum of those there are."""
    found = [product for product in products if product is not None]
    if len(found) < 2:  # two launches less where there is one strip
        return found[0] if found else None
    return torch.stack(found).sum()


def results(
    sums: Tensor, inner: Tensor | None, dx: Kept, dy: Kept
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """What the operators return; `inner`: the scale's gradient, unless it is among the sums."""
    dtype = accumulator_dtype(dx.values.dtype)
    # Copies: an operator's results may not share memory.
    loss, dbias = (sums[i].to(dtype, copy=True) for i in range(2))
    dscale = (sums[2] if inner is None else inner).to(dtype, copy=True)
    return loss, *dx, *dy, dscale, dbias


@_softplus_sum.register_fake
def _(
    x: Tensor,
    y: Tensor,
    scale: Tensor,
    bias: Tensor,
    row_ids: Tensor | None,
    column_ids: Tensor | None,
    weight: Tensor | None,
    diagonal: str,
    need_x: bool,
    need_y: bool,
    need_scale: bool,
    need_bias: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    dtype = accumulator_dtype(x.dtype)
    total, dscale, dbias = (x.new_empty((), dtype=dtype) for _ in range(3))
    return total, *Kept.like(x, need_x), *Kept.like(y, need_y), dscale, dbias


@operator("softplus_sum_backward")
def _softplus_sum_backward(
    x: Tensor,
    y: Tensor,
    scale: Tensor,
    bias: Tensor,
    dx: Tensor,
    x_units: Tensor,
    dy: Tensor,
    y_units: Tensor,
    dscale: Tensor,
    dbias: Tensor,
    gradient: Tensor,
    y_gradient: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The kept gradients times the upstream one, those of x and y in their dtypes.

    `y_gradient`: the upstream one for y, which over several processes is another tensor.

    An operator of its own, with all inputs among its arguments and no derivative: so a second
    derivative is an error and not silently incomplete.
    """
    times = divisor(x)
    with torch.cuda.device_of(x):
        return (
            release(Kept(dx, x_units), x, gradient, times),
            release(Kept(dy, y_units), y, y_gradient, times),
            dscale * gradient,
            dbias * gradient,
        )


@_softplus_sum_backward.register_fake
def _(
    x: Tensor,
    y: Tensor,
    scale: Tensor,
    bias: Tensor,
    dx: Tensor,
    x_units: Tensor,
    dy: Tensor,
    y_units: Tensor,
    dscale: Tensor,
    dbias: Tensor,
    gradient: Tensor,
    y_gradient: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    empty = torch.empty_like
    return empty(dx), empty(dy), empty(dscale), empty(dbias)


def _setup_context(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    ctx.save_for_backward(*inputs[:4], *output[1:])
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)


def _autograd(ctx, gradient, *_):  # type: ignore[no-untyped-def]
    nothing = (None,) * 12
    if gradient is None:
        return nothing
    found = ops.softplus_sum_backward(*ctx.saved_tensors, gradient, gradient)
    needed = zip(ctx.needs_input_grad[:4], found, strict=True)
    return *(g if need else None for need, g in needed), *nothing[4:]


_softplus_sum.register_autograd(_autograd, setup_context=_setup_context)
