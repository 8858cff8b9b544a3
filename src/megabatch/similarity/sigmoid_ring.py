"""The sigmoid loss's sum over pairs that lie on several processes: the operators.

Loss and gradients from one sweep, as in `sigmoid`: for each row of a piece travel, per step, its
features, its id where there are ids, and its gradient so far, 4 d bytes; nothing in the backward
pass.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from megabatch.similarity import id_order, sweep
from megabatch.similarity.distributed import comm, ring
from megabatch.similarity.distributed.ring import Parcel, Parts, Ring, Visit
from megabatch.similarity.id_order import IdOrder
from megabatch.similarity.ops import operator, ops
from megabatch.similarity.pairs import Pairs
from megabatch.similarity.shards import Once, catch_up
from megabatch.similarity.sigmoid import AnyBlocks, _softplus_sum, results, total_of
from megabatch.similarity.sigmoid_blocks import (
    Kept,
    Need,
    Terms,
    blocks,
    divisor,
    weight_unit,
)


@operator("ring_softplus_sum", alone=False)
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
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """As `softplus_sum` over the ranks of a group; scale's and bias's gradients are a rank's part.

    The gradient of y is that of the sum over ranks.
    """
    need = Need(need_x, need_y, need_scale, need_bias)
    circle = _circle(x, y, row_ids, weight, diagonal, need, group)
    start = circle.starts[circle.rank]
    with torch.cuda.device_of(x):
        # Each shard in an order of its own: pairs (i, i) of one rank stay on the diagonal.
        matrix = sweep.ordered(x, y, Pairs(diagonal, row_ids, column_ids))
        pairs = replace(matrix.pairs, row_start=start, column_start=start)
        own_weight = weight if weight is None else id_order.sort(weight, matrix.rows, 0)
        terms = Terms(scale, bias, own_weight, _common_unit(x, weight, circle))
        own = blocks(matrix.x, matrix.y, pairs, terms, need)
        total = own.accumulator(len(x)) if need_x else None
        sums, begun = [own.sums()], Once()
        later: list[Callable[[], None]] = []  # the last product of x's gradient

        def visit(piece: Visit) -> None:
            features, ids = piece.cargo
            assert features is not None
            if len(x) == 0 or piece.size == 0:
                return
            catch_up(later)
            columns = replace(pairs, column_ids=ids, column_start=piece.start)
            visited, first = blocks(own.x, features, columns, terms, need), begun.first()
            for i in visited.strips():
                dx = None if total is None else total[i]
                last = later if i.stop == len(x) else None
                visited.add(i, dx, piece.part, (first, i.start == 0), last)
            sums.append(visited.sums())

        if total is not None and not any(circle.sizes):
            total.zero_()  # nobody will visit
        dx, dy, inner = _gradients(circle, own, need, matrix, visit, total, later)
        return results(torch.stack(sums).sum(0), inner, dx, dy)


def _gradients(
    circle: Ring,
    own: AnyBlocks,
    need: Need,
    matrix: IdOrder,
    visit: Callable[[Visit], None],
    total: Tensor | None,
    later: list[Callable[[], None]],
) -> tuple[Kept, Kept, Tensor | None]:
    """Go around; the gradients of x, added up in `total`, and y, and scale's where it is theirs.

    `later`: what visits leave to do before x's is complete.
    """
    x, y = matrix.x, matrix.y
    dx, dy = Kept.like(x, need.x), Kept.like(y, need.y)
    factor = own.factor(divisor(x))
    parcels = [Parcel(own.y), Parcel(own.pairs.column_ids)]
    route = ring.full(circle.n) if need.y else ring.rows_only(circle.n)

    def unwritten(size: int) -> Tensor:
        part = own.accumulator(size)
        return part if len(x) else part.zero_()  # a rank without rows visits nobody

    def complete() -> None:
        """x's gradient, which stays here."""
        catch_up(later)
        if total is not None:
            rows = slice(0, len(x)) if matrix.rows is None else matrix.rows
            products.append(own.keep(total, own.x, factor, dx, rows, need.scale))

    products: list[Tensor | None] = []
    tour = circle.tour(parcels, visit, route, ring.piece_rows(own.y), Parts(unwritten), complete)
    for home, arrived in tour:
        rows = home if matrix.columns is None else matrix.columns[home]
        with_y = need.scale and not need.x
        products.append(own.keep(arrived, own.y[home], factor, dy, rows, with_y))
        del arrived  # a part of what this rank found for all
    inner = total_of(products)
    if inner is None and need.scale and need.features:  # nothing came home to an empty shard
        inner = x.new_zeros((), dtype=torch.float64)
    return dx, dy, inner


def _common_unit(x: Tensor, weight: Tensor | None, circle: Ring) -> Tensor | None:
    """`weight_unit` for all ranks, since their gradients of y are added up."""
    unit = weight_unit(x, weight)
    if unit is not None:
        comm.all_reduce(unit, circle.name, circle.operation, dist.ReduceOp.MAX)
    return unit


def _circle(
    x: Tensor,
    y: Tensor,
    row_ids: Tensor | None,
    weight: Tensor | None,
    diagonal: str,
    need: Need,
    group: str,
) -> Ring:
    """The ring, once all ranks want the same of it."""
    wanted = ", ".join(name for name, wanted in need._asdict().items() if wanted)
    terms = (
        f"softplus_sum, width {x.shape[1]}, {str(x.dtype).removeprefix('torch.')}, "
        f"{x.device.type}, gradients wanted: {wanted or 'none'}, "
        f"ids: {'given' if row_ids is not None else diagonal}, "
        f"weight: {'none' if weight is None else 'given'}, "
        f"{sweep.arithmetic(x)}, {ring.plan(y)}"
    )
    sizes = [number for (number,) in comm.agree(group, terms, [y.shape[0]], x.device)]
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
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    wanted = (need_x, need_y, need_scale, need_bias)
    return _softplus_sum(x, y, scale, bias, row_ids, column_ids, weight, diagonal, *wanted)


@operator("same_on_all_ranks", alone=False)
def _same_on_all_ranks(value: Tensor, group: str) -> Tensor:
    """The value, where all ranks have the same, else NaN; no look at the device."""
    extremes = torch.stack([value, -value])
    comm.all_reduce(extremes, group, "softplus_sum, backward", dist.ReduceOp.MAX)
    return value.masked_fill(extremes.sum() != 0, math.nan)


@_same_on_all_ranks.register_fake
def _(value: Tensor, group: str) -> Tensor:
    return torch.empty_like(value)


def _setup_context(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    ctx.group = inputs[-1]
    ctx.save_for_backward(*inputs[:4], *output[1:])
    ctx.mark_non_differentiable(*output[1:])


def _autograd(ctx, gradient, *_):  # type: ignore[no-untyped-def]
    common, need = gradient, ctx.needs_input_grad[:4]
    if need[1]:  # the other ranks' part of it was formed as if they had the same upstream gradient
        common = ops.same_on_all_ranks(gradient, ctx.group)
    found = ops.softplus_sum_backward(*ctx.saved_tensors, gradient, common)
    return *(g if n else None for n, g in zip(need, found, strict=True)), *(None,) * 9


_ring_softplus_sum.register_autograd(_autograd, setup_context=_setup_context)
