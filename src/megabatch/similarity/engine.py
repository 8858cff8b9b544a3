"""The engine: sweeps of all blocks of a matrix, for any reduction, backend and schedule.

`reduce` merges blocks into the running states of rows and columns. `add_up_gradients` turns each
block into dS and adds dS y to the rows' gradient and dSᵀ x to the columns'.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from typing import Any, Generic, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from megabatch.similarity import masks
from megabatch.similarity.backends.eager import add_product
from megabatch.similarity.distributed import comm
from megabatch.similarity.distributed import schedule as routes
from megabatch.similarity.distributed.ranks import Ranks
from megabatch.similarity.distributed.schedule import (
    Chunk,
    Gathered,
    Partials,
    Route,
    Schedule,
    Shard,
)
from megabatch.similarity.masks import SortedMatrix
from megabatch.similarity.reductions.base import StateTiles, Tiles

T = TypeVar("T", bound=Tiles)
Deferred = list[Callable[[], None]]


class Sweep(Generic[T]):
    """A loop over the blocks of rows against columns, as a schedule brings them."""

    def __init__(
        self,
        schedule: Schedule,
        own: T,
        sides: tuple[Sequence[Shard], Sequence[Shard]],
        against: Callable[[Gathered, Chunk], T],
    ) -> None:
        """`own`: tiles of this rank's rows against its own columns.

        `sides`: this rank's rows and the tensors that belong to them, the features first, and its
        columns likewise. `against` makes the tiles of the rows' tensors against a chunk of columns.
        """
        self.schedule, self.own, self.sides, self.against = schedule, own, sides, against
        self.m = schedule.rows.bounds(own.m)[-1]  #: rows against which chunks are computed

    def run(
        self,
        on_tiles: Callable[[T, Gathered, Chunk], None],
        partials: Partials | None,
        meanwhile: Callable[[], None] = lambda: None,
        extra: tuple[Tensor | None, Tensor | None] = (None, None),
    ) -> Iterator[tuple[slice, Tensor]]:
        """`Schedule.run`; `on_tiles` gets the tiles of each chunk that has pairs with the rows.

        It also gets the rows' tensors and the chunk. `extra` (k, m), (k, n): further tensors of
        rows and columns, the last ones. `partials` None: there are no partial results for other
        ranks' columns. For x against itself, a rank's own part is one sweep over half of the
        blocks, with its own tiles.
        """
        own, alone = self.own, self.schedule.alone
        rows, cols = ([*side, Shard(t, 1)] for side, t in zip(self.sides, extra, strict=True))
        arrived = cache(self.schedule.rows.gather(rows))

        def on_chunk(chunk: Chunk) -> None:
            if own.symmetric and chunk.owner == self.schedule.rank:
                if chunk.rows.start == 0:  # the whole shard, in the first round
                    on_tiles(own, arrived(), chunk)
            elif alone:
                on_tiles(own, arrived(), chunk)
            elif self.m and chunk.size:
                on_tiles(self.against(arrived(), chunk), arrived(), chunk)

        return self.schedule.run(cols, on_chunk, self._route(partials), partials, meanwhile)

    def _route(self, partials: Partials | None) -> Route:
        n = self.schedule.n
        if self.own.symmetric:
            return routes.symmetric(n)
        return routes.rows_only(n) if partials is None else routes.full(n)


def reduce(sweep: Sweep[Any], cols: bool) -> tuple[Tensor, Tensor | None]:
    """The results of this rank's rows and, if wanted, of its columns."""
    own: StateTiles = sweep.own
    if sweep.schedule.alone:
        return own.reduce(cols)
    started = False

    def unwritten(size: int) -> Tensor:
        state = own.new_state(size)
        return state if sweep.m else own.clear(state)  # without rows no block is computed

    def on_tiles(tiles: StateTiles, _: Gathered, chunk: Chunk) -> None:
        nonlocal started
        tiles.forward(row_state, chunk.partial, (not started, True))
        started = True

    row_state = unwritten(sweep.m)
    col_results = own.new_results(own.n) if cols else None
    partials = Partials(unwritten, 1, own.merge, own.clear) if cols or own.symmetric else None
    for rows, states in sweep.run(on_tiles, partials):
        if own.symmetric:
            row_state[:, rows] = own.merge(torch.cat([row_state[None, :, rows], states]))
        elif col_results is not None:
            own.write_results(states, col_results[:, rows])
    if not started:  # no rank has a column
        own.clear(row_state)
    row_results = own.new_results(own.m)
    own.write_results(sweep.schedule.rows.exchange(row_state), row_results)
    return row_results, col_results


class Side(NamedTuple):
    """One side's results, and their upstream gradient, None if there is none."""

    results: Tensor
    gradient: Tensor | None

    def upstream(self, own: StateTiles, order: Tensor | None) -> Any:
        """The upstream that `Tiles.gradient_block` takes; `order`: of the sorted matrix."""
        if self.gradient is None:
            return None
        sides = (masks.sort(t, order, 1) for t in (self.results, self.gradient))
        return own.make_upstream(*sides)


def gradients(
    sweep: Sweep[Any],
    matrix: SortedMatrix,
    x: Tensor,
    y: Tensor | None,
    scale: Tensor,
    sides: tuple[Side, Side],
    need: tuple[bool, bool, bool],
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of x, y and scale for the results of `reduce`, empty if not needed.

    In a group, scale's is the mean over ranks, as `means.replicated` would make it without
    operators of its own.
    """
    own, schedule = sweep.own, sweep.schedule
    need_x, need_y, need_scale = need
    dx, dy = new_gradients(x, y, need_x, need_y)
    rows = sides[0].upstream(own, matrix.row_order)
    cols = rows if y is None else sides[1].upstream(own, matrix.col_order)
    size = _normalize(own, rows, None if y is None else cols, schedule)
    factor = scale if size is None else scale * size
    # The scale's gradient comes with dx, or with dy if x is frozen.
    with_x = need_x or not need_y or y is None
    parts: list[Tensor] = []  # of the scale's gradient

    def write(side: str, part: slice, total: Tensor) -> None:
        out, needed = (dx, need_x) if side == "x" else (dy, need_y)
        with_scale = need_scale and with_x == (side == "x")
        found = own.write_grad(total, side, part, factor, with_scale, out[part] if needed else None)
        parts.extend([] if found is None else [found])

    add_up_gradients(sweep, write, with_x, need_y and y is not None, rows, cols)
    dx = masks.restore(dx, matrix.row_order if need_x else None, 0)
    dy = masks.restore(dy, matrix.col_order if need_y and y is not None else None, 0)
    # One launch less if there is one part.
    dscale = parts[0] if len(parts) == 1 else sum(parts, torch.zeros_like(scale))
    if y is None:
        dscale = dscale / 2  # each pair was counted as (i, j) and as (j, i)
    if size is not None:
        dscale = dscale * size
    if isinstance(schedule, Ranks) and need_scale:
        dscale = comm.all_reduce(dscale, schedule.name, schedule.operation) / schedule.n
    return dx, dy, dscale


def new_gradients(x: Tensor, y: Tensor | None, need_x: bool, need_y: bool) -> tuple[Tensor, Tensor]:
    """Room for the gradients of x and y, empty if not needed."""
    dx = torch.empty_like(x) if need_x else x.new_empty(0)
    return dx, torch.empty_like(y) if need_y and y is not None else x.new_empty(0)


def _normalize(own: StateTiles, rows: Any, cols: Any, schedule: Schedule) -> Tensor | None:
    """Rescale the upstreams in place to fit float16; returns the factor that undoes it, or None.

    It is the same on all ranks, since their gradients are added up.
    """
    size = own.upstream_size(rows, cols)
    if isinstance(schedule, Ranks) and own.x.dtype == torch.float16:
        size = own.x.new_zeros((), dtype=torch.float32) if size is None else size
        comm.all_reduce(size, schedule.name, schedule.operation, dist.ReduceOp.MAX)
    if size is None:
        return None
    size = torch.where(size == 0, torch.ones_like(size), size)
    for numbers in map(own.numbers, (rows, cols)):
        if numbers is not None:
            own.divide_upstream(numbers, size)
    return size


def add_up_gradients(
    sweep: Sweep[Any],
    write: Callable[[str, slice, Tensor], None],
    x: bool,
    y: bool,
    rows: Any = None,
    cols: Any = None,
    after: Callable[[Any], None] = lambda tiles: None,
) -> None:
    """Sweep all blocks once; give the sums of dS y and dSᵀ x of this rank's rows to `write`.

    Args:
        write: called with "x" or "y", rows of that side, and their sums.
        x, y: whether the sums of each side are wanted; with y=None in the call, x alone.
        rows, cols: the upstreams of this rank's rows and columns (x against itself: the same); see
            `Tiles.gradient_block`.
        after: called with the tiles of each chunk when their blocks are done.
    """
    own, alone, shared = sweep.own, sweep.schedule.alone, sweep.schedule.rows.shared
    m, symmetric = sweep.m, sweep.own.symmetric
    # On one process each strip of rows is complete after its blocks: no accumulator of all rows.
    strip_by_strip = alone and not symmetric
    total = own.new_total(m) if x and not strip_by_strip else None
    deferred: Deferred = []
    started = False

    def on_tiles(tiles: Tiles, row_tensors: Gathered, chunk: Chunk) -> None:
        nonlocal started
        flush(deferred)
        ours = tiles.upstream(row_tensors[-1]) if shared else rows
        theirs = cols if tiles is own else tiles.upstream(chunk.tensors[-1])
        for i in tiles.row_blocks():
            if strip_by_strip:
                strip = own.new_total(i.stop - i.start) if x else None
            else:
                strip = None if total is None else total[i]
            first = i.start == 0
            overwrite = (first, first) if tiles.symmetric else (not started, first)
            others = total if tiles.symmetric else chunk.partial
            last = not (alone or tiles.symmetric) and i.stop == m
            add_strip(tiles, i, ours, theirs, strip, others, overwrite, deferred if last else None)
            if strip_by_strip and strip is not None:
                write("x", i, strip)
            del strip  # before the next strip's is made
        started = True
        after(tiles)

    def complete() -> None:
        """Write the sums of x, which are this rank's own, during the last transfer of y's."""
        flush(deferred)
        if total is not None and not symmetric:
            sums = sweep.schedule.rows.sum(total if started else total.zero_())
            write("x", slice(0, own.m), sums)

    partials = Partials(own.new_total) if y or symmetric else None
    sent = own.numbers(rows) if shared else None, None if alone else own.numbers(cols)
    for part, arrived in sweep.run(on_tiles, partials, complete, sent):
        if symmetric and total is not None:
            total[part] += arrived
        else:
            write("y", part, arrived)
        del arrived  # a view of this rank's sums for all ranks
    if symmetric and total is not None:
        write("x", slice(0, m), total if started else total.zero_())


def flush(deferred: Deferred) -> None:
    """Compute the deferred products."""
    while deferred:
        deferred.pop()()


def add_strip(
    tiles: Tiles,
    i: slice,
    rows: Any,
    cols: Any,
    dx: Tensor | None,
    dy: Tensor | None,
    overwrite: tuple[bool, bool],
    deferred: Deferred | None,
) -> None:
    """Add the gradients of one strip of rows `i`: dx holds that strip, dy all columns.

    If symmetric, dx and dy are views of one gradient of all rows. `overwrite`: dx, dy are
    uninitialised. `deferred`, if given, receives dx's last product, which the caller computes
    before the next strip, during the transfer of other ranks' columns.
    """
    for j in tiles.col_blocks(i):
        ds = tiles.gradient_block(i, j, rows, cols)
        if ds is None:
            continue
        if dy is not None and not (tiles.symmetric and i == j):
            add_product(dy[j], ds.T, tiles.x[i], overwrite[1])
        if dx is not None:
            product = partial(add_product, dx, ds, tiles.y[j], overwrite[0] and j.start == 0)
            if deferred is None or j.stop < tiles.n:
                product()
            else:
                deferred.append(product)
