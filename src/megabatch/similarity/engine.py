"""The engine: sweeps of all blocks of a matrix, for any reduction, backend and schedule.

`reduce` merges blocks into the running states of rows and columns. `accumulate_gradients` turns
each block into dS and adds dS y to the rows' gradient and dSᵀ x to the columns'.
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
    Block,
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


class Part(NamedTuple):
    """A part of the matrix that a sweep visits."""

    tiles: Any
    rows: slice  #: among all rows that this rank computes
    cols: slice | None  #: likewise, if its columns are among these rows: x against itself
    partial: Tensor | None  #: of its columns otherwise, see `Chunk`
    overwrite: bool  #: `partial` is uninitialised
    row_extra: Tensor | None  #: `extra` of these rows, see `Sweep.run`
    col_extra: Tensor | None  #: and of these columns


class Sweep(Generic[T]):
    """A loop over the blocks of rows against columns, as a schedule brings them."""

    def __init__(
        self,
        schedule: Schedule,
        own: T,
        sides: tuple[Sequence[Shard], Sequence[Shard]],
        make_tiles: Callable[[Gathered, Chunk], T],
    ) -> None:
        """`own`: tiles of this rank's rows against its own columns.

        `sides`: this rank's rows and the tensors that belong to them, the features first, and its
        columns likewise. `make_tiles`: the tiles of the rows' tensors against a chunk of columns.
        """
        self.schedule, self.own, self.sides, self.make_tiles = schedule, own, sides, make_tiles
        self.m = schedule.rows.bounds(own.m)[-1]  #: rows against which chunks are computed
        start = schedule.starts[schedule.rank] - schedule.rows.start
        self.own_rows = slice(start, start + own.m)  #: among them

    def run(
        self,
        on_part: Callable[[Part], None],
        partials: Partials | None,
        meanwhile: Callable[[], None] = lambda: None,
        extra: tuple[Tensor | None, Tensor | None] = (None, None),
    ) -> Iterator[tuple[slice, Tensor]]:
        """`Schedule.run`; `on_part` gets each part of the matrix that has pairs.

        `extra` (k, m), (k, n): further tensors of rows and columns, the last ones. `partials` None:
        there are no partial results for other ranks' columns. For x against itself, a rank's own
        part is one sweep over half of the blocks, with its own tiles.
        """
        own, alone = self.own, self.schedule.alone
        rows, cols = ([*side, Shard(t, 1)] for side, t in zip(self.sides, extra, strict=True))
        arrived = cache(self.schedule.rows.gather(rows))

        def on_chunk(chunk: Chunk) -> None:
            is_own = own.symmetric and chunk.owner == self.schedule.rank
            if alone or (is_own and chunk.rows.start == 0):  # the whole shard, in the first round
                on_part(Part(own, self.own_rows, None, chunk.partial, True, *extra))
            if alone:
                return
            whole = Block(slice(0, self.m), slice(0, chunk.size))
            blocks = [whole] if chunk.blocks is None else chunk.blocks
            blocks = [block for block in blocks if all(s.start < s.stop for s in block)]
            overwrite = False
            if partials is not None and chunk.partial is not None:
                overwrite = bool(blocks) and blocks[0].cols == whole.cols
                if not overwrite:
                    partials.clear(chunk.partial)
            for block in blocks:
                row_tensors = _narrow(arrived(), rows, block.rows)
                part = chunk.narrow(block, [shard.dim for shard in cols], partials)
                mirrored = _shifted(part.rows, self.own_rows.start) if is_own else None
                extras = row_tensors[-1], part.tensors[-1]
                tiles = self.make_tiles(row_tensors, part)
                on_part(Part(tiles, block.rows, mirrored, part.partial, overwrite, *extras))
                overwrite = False

        yield from self.schedule.run(cols, on_chunk, self._route(partials), partials, meanwhile)
        arrived()  # also if no block needed them

    def _route(self, partials: Partials | None) -> Route:
        n = self.schedule.n
        if self.own.symmetric:
            return routes.symmetric(n)
        return routes.rows_only(n) if partials is None else routes.full(n)


def _narrow(tensors: Gathered, shards: Sequence[Shard], rows: slice) -> Gathered:
    """These rows of tensors that are arranged as the shards."""
    pairs = zip(tensors, shards, strict=True)
    return tuple(Shard(tensor, shard.dim).narrow(rows) for tensor, shard in pairs)


def _shifted(rows: slice, start: int) -> slice:
    return slice(rows.start + start, rows.stop + start)


def reduce(sweep: Sweep[Any], cols: bool) -> tuple[Tensor, Tensor | None]:
    """The results of this rank's rows and, if wanted, of its columns."""
    own: StateTiles = sweep.own
    if sweep.schedule.alone:
        return own.reduce(cols)
    row_state = own.new_state(sweep.m)
    started = False

    def on_part(part: Part) -> None:
        nonlocal started
        first = not started and part.rows == slice(0, sweep.m)
        if not started and not first:
            own.clear(row_state)
        others = part.partial if part.cols is None else row_state[:, part.cols]
        part.tiles.forward(row_state[:, part.rows], others, (first, part.overwrite))
        started = True

    col_results = own.new_results(own.n) if cols else None
    partials = Partials(own.new_state, 1, own.merge, own.clear) if cols or own.symmetric else None
    for rows, states in sweep.run(on_part, partials):
        if own.symmetric:
            state = row_state[:, sweep.own_rows][:, rows]
            state.copy_(own.merge(torch.cat([state[None], states])))
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

    In a group, the scale's gradient is the mean over ranks, which saves the operators of
    `means.replicated`.
    """
    own, schedule = sweep.own, sweep.schedule
    need_x, need_y, need_scale = need
    dx, dy = new_gradients(x, y, need_x, need_y)
    rows = sides[0].upstream(own, matrix.row_order)
    cols = rows if y is None else sides[1].upstream(own, matrix.col_order)
    divisor = _normalize(own, rows, None if y is None else cols, schedule)
    factor = scale if divisor is None else scale * divisor
    # The scale's gradient comes with dx, or with dy if x is frozen.
    with_x = need_x or not need_y or y is None
    parts: list[Tensor] = []  # of the scale's gradient

    def write(side: str, part: slice, total: Tensor) -> None:
        out, needed = (dx, need_x) if side == "x" else (dy, need_y)
        with_scale = need_scale and with_x == (side == "x")
        found = own.write_grad(total, side, part, factor, with_scale, out[part] if needed else None)
        parts.extend([] if found is None else [found])

    accumulate_gradients(sweep, write, with_x, need_y and y is not None, rows, cols)
    dx = masks.restore(dx, matrix.row_order if need_x else None, 0)
    dy = masks.restore(dy, matrix.col_order if need_y and y is not None else None, 0)
    # One launch less if there is one part.
    dscale = parts[0] if len(parts) == 1 else sum(parts, torch.zeros_like(scale))
    if y is None:
        dscale = dscale / 2  # each pair was counted as (i, j) and as (j, i)
    if divisor is not None:
        dscale = dscale * divisor
    if isinstance(schedule, Ranks) and need_scale:
        dscale = comm.all_reduce(dscale, schedule.name, schedule.operation) / schedule.n
    return dx, dy, dscale


def new_gradients(x: Tensor, y: Tensor | None, need_x: bool, need_y: bool) -> tuple[Tensor, Tensor]:
    """Uninitialised gradients of x and y, empty if not needed."""
    dx = torch.empty_like(x) if need_x else x.new_empty(0)
    return dx, torch.empty_like(y) if need_y and y is not None else x.new_empty(0)


def _normalize(own: StateTiles, rows: Any, cols: Any, schedule: Schedule) -> Tensor | None:
    """Rescale the upstreams in place to fit float16; returns the factor that undoes it, or None.

    It is the same on all ranks, since their gradients are added up.
    """
    divisor = own.upstream_divisor(rows, cols)
    if isinstance(schedule, Ranks) and own.x.dtype == torch.float16:
        divisor = own.x.new_zeros((), dtype=torch.float32) if divisor is None else divisor
        comm.all_reduce(divisor, schedule.name, schedule.operation, dist.ReduceOp.MAX)
    if divisor is None:
        return None
    divisor = torch.where(divisor == 0, torch.ones_like(divisor), divisor)
    for packed in map(own.pack_upstream, (rows, cols)):
        if packed is not None:
            own.divide_upstream(packed, divisor)
    return divisor


def accumulate_gradients(
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
    own = sweep.own
    accumulator = _Accumulator(sweep, write, x, (rows, cols))

    def on_part(part: Part) -> None:
        accumulator.add(part)
        after(part.tiles)

    def complete() -> None:
        """Write the sums of x, which are this rank's own, during the last transfer of y's."""
        flush(accumulator.deferred)
        if not own.symmetric:
            accumulator.write_rows()

    partials = Partials(own.new_total) if y or own.symmetric else None
    alone = sweep.schedule.alone
    sent = (None, None) if alone else (own.pack_upstream(rows), own.pack_upstream(cols))
    for part, arrived in sweep.run(on_part, partials, complete, sent):
        if own.symmetric and accumulator.total is not None:
            accumulator.total[sweep.own_rows][part] += arrived
        else:
            write("y", part, arrived)
        del arrived  # a view of this rank's sums for all ranks
    if own.symmetric:
        accumulator.write_rows()


class _Accumulator:
    """Adds up dS y of all rows of a sweep, and dSᵀ x of each part's columns to its partial."""

    def __init__(
        self,
        sweep: Sweep[Any],
        write: Callable[[str, slice, Tensor], None],
        x: bool,
        upstreams: tuple[Any, Any],
    ) -> None:
        """Arguments of `accumulate_gradients`; `upstreams`: of this rank's rows and columns."""
        self.sweep, self.write, self.x, self.upstreams = sweep, write, x, upstreams
        # On one process a strip of rows is complete after its blocks: no accumulator of all rows.
        self.strip_by_strip = sweep.schedule.alone and not sweep.own.symmetric
        #: of all rows that this rank computes, uninitialised until a part has been added
        self.total = sweep.own.new_total(sweep.m) if x and not self.strip_by_strip else None
        self.deferred: Deferred = []
        self.started = False

    def add(self, part: Part) -> None:
        """Add the gradients of a part of the matrix; its last product of dS y may be deferred."""
        flush(self.deferred)
        tiles: Tiles = part.tiles
        total = self.total
        first = not self.started and part.rows == slice(0, self.sweep.m)
        if total is not None and not self.started and not first:
            total.zero_()
        rows, cols = self._upstreams_of(part)
        sums = None if total is None else total[part.rows]
        mirrored = part.rows if tiles.symmetric else part.cols
        others = part.partial if mirrored is None or total is None else total[mirrored]
        for i in tiles.row_blocks():
            if self.strip_by_strip:
                strip = self.sweep.own.new_total(i.stop - i.start) if self.x else None
            else:
                strip = None if sums is None else sums[i]
            top = i.start == 0
            overwrite = (first and top,) * 2 if tiles.symmetric else (first, top and part.overwrite)
            last = not (self.sweep.schedule.alone or tiles.symmetric) and i.stop == tiles.m
            deferred = self.deferred if last else None
            add_strip(tiles, i, rows, cols, strip, others, overwrite, deferred)
            if self.strip_by_strip and strip is not None:
                self.write("x", i, strip)
            del strip  # before the next strip's is made
        self.started = True

    def _upstreams_of(self, part: Part) -> tuple[Any, Any]:
        """The upstreams of a part's rows and columns: this rank's own, or those that were sent."""
        tiles: Tiles = part.tiles
        rows, cols = self.upstreams
        if part.rows != self.sweep.own_rows:
            rows = tiles.unpack_upstream(part.row_extra)
        if tiles is not self.sweep.own:
            cols = tiles.unpack_upstream(part.col_extra)
        return rows, cols

    def write_rows(self) -> None:
        """Write the sums of x of this rank's rows, over all ranks that share them."""
        if self.total is not None:
            total = self.total if self.started else self.total.zero_()
            sums = self.sweep.schedule.rows.sum(total)
            self.write("x", slice(0, self.sweep.own.m), sums)


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
