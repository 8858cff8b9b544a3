"""The sigmoid loss's sum over all pairs, with its gradients, from one sweep.

The loss is SigLIP's (Zhai et al. 2023, arXiv 2303.15343). A pair's gradient needs no statistic of
its row or column, so the sweep that adds up the loss forms the gradients too: 6 m n d operations
for both where a second sweep would make it 8.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from megabatch.similarity import id_order, sweep, tile_torch
from megabatch.similarity.arguments import (
    accumulator_dtype,
    cast_for_autocast,
    check_same_rows,
    check_scalar,
    check_two,
    check_vector,
)
from megabatch.similarity.exchange import group_name
from megabatch.similarity.pairs import PAIRED, PLAIN, Pairs
from megabatch.similarity.parallel import replicated
from megabatch.similarity.statistics import Ids, _check_ids


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
    until the backward pass in the accumulator's dtype: 4 d bytes a row.

    Args:
        x: (m, d) features, any floating dtype. y: (n, d), same dtype and device.
        scale, bias: numbers, or tensors of shape () or (1,); differentiable.
        ids: "paired" (row i belongs to column i), or `(row_ids (m,), column_ids (n,))` int64. A
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
    wanted = [torch.is_grad_enabled() and t.requires_grad for t in (x, y, scale, bias)]
    diagonal = PAIRED if row_ids is None else PLAIN
    name = group_name(group)
    matrix = (row_ids, column_ids, weight, diagonal, *wanted)
    if not name:
        return torch.ops.megabatch.softplus_sum(x, y, scale, bias, *matrix)[0]
    scale, bias = replicated(scale, group), replicated(bias, group)
    return torch.ops.megabatch.ring_softplus_sum(x, y, scale, bias, *matrix, name)[0]


# --- the operator ---------------------------------------------------------------------------------


@torch.library.custom_op("megabatch::softplus_sum", mutates_args=())
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
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The sum, and its gradients with respect to x, y, scale and bias, empty where not needed.

    Those of x and y lack the factor `scale`, which meets them with the upstream gradient.
    """
    dtype = accumulator_dtype(x.dtype)
    pairs = Pairs(diagonal, row_ids, column_ids)
    # Not in the features' dtype: sums over a batch overflow float16 before the upstream gradient,
    # 1/b of the mean, makes them small. And that factor would round them a second time.
    dx = x.new_zeros(x.shape if need_x else 0, dtype=dtype)
    dy = y.new_zeros(y.shape if need_y else 0, dtype=dtype)
    dscale, dbias = x.new_zeros(2, dtype=torch.float64)
    with_x = need_x or not need_y  # what the scale's gradient comes with
    x, y, pairs, rows, columns = sweep.ordered(x, y, pairs)
    weight = weight if weight is None else id_order.sort(weight, rows, 0)
    total = add_blocks(
        x,
        y,
        pairs,
        scale,
        bias,
        weight,
        dx if need_x else None,
        dy if need_y else None,
        dscale if need_scale and with_x else None,
        dbias if need_bias else None,
    )
    if need_scale and not with_x:
        dscale += inner(y, dy)
    # Clones: an operator's results may not share memory.
    return (
        total.to(dtype, copy=True),
        id_order.restore(dx, rows if need_x else None, 0),
        id_order.restore(dy, columns if need_y else None, 0),
        dscale.to(dtype, copy=True),
        dbias.to(dtype, copy=True),
    )


def add_blocks(
    x: Tensor,
    y: Tensor,
    pairs: Pairs,
    scale: Tensor,
    bias: Tensor,
    weight: Tensor | None,
    dx: Tensor | None,
    dy: Tensor | None,
    dscale: Tensor | None,
    dbias: Tensor | None,
) -> Tensor:
    """The sum of all blocks' losses, float64; adds to the gradients that are not None.

    Those of x and y lack the factor `scale`. That of scale is <x, the gradient in dx afterwards>.
    """
    if sweep.fused_available(x):
        from megabatch.similarity.fused.sigmoid_blocks import SigmoidBlocks  # needs Triton

        return SigmoidBlocks(x, y, pairs, weight).add(scale, bias, dx, dy, dscale, dbias)
    dtype = accumulator_dtype(x.dtype)
    rows, columns = sweep.block_shape(x)
    buffer = x.new_empty(min(rows, x.shape[0]) * min(columns, y.shape[0]), dtype=dtype)
    # b² terms: each block's sum is float32's, the sum of the blocks is kept wider.
    total = x.new_zeros((), dtype=torch.float64)
    for i in sweep.strips(x.shape[0], rows):
        strip = None if dx is None else dx[i]
        if dx is None and dscale is not None:
            strip = x.new_zeros(x[i].shape, dtype=dtype)
        for j in sweep.strips(y.shape[0], columns):
            view = buffer[: (i.stop - i.start) * (j.stop - j.start)].view(i.stop - i.start, -1)
            s = tile_torch.logits(x[i], y[j], scale, out=view).add_(bias)
            loss, ds = _block(s, pairs.view(i, j), None if weight is None else weight[i])
            total += loss
            if dbias is not None:
                dbias += ds.sum()
            if strip is not None:
                tile_torch.add_product(strip, ds, y[j])
            if dy is not None:
                tile_torch.add_product(dy[j], ds.T, x[i])
        if strip is not None and dscale is not None:
            dscale += inner(x[i], strip)
    return total


def _block(s: Tensor, pairs: Pairs, weight: Tensor | None) -> tuple[Tensor, Tensor]:
    """(sum of the losses, dS) of one block of logits; destroys `s`."""
    positive, _ = pairs.masks(s)
    if positive is not None:
        s = torch.where(positive, s.neg(), s)
    # softplus(s) = -logsigmoid(-s): torch's softplus cuts to its argument above 20.
    losses = F.logsigmoid(s.neg()).neg_()
    ds = s.sigmoid_()  # of -z * logit, so that neither sign is a difference 1 - p
    if positive is not None:
        ds = torch.where(positive, ds.neg(), ds)
    if weight is None:
        return losses.sum(), ds
    return (losses.sum(1) * weight).sum(), ds.mul_(weight[:, None])


def inner(features: Tensor, gradient: Tensor) -> Tensor:
    """<features, gradient>, strip by strip."""
    total = gradient.new_zeros((), dtype=torch.float64)
    for i in sweep.strips(features.shape[0], 4096):
        total += (features[i].to(gradient.dtype) * gradient[i]).sum()
    return total


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
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    dtype = accumulator_dtype(x.dtype)
    dx = x.new_empty(x.shape if need_x else 0, dtype=dtype)
    dy = y.new_empty(y.shape if need_y else 0, dtype=dtype)
    total, dscale, dbias = (x.new_empty((), dtype=dtype) for _ in range(3))
    return total, dx, dy, dscale, dbias


@torch.library.custom_op("megabatch::softplus_sum_backward", mutates_args=())
def _softplus_sum_backward(
    x: Tensor, y: Tensor, dx: Tensor, dy: Tensor, gradient: Tensor
) -> tuple[Tensor, Tensor]:
    """The kept gradients times the upstream one and the scale, in the dtypes of x and y.

    An operator of its own, with x and y among its arguments and no derivative: so a second
    derivative is an error and not silently incomplete.
    """
    return (
        torch.mul(dx, gradient, out=torch.empty_like(dx, dtype=x.dtype)),
        torch.mul(dy, gradient, out=torch.empty_like(dy, dtype=y.dtype)),
    )


@_softplus_sum_backward.register_fake
def _(x: Tensor, y: Tensor, dx: Tensor, dy: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(dx, dtype=x.dtype), torch.empty_like(dy, dtype=y.dtype)


def _setup_context(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    ctx.save_for_backward(*inputs[:3], *output[1:])
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)


def _autograd(ctx, gradient, *_):  # type: ignore[no-untyped-def]
    nothing = (None,) * 12
    if gradient is None:
        return nothing
    x, y, scale, dx, dy, dscale, dbias = ctx.saved_tensors
    need_x, need_y, need_scale, need_bias = ctx.needs_input_grad[:4]
    if need_x or need_y:
        dx, dy = torch.ops.megabatch.softplus_sum_backward(x, y, dx, dy, gradient * scale)
    return (
        dx if need_x else None,
        dy if need_y else None,
        dscale * gradient if need_scale else None,
        dbias * gradient if need_bias else None,
        *nothing[4:],
    )


_softplus_sum.register_autograd(_autograd, setup_context=_setup_context)
