"""The engine: sweeps over all blocks of a matrix, for any reduction, backend and schedule.

`reduce` merges blocks into running states of rows and columns. `products` turns each block into dS
and adds dS y to the rows' sums and dSᵀ x to the columns'; `gradients` uses it for a reduction with
states. Over several ranks a sweep goes round by round: gather columns, compute, return their
results (`distributed/schedule`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megabatch.similarity import states
from megabatch.similarity.distributed import comm
from megabatch.similarity.distributed.comm import Pending
from megabatch.similarity.distributed.schedule import Ranks, Round
from megabatch.similarity.matrix import Matrix, Orders, Side, restore, sort
from megabatch.similarity.ops import new_gradient
from megabatch.similarity.tiles import StateTiles, Tiles


class Sweep(NamedTuple):
    """A matrix, sorted by id, and the ranks that share it."""

    matrix: Matrix  #: this rank's rows against its own columns
    orders: Orders  #: in which both sides were sorted
    make: Callable[[Matrix], Any]  #: tiles of a block
    ranks: Ranks | None = None  #: None: this process has all columns

    def blocks(self, rows: Side, column_round: Round) -> Iterator[tuple[slice, slice, Any, Side]]:
        """For each part of a round: its rows, its columns, their tiles, and the columns' side."""
        for part in column_round.parts():
            block = Matrix(
                rows.narrow(part.rows),
                part.side,
                self.matrix.diagonal,
                part.row_start,
                part.col_start,
            )
            yield part.rows, part.cols, self.make(block), part.side


# --- running states -------------------------------------------------------------------------------


def reduce(sweep: Sweep, own: StateTiles, cols: bool) -> tuple[Tensor, Tensor | None]:
    """The results of this rank's rows and, if wanted, of its columns.

    `own`: tiles of the sweep's matrix.
    """
    ranks, symmetric = sweep.ranks, own.symmetric
    assert ranks is not None
    row_side, col_side = _sides(sweep, own)
    arriving = ranks.gather_rows(row_side)
    rounds = ranks.rounds(col_side)
    first, row_state = not symmetric, own.new_state(ranks.rows.size)
    if symmetric:
        own.forward(own.clear(row_state), None, (False, False))
    col_results = own.new_results(own.n) if cols else None
    for each in rounds:
        state = own.new_state(each.layout.size) if cols or symmetric else None
        if symmetric and state is not None:
            own.clear(state)
        for i, j, tiles, _ in sweep.blocks(arriving.wait(), each):
            others = None if state is None else state[:, j]
            tiles.forward(row_state[:, i], others, (first, not symmetric))
            first = False
        if state is None:
            continue
        arrived = each.layout.exchange(state)  # (ranks, numbers, rows of this rank)
        if symmetric:
            own_state = row_state[:, each.own]
            own_state.copy_(own.merge(torch.cat([own_state[None], arrived])))
        elif col_results is not None:
            own.write_results(arrived, col_results[:, each.own])
    row_results = own.new_results(own.m)
    own.write_results(ranks.rows.exchange(row_state), row_results)
    return row_results, col_results


def in_given_order(rows: Tensor, columns: Tensor | None, orders: Orders) -> tuple[Tensor, Tensor]:
    """Results in the order of the given rows and columns; the columns' empty if None."""
    rows = restore(rows, orders.rows, 1)
    return rows, rows.new_empty(0) if columns is None else restore(columns, orders.cols, 1)


def _sides(sweep: Sweep, own: Tiles) -> tuple[Side, Side]:
    """Both sides with the features as the tiles have them: padded once, not for each part."""
    rows, cols = sweep.matrix.rows, sweep.matrix.cols
    return rows._replace(features=own.x), cols._replace(features=own.y)


# --- gradients ------------------------------------------------------------------------------------


def gradients(
    sweep: Sweep,
    scale: Tensor,
    results: Sequence[Tensor],
    upstream: Sequence[Tensor | None],
    need: tuple[bool, ...],
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of x, y and the scale for the results of `reduce`, empty if not needed.

    In a group, the scale's gradient is the mean over ranks, which saves the operators of
    `means.replicated`.

    Args:
        results, upstream: of the rows and of the columns; None if there is no gradient.
    """
    own, orders, symmetric = sweep.make(sweep.matrix), sweep.orders, sweep.matrix.symmetric
    need_x, need_y, need_scale = need[0], need[1] and not symmetric, need[2]
    x, y = sweep.matrix.rows.features, sweep.matrix.cols.features
    dx, dy = new_gradient(x, need_x, x), new_gradient(y, need_y, x)
    rows, cols = (
        None if gradient is None else own.make_upstream(sort(side, o, 1), sort(gradient, o, 1))
        for side, gradient, o in zip(results, upstream, orders, strict=True)
    )
    divisor = _normalize(own, rows, cols, sweep.ranks)
    factor = scale if divisor is None else scale * divisor
    sides = rows, rows if symmetric else cols
    out = dx if need_x else None, dy if need_y else None
    parts = write_products(sweep, own, factor, out, need_scale, sides)
    dx = restore(dx, orders.rows if need_x else None, 0)
    dy = restore(dy, orders.cols if need_y else None, 0)
    if not need_scale:
        return dx, dy, x.new_empty(0)
    # One launch less if there is one part.
    dscale = parts[0] if len(parts) == 1 else sum(parts, torch.zeros_like(scale))
    if symmetric:
        dscale = dscale / 2  # each pair was counted as (i, j) and as (j, i)
    if divisor is not None:
        dscale = dscale * divisor
    if sweep.ranks is not None:
        dscale = comm.all_reduce(dscale, sweep.ranks.name, sweep.ranks.operation) / sweep.ranks.n
    return dx, dy, dscale


def _normalize(own: StateTiles, rows: Any, cols: Any, ranks: Ranks | None) -> Tensor | None:
    """Rescale the upstreams in place to fit float16; returns the factor that undoes it, or None.

    It is the same on all ranks, since their gradients are added up.
    """
    if not own.half_ds:
        return None
    sides = [packed for packed in map(own.pack_upstream, (rows, cols)) if packed is not None]
    divisor = states.upstream_divisor(sides)
    if divisor is None:
        divisor = own.x.new_zeros((), dtype=torch.float32)
    if ranks is not None:
        comm.all_reduce(divisor, ranks.name, ranks.operation, dist.ReduceOp.MAX)
    divisor = torch.where(divisor == 0, torch.ones_like(divisor), divisor)
    for packed in sides:
        states.divide_upstream(packed, divisor)
    return divisor


def write_products(
    sweep: Sweep,
    own: Tiles,
    factor: Tensor,
    out: tuple[Any, Any],
    need_scale: bool,
    upstream: tuple[Any, Any] = (None, None),
) -> list[Tensor]:
    """Write the gradients of x and y, `factor` times the sums of `products`, to `out`.

    Those that are None are not wanted. Returns parts of the scale's gradient, if it is.
    """
    # It comes with dx, or with dy if x is frozen.
    with_x = out[0] is not None or (need_scale and out[1] is None)
    parts: list[Tensor] = []
    for side, part, total in products(sweep, own, with_x, out[1] is not None, upstream):
        first = side == "x"
        target = out[0 if first else 1]
        found = own.write_grad(total, side, part, factor, need_scale and with_x == first, target)
        parts.extend([] if found is None else [found])
        del total  # before the next one is made
    return parts


def products(
    sweep: Sweep, own: Tiles, x: bool, y: bool, upstream: tuple[Any, Any] = (None, None)
) -> Iterator[tuple[str, slice, Tensor]]:
    """Sweep all blocks once for the sums of dS y and dSᵀ x of this rank's rows and columns.

    Args:
        own: tiles of the sweep's matrix.
        x, y: whether the sums of each side are wanted; if symmetric, x's alone.
        upstream: of this rank's rows and columns (if symmetric, the same).

    Yields:
        ("x" or "y", rows of that side, their sums), as soon as they are complete.
    """
    rows, cols = upstream
    if sweep.ranks is not None:
        yield from _products_of_ranks(sweep, sweep.ranks, own, x, y, rows, cols)
    elif own.symmetric:
        total = own.new_total(own.m, own.x)
        own.add_products(rows, rows, total, total, (True, True))
        yield "x", slice(0, own.m), total
    else:  # a strip of rows is complete after its blocks
        dy = own.new_total(own.n, own.y) if y else None
        for i in own.row_blocks():
            strip = own.new_total(i.stop - i.start, own.x) if x else None
            own.add_strip(i, rows, cols, strip, dy, (True, i.start == 0))
            if strip is not None:
                yield "x", i, strip
            del strip  # before the next strip's is made
        if dy is not None:
            yield "y", slice(0, own.n), dy


def _products_of_ranks(
    sweep: Sweep, ranks: Ranks, own: Tiles, x: bool, y: bool, rows: Any, cols: Any
) -> Iterator[tuple[str, slice, Tensor]]:
    symmetric = own.symmetric
    row_side, col_side = _sides(sweep, own)
    row_side = row_side._replace(upstream=own.pack_upstream(rows))
    col_side = col_side._replace(upstream=own.pack_upstream(cols))
    arriving = ranks.gather_rows(row_side)
    rounds = ranks.rounds(col_side)
    dx = own.new_total(ranks.rows.size, own.x) if x else None
    if symmetric and dx is not None:
        dx.zero_()
        own.add_products(rows, rows, dx, dx, (False, False))
    overwrite = (not symmetric, not symmetric)
    summing: tuple[slice, Pending] | None = None  # the previous round's sums, on their way
    for each in rounds:
        dy = own.new_total(each.layout.size, own.y) if y or symmetric else None
        if symmetric and dy is not None:  # some of its columns are other ranks' work
            dy.zero_()
        _add_round(sweep, each, arriving.wait(), rows, dx, dy, overwrite)
        overwrite = (False, overwrite[1])
        yield from _arrived(summing, dx if symmetric else None)
        summing = None if dy is None else (each.own, each.layout.sum(dy))
        del dy  # before the next one is made
    del each  # with its columns, before x's gradient is written
    if dx is not None and not symmetric:  # during the last transfer of y's sums
        yield "x", slice(0, own.m), ranks.rows.sum(dx).wait()
    yield from _arrived(summing, dx if symmetric else None)
    if dx is not None and symmetric:
        yield "x", slice(0, own.m), dx


def _arrived(
    summing: tuple[slice, Pending] | None, dx: Tensor | None
) -> Iterator[tuple[str, slice, Tensor]]:
    """The sums of a round's columns; with `dx`, where x is y, they are added to it instead."""
    if summing is None:
        return
    at, total = summing[0], summing[1].wait()
    if dx is None:
        yield "y", at, total
    else:
        dx[at] += total


def _add_round(
    sweep: Sweep,
    each: Round,
    row_side: Side,
    own_upstream: Any,
    dx: Tensor | None,
    dy: Tensor | None,
    overwrite: tuple[bool, bool],
) -> None:
    """Add the products of a round's parts; `own_upstream`: of this rank's rows."""
    assert sweep.ranks is not None
    for i, j, tiles, col_side in sweep.blocks(row_side, each):
        rows = own_upstream
        if i != sweep.ranks.rows.own:
            rows = tiles.unpack_upstream(row_side.narrow(i).upstream)
        cols = tiles.unpack_upstream(col_side.upstream)
        sums = None if dx is None else dx[i], None if dy is None else dy[j]
        tiles.add_products(rows, cols, *sums, overwrite)
        overwrite = (False, overwrite[1])
