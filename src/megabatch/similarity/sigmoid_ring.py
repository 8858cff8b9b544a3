"""The sigmoid loss's sum over pairs that lie on several processes: the operators.

Loss and gradients from one sweep, as in `sigmoid`: for each row of a piece travel, per step, its
features, its id where there are ids, and its gradient so far, 4 d bytes; nothing in the backward
pass.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from megabatch.similarity import exchange, ring
from megabatch.similarity.arguments import accumulator_dtype
from megabatch.similarity.pairs import Pairs
from megabatch.similarity.ring import Parcel, Parts, Ring, Visit
from megabatch.similarity.sigmoid import _softplus_sum, add_blocks, inner


@torch.library.custom_op("megabatch::ring_softplus_sum", mutates_args=())
def _ring_softplus_sum(
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
    group: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """As `softplus_sum` over the ranks of a group; scale's and bias's gradients are a rank's part.

    The gradient of y is that of the sum over ranks.
    """
    needs = {"x": need_x, "y": need_y, "scale": need_scale, "bias": need_bias}
    circle = _circle(x, y, row_ids, weight, diagonal, needs, group)
    start = circle.starts[circle.rank]
    pairs = Pairs(diagonal, row_ids, column_ids, None, start, start)
    dtype = accumulator_dtype(x.dtype)
    dx = x.new_zeros(x.shape if need_x else 0, dtype=dtype)
    dy = y.new_empty(y.shape if need_y else 0, dtype=dtype)
    total, dscale, dbias = x.new_zeros(3, dtype=torch.float64)

    def visit(piece: Visit) -> None:
        features, ids = piece.cargo
        assert features is not None
        total.add_(
            add_blocks(
                x,
                features,
                replace(pairs, column_ids=ids, column_start=piece.start),
                scale,
                bias,
                weight,
                dx if need_x else None,
                piece.part,
                dscale if need_scale and not (need_x or need_y) else None,
                dbias if need_bias else None,
            )
        )

    parcels = [Parcel(y), Parcel(column_ids)]
    route = ring.full(circle.n) if need_y else ring.rows_only(circle.n)
    parts = Parts(lambda size: y.new_zeros((size, y.shape[1]), dtype=dtype))
    with torch.cuda.device_of(x):
        for home, arrived in circle.tour(parcels, visit, route, ring.piece_rows(y), parts):
            dy[home] = arrived
        if need_scale and (need_x or need_y):
            dscale += inner(x, dx) if need_x else inner(y, dy)
    return (
        total.to(dtype, copy=True),
        dx,
        dy,
        dscale.to(dtype, copy=True),
        dbias.to(dtype, copy=True),
    )


def _circle(
    x: Tensor,
    y: Tensor,
    row_ids: Tensor | None,
    weight: Tensor | None,
    diagonal: str,
    needs: dict[str, bool],
    group: str,
) -> Ring:
    """The ring, once all ranks want the same of it."""
    wanted = ", ".join(name for name, need in needs.items() if need)
    terms = (
        f"softplus_sum, width {x.shape[1]}, {str(x.dtype).removeprefix('torch.')}, "
        f"{x.device.type}, gradients wanted: {wanted or 'none'}, "
        f"ids: {'given' if row_ids is not None else diagonal}, "
        f"weight: {'none' if weight is None else 'given'}, "
        f"{ring.plan(y)}"
    )
    sizes = [number for (number,) in exchange.agree(group, terms, [y.shape[0]], x.device)]
    return Ring(group, sizes, "softplus_sum")


@_ring_softplus_sum.register_fake
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
    group: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    wanted = (need_x, need_y, need_scale, need_bias)
    return _softplus_sum(x, y, scale, bias, row_ids, column_ids, weight, diagonal, *wanted)


@torch.library.custom_op("megabatch::same_on_all_ranks", mutates_args=())
def _same_on_all_ranks(value: Tensor, group: str) -> Tensor:
    """The value, where all ranks have the same, else NaN; no look at the device."""
    extremes = torch.stack([value, -value])
    exchange.all_reduce(extremes, group, "softplus_sum, backward", dist.ReduceOp.MAX)
    return torch.where(extremes.sum() == 0, value, torch.nan)


@_same_on_all_ranks.register_fake
def _(value: Tensor, group: str) -> Tensor:
    return torch.empty_like(value)


def _setup_context(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    ctx.group = inputs[-1]
    ctx.save_for_backward(*inputs[:3], *output[1:])
    ctx.mark_non_differentiable(*output[1:])


def _autograd(ctx, gradient, *_):  # type: ignore[no-untyped-def]
    x, y, scale, dx, dy, dscale, dbias = ctx.saved_tensors
    need_x, need_y, need_scale, need_bias = ctx.needs_input_grad[:4]
    if need_y:  # the other ranks' part of it was formed for their upstream gradients being this one
        common = torch.ops.megabatch.same_on_all_ranks(gradient, ctx.group)
        _, dy = torch.ops.megabatch.softplus_sum_backward(x, y, dx[:0], dy, common * scale)
    if need_x:
        dx, _ = torch.ops.megabatch.softplus_sum_backward(x, y, dx, dy[:0], gradient * scale)
    return (
        dx if need_x else None,
        dy if need_y else None,
        dscale * gradient if need_scale else None,
        dbias * gradient if need_bias else None,
        *(None,) * 9,
    )


_ring_softplus_sum.register_autograd(_autograd, setup_context=_setup_context)
