"""The engine: sweeps over all blocks of a matrix, for any reduction, backend and schedule.

`reduce` merges blocks into running states of rows and columns. `products` turns each block into dS
and adds dS y to the rows' sums and dSᵀ x to the columns'; `gradients` uses it for a reduction with
states. Over several ranks a sweep goes round by round: gather columns, compute, return their
results (`distributed/schedule`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from megabatch.similarity.distributed import comm
from megabatch.similarity.distributed.schedule import Ranks, Round
from megabatch.similarity.eager import add_product
from megabatch.similarity.matrix import Matrix, Orders, Side, restore, sort
from megabatch.similarity.ops import new_gradient


class Tiles(Protocol):
    """The blocks of a matrix of x (m, d) against y (n, d), as a backend computes them.

    Each reduction has two classes of tiles, in torch operations (`eager_softmax`, ...) and in
    Triton kernels (`triton/`). An *upstream* is the statistics of a side that dS depends on; on a
    rank it has the form that the tiles take, between ranks it is a tensor (k, rows).
    """

    x: Tensor
    y: Tensor
    m: int  #: rows of x; len(x) takes 1 us, and a step needs it often
    n: int  #: rows of y
    symmetric: bool  #: y is x: only the blocks on and above the diagonal are computed

    def row_blocks(self) -> Iterator[slice]:
        """Slices of the rows, one for each row of blocks."""
        ...

    def col_blocks(self, i: slice) -> Iterator[slice]:
        """The columns of the blocks of rows `i`; if symmetric, those from the diagonal on."""
        ...

    def new_total(self, rows: int) -> Tensor:
        """An uninitialised accumulator for the gradients of `rows` rows."""
        ...

    def gradient_block(self, i: slice, j: slice, rows: Any, cols: Any) -> Tensor | None:
        """dS of a block, valid until the next call; None if no gradient of features is wanted.

        `rows`, `cols`: the upstream of each side; None if there is none.
        """
        ...

    def unpack_upstream(self, packed: Tensor | None) -> Any:
        """The upstream of a side from the tensor that was sent."""
        ...


class StateTiles(Tiles, Protocol):
    """Tiles of a reduction that keeps a running state for each row and each column: `states`."""

    def new_state(self, size: int) -> Tensor:
        """A state for `size` rows, (numbers, size), uninitialised."""
        ...

    def clear(self, state: Tensor) -> Tensor:
        """Set it to the state before any column; returns it."""
        ...

    def forward(
        self,
        rows: Tensor,
        cols: Tensor | None,
        overwrite: tuple[bool, bool],
        to_results: bool = False,
    ) -> None:
        """Merge all blocks into the states of the rows and, unless None, of the columns.

        If symmetric, the columns' state is the rows' and `cols` is None. `overwrite`: the rows',
        the columns' state is uninitialised.
        """
        ...

    def merge(self, states: Tensor) -> Tensor:
        """Several states (k, ...) of the same rows as one."""
        ...

    def new_results(self, size: int) -> Tensor:
        """The results of `size` rows, (numbers, size), uninitialised."""
        ...

    def write_results(self, states: Tensor, out: Tensor) -> None:
        """Write the results of several states (k, ...) of the same rows to `out`."""
        ...

    def make_upstream(self, results: Tensor, gradient: Tensor) -> Any:
        """A side's upstream from its results and their upstream gradients."""
        ...

    def pack_upstream(self, upstream: Any) -> Tensor | None:
        """An upstream as one tensor (k, rows), which is sent with the columns."""
        ...

    def upstream_divisor(self, rows: Any, cols: Any) -> Tensor | None:
        """() divisor with which the upstream gradients fit dS's dtype; None: they fit without."""
        ...

    def divide_upstream(self, packed: Tensor, divisor: Tensor) -> None:
        """Divide the upstream gradients in a packed upstream, in place."""
        ...

    def write_grad(
        self,
        total: Tensor,
        side: str,
        rows: slice,
        factor: Tensor,
        scale_grad_part: bool,
        out: Tensor | None,
    ) -> Tensor | None:
        """out = factor * total in out's dtype; <features, total> if `scale_grad_part`.

        `total` belongs to these `rows` of the features of `side`, "x" or "y".
        """
        ...


class Sweep(NamedTuple):
    """A matrix, sorted by id, and the ranks that share it."""

    matrix: Matrix  #: this rank's rows against its own columns
    orders: Orders  #: in which both sides were sorted
    make: Callable[[Matrix], Any]  #: tiles of a block
    ranks: Ranks | None = None  #: None: this process has all columns
    saved: Tensor | None = None  #: place for gathered features, see `Ranks.saved`

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
    saved_rows, saved_cols = _places(sweep)
    row_side, col_side = _sides(sweep, own)
    arriving = ranks.rows.gather(row_side, saved_rows)
    rounds = ranks.rounds(col_side, saved_cols)
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
    """Results in the order of the given rows and columns; those of columns empty if None."""
    rows = restore(rows, orders.rows, 1)
    return rows, rows.new_empty(0) if columns is None else restore(columns, orders.cols, 1)


def _sides(sweep: Sweep, own: Tiles) -> tuple[Side, Side]:
    """Both sides with the features as the tiles have them: padded once, not for each part."""
    rows, cols = sweep.matrix.rows, sweep.matrix.cols
    return rows._replace(features=own.x), cols._replace(features=own.y)


def _places(sweep: Sweep) -> tuple[Tensor | None, Tensor | None]:
    if sweep.saved is None or sweep.ranks is None:
        return None, None
    return sweep.ranks.saved(sweep.saved)


# --- gradients ------------------------------------------------------------------------------------


class SideGradient(NamedTuple):
    """One side's results, and their upstream gradient, None if there is none."""

    results: Tensor
    gradient: Tensor | None


def gradients(
    sweep: Sweep,
    scale: Tensor,
    sides: tuple[SideGradient, SideGradient],
    need: tuple[bool, bool, bool],
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of x, y and the scale for the results of `reduce`, empty if not needed.

    In a group, the scale's gradient is the mean over ranks, which saves the operators of
    `means.replicated`.
    """
    own, orders, symmetric = sweep.make(sweep.matrix), sweep.orders, sweep.matrix.symmetric
    need_x, need_y, need_scale = need[0], need[1] and not symmetric, need[2]
    x, y = sweep.matrix.rows.features, sweep.matrix.cols.features
    out = {"x": new_gradient(x, need_x, x), "y": new_gradient(y, need_y, x)}
    rows = _upstream(own, sides[0], orders.rows)
    cols = rows if symmetric else _upstream(own, sides[1], orders.cols)
    divisor = _normalize(own, rows, None if symmetric else cols, sweep.ranks)
    factor = scale if divisor is None else scale * divisor
    # The scale's gradient comes with dx, or with dy if x is frozen.
    with_x = need_x or not need_y
    needed = {"x": need_x, "y": need_y}
    parts: list[Tensor] = []  # of the scale's gradient
    for side, part, total in products(sweep, own, with_x, need_y, rows, cols):
        target = out[side][part] if needed[side] else None
        with_scale = need_scale and with_x == (side == "x")
        found = own.write_grad(total, side, part, factor, with_scale, target)
        parts.extend([] if found is None else [found])
        del total  # before the next one is made
    dx = restore(out["x"], orders.rows if need_x else None, 0)
    dy = restore(out["y"], orders.cols if need_y else None, 0)
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


def _upstream(own: StateTiles, side: SideGradient, order: Tensor | None) -> Any:
    if side.gradient is None:
        return None
    return own.make_upstream(sort(side.results, order, 1), sort(side.gradient, order, 1))


def _normalize(own: StateTiles, rows: Any, cols: Any, ranks: Ranks | None) -> Tensor | None:
    """Rescale the upstreams in place to fit float16; returns the factor that undoes it, or None.

    It is the same on all ranks, since their gradients are added up.
    """
    divisor = own.upstream_divisor(rows, cols)
    if ranks is not None and own.x.dtype == torch.float16:
        divisor = own.x.new_zeros((), dtype=torch.float32) if divisor is None else divisor
        comm.all_reduce(divisor, ranks.name, ranks.operation, dist.ReduceOp.MAX)
    if divisor is None:
        return None
    divisor = torch.where(divisor == 0, torch.ones_like(divisor), divisor)
    for packed in map(own.pack_upstream, (rows, cols)):
        if packed is not None:
            own.divide_upstream(packed, divisor)
    return divisor


def products(
    sweep: Sweep, own: Any, x: bool, y: bool, rows: Any = None, cols: Any = None
) -> Iterator[tuple[str, slice, Tensor]]:
    """Sweep all blocks once for the sums of dS y and dSᵀ x of this rank's rows and columns.

    Args:
        own: tiles of the sweep's matrix.
        x, y: whether the sums of each side are wanted; if symmetric, x's alone.
        rows, cols: the upstreams of this rank's rows and columns (if symmetric, the same).

    Yields:
        ("x" or "y", rows of that side, their sums), as soon as they are complete.
    """
    if sweep.ranks is not None:
        yield from _products_of_ranks(sweep, own, x, y, rows, cols)
    elif own.symmetric:
        total = own.new_total(own.m)
        add_products(own, rows, rows, total, total, (True, True))
        yield "x", slice(0, own.m), total
    else:  # a strip of rows is complete after its blocks
        dy = own.new_total(own.n) if y else None
        for i in own.row_blocks():
            strip = own.new_total(i.stop - i.start) if x else None
            add_strip(own, i, rows, cols, strip, dy, (True, i.start == 0))
            if strip is not None:
                yield "x", i, strip
            del strip  # before the next strip's is made
        if dy is not None:
            yield "y", slice(0, own.n), dy


def _products_of_ranks(
    sweep: Sweep, own: Any, x: bool, y: bool, rows: Any, cols: Any
) -> Iterator[tuple[str, slice, Tensor]]:
    ranks, symmetric, filled = sweep.ranks, own.symmetric, sweep.saved is not None
    assert ranks is not None
    saved_rows, saved_cols = _places(sweep)
    row_side, col_side = _sides(sweep, own)
    row_side = row_side._replace(upstream=own.pack_upstream(rows))
    col_side = col_side._replace(upstream=own.pack_upstream(cols))
    arriving = ranks.rows.gather(row_side, saved_rows, filled)
    rounds = ranks.rounds(col_side, saved_cols, filled)
    dx = own.new_total(ranks.rows.size) if x else None
    if symmetric and dx is not None:
        dx.zero_()
        add_products(own, rows, rows, dx, dx, (False, False))
    overwrite = (not symmetric, not symmetric)
    summing, at = None, slice(0, 0)  # the previous round's sums, on their way to their ranks
    for each in chain(rounds, [None]):
        dy = None
        if each is not None:
            dy = own.new_total(each.layout.size) if y or symmetric else None
            if symmetric and dy is not None:  # some of its columns are other ranks' work
                dy.zero_()
            _add_round(sweep, each, arriving.wait(), rows, dx, dy, overwrite)
            overwrite = (False, overwrite[1])
        elif dx is not None and not symmetric:  # during the last transfer of y's sums
            yield "x", slice(0, own.m), ranks.rows.sum(dx).wait()
        if summing is not None and not symmetric:
            yield "y", at, summing.wait()
        elif summing is not None and dx is not None:
            dx[at] += summing.wait()
        if each is not None and dy is not None:
            summing, at = each.layout.sum(dy), each.own
    if dx is not None and symmetric:
        yield "x", slice(0, own.m), dx


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
        add_products(tiles, rows, cols, *sums, overwrite)
        overwrite = (False, overwrite[1])


def add_products(
    tiles: Tiles,
    rows: Any,
    cols: Any,
    dx: Tensor | None,
    dy: Tensor | None,
    overwrite: tuple[bool, bool],
) -> None:
    """Add dS y of all rows to dx and dSᵀ x of all columns to dy.

    If symmetric, dx and dy are the same. `overwrite`: dx, dy are uninitialised.
    """
    if tiles.m == 0 or tiles.n == 0:  # no block writes them
        for total, new in zip((dx, dy), overwrite, strict=True):
            if new and total is not None:
                total.zero_()
    for i in tiles.row_blocks():
        strip = None if dx is None else dx[i]
        add_strip(tiles, i, rows, cols, strip, dy, (overwrite[0], overwrite[1] and i.start == 0))


def add_strip(
    tiles: Tiles,
    i: slice,
    rows: Any,
    cols: Any,
    dx: Tensor | None,
    dy: Tensor | None,
    overwrite: tuple[bool, bool],
) -> None:
    """Add the gradients of one strip of rows `i`: dx holds that strip, dy all columns."""
    for j in tiles.col_blocks(i):
        ds = tiles.gradient_block(i, j, rows, cols)
        if ds is None:
            continue
        if dy is not None and not (tiles.symmetric and i == j):
            add_product(dy[j], ds.T, tiles.x[i], overwrite[1])
        if dx is not None:
            add_product(dx, ds, tiles.y[j], overwrite[0] and j.start == 0)
