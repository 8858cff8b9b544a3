"""The schedule of x against itself: which rank computes which half of the matrix.

The block of shards (u, v) serves (v, u) as well, so each pair of different shards is computed once.
On a grid of R x C ranks, rank (r, c) has the rows of the ranks (r, *), and the columns of the ranks
(*, c) travel half of the way around a ring. It computes these rows against

- at step 0 its own columns: the rows of the (C - 1) / 2 ranks that follow it in its row of the grid
- then the columns of the ranks (r - s, c), s < R / 2: all rows
- if R is even, those of (r - R / 2, c): half of the rows, as that rank computes the other half

If C is even at step 0, or odd at the last one, two ranks have the same block of two shards: each
computes half of it. All ranks thus compute n / 2 blocks, one's own triangle included. A rank
receives C - 1 + R // 2 shards, and as many sums of gradients (docs/distributed.md).

A ring of all ranks is a grid of one column.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from torch import Tensor

from megabatch.similarity.distributed import ring
from megabatch.similarity.distributed.schedule import (
    Block,
    Chunk,
    OnChunk,
    Partials,
    Shard,
    symmetric,
)


class GridPosition(NamedTuple):
    """This rank (r, c) in a grid of ranks."""

    ring: ring.Ring  #: of the ranks (*, c)
    sizes: Sequence[int]  #: of their shards
    bounds: Sequence[int]  #: of the rows of the ranks (r, *), as `Rows.bounds` returns them
    column: int  #: c
    rank: int  #: in the group of all ranks


def run(
    position: GridPosition,
    shards: Sequence[Shard],
    on_chunk: OnChunk,
    partials: Partials | None,
    meanwhile: Callable[[], None],
    buffer: ring.FeatureBuffer | None,
) -> Iterator[tuple[slice, Tensor]]:
    """As `Schedule.run`; only this rank's own columns have an owner. `buffer`: as of `ring.run`."""

    def with_blocks(chunk: Chunk) -> None:
        assert chunk.owner is not None
        step = (position.ring.rank - chunk.owner) % position.ring.n
        found = blocks(position, step, chunk.rows)
        on_chunk(chunk._replace(owner=None if step else position.rank, blocks=found))

    features = shards[0].tensor
    assert features is not None
    rounds = ring.rounds_of(position.sizes, ring.chunk_rows(features))
    route = symmetric(position.ring.n)
    yield from ring.run(
        position.ring, rounds, shards, with_blocks, route, partials, meanwhile, buffer
    )


def blocks(position: GridPosition, step: int, chunk: slice) -> tuple[Block, ...]:
    """The blocks of this rank's rows against a chunk of columns at a step, its own triangle apart.

    `chunk`: its rows in its owner's shard.
    """
    bounds, count = position.bounds, len(position.bounds) - 1
    cols = slice(0, chunk.stop - chunk.start)
    if 0 < 2 * step < position.ring.n:
        return (Block(slice(0, bounds[-1]), cols),)
    # Of two ranks that have the same blocks, the first takes those from its own column on.
    first = position.column < count // 2 if step == 0 else position.ring.rank < step
    begin = position.column + (1 if step == 0 or not first else 0)
    whole, halved = divmod(count if step else count - 1, 2)
    found = [Block(rows, cols) for rows in _consecutive(bounds, begin % count, whole)]
    if halved:
        k = (begin + whole) % count
        start, stop = bounds[k : k + 2]
        if first:
            found.append(Block(slice(start, start + (stop - start) // 2), cols))
        else:
            half = position.sizes[position.ring.owner(step)] // 2
            found.append(Block(slice(start, stop), slice(max(0, half - chunk.start), cols.stop)))
    return tuple(found)


def _consecutive(bounds: Sequence[int], begin: int, number: int) -> Iterator[slice]:
    """The rows of so many ranks from `begin` on; after the last rank follows the first."""
    count = len(bounds) - 1
    end = begin + number
    for a, b in ((begin, min(end, count)), (0, end - count)):
        if a < b:
            yield slice(bounds[a], bounds[b])
