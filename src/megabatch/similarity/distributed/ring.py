"""The ring schedule: chunks of columns are passed from rank to rank, as in ring attention.

Rank r keeps its rows. At step s of a round it computes with columns of rank r - s, while it sends
them on and receives the next chunk from rank r - 1. Partial results for the chunk's owner (column
statistics, gradients) follow one step behind: a rank computes its own part while the sum of the
earlier parts arrives, adds the two and sends the sum on with the next exchange. So there is one
exchange per step, hidden behind that step's computation, and a last one that returns the sum to the
owner.

Large shards take several rounds, one chunk of each shard per round, so that the memory in flight is
bounded for any shard size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megabatch.similarity import settings
from megabatch.similarity.distributed.comm import P2PExchange
from megabatch.similarity.distributed.schedule import Chunk, OnChunk, Partials, Route, Shard

#: A larger chunk has a multiple of this many rows, as blocks of a GPU have.
UNIT = 16384


def chunk_rows(features: Tensor) -> int:
    """Rows of a chunk of features like these (n, d)."""
    rows = max(1, settings.chunk() // (features.shape[1] * features.element_size()))
    return rows if rows < UNIT else rows // UNIT * UNIT


class Ring(NamedTuple):
    """The ring of a group's ranks, as this rank sees it."""

    group: dist.ProcessGroup
    rank: int
    n: int
    starts: Sequence[int]  #: index of each rank's first column among those of all ranks
    operation: str  #: for errors

    def owner(self, step: int) -> int:
        """The rank whose columns this rank has at a step."""
        return (self.rank - step) % self.n

    def exchange(self, what: str, distance: int) -> P2PExchange:
        """Send to the rank `distance` steps ahead, receive from the one as far behind."""
        to, source = (self.rank + distance) % self.n, (self.rank - distance) % self.n
        return P2PExchange(self.group, to, source, f"{self.operation}: {what}")


class FeatureBuffer(NamedTuple):
    """The features that a rank receives, of shards of one size, or room for them."""

    features: Tensor  #: (steps - 1, rows of a shard, d)
    filled: bool  #: by an earlier run


def run(
    ring: Ring,
    rounds: Iterator[list[slice]],
    shards: Sequence[Shard],
    on_chunk: OnChunk,
    route: Route,
    partials: Partials | None,
    meanwhile: Callable[[], None],
    buffer: FeatureBuffer | None = None,
) -> Iterator[tuple[slice, Tensor]]:
    """As `Schedule.run`.

    Args:
        rounds: for each round, the rows of each rank's chunk in its shard.
        buffer: features of an earlier run, or room for those of this one.
    """
    returning: list[_Return] = []  # at most one
    for chunks in rounds:
        yield from _round(ring, chunks, shards, on_chunk, route, partials, buffer, returning)
    meanwhile()
    while returning:
        yield returning.pop().wait()


def _round(
    ring: Ring,
    chunks: Sequence[slice],
    shards: Sequence[Shard],
    on_chunk: OnChunk,
    route: Route,
    partials: Partials | None,
    buffer: FeatureBuffer | None,
    returning: list[_Return],
) -> Iterator[tuple[slice, Tensor]]:
    """Pass one chunk of each shard around the ring; `chunks`: its rows in its owner's shard.

    `returning`: the previous round's partial results on their way to their owners, which are
    yielded after the first step; at the end, those of this round.
    """
    # If the features are here, a rank's own chunk hides the last transfer and not the first one.
    known = buffer is not None and buffer.filled and len(route.carried) > 0
    current = tuple(shard.narrow(chunks[ring.rank]) for shard in shards)
    merged: Tensor | None = None
    own_chunk: Chunk | None = None
    for step in range(route.steps):
        owner = ring.owner(step)
        rows = chunks[owner]
        exchange = ring.exchange(f"ring step {step + 1} of {route.steps}", 1)
        upcoming = current
        if step + 1 < route.steps:
            coming = chunks[ring.owner(step + 1)]
            features = None if buffer is None else buffer.features[step, coming]
            upcoming = _pass_on(exchange, current, shards, coming, features, known)
        arriving = partial = None
        if merged is not None:
            assert partials is not None
            arriving = exchange.add(merged, _length(rows), partials.dim)
        _start(exchange)
        if step in route.carried:
            assert partials is not None
            partial = partials.empty(_length(rows))
        chunk = Chunk(owner, rows, ring.starts[owner] + rows.start, current, partial)
        if step == 0 and known:
            own_chunk = chunk
        else:
            on_chunk(chunk)
        exchange.wait()
        current = upcoming
        while returning:
            yield returning.pop().wait()
        if partial is not None:
            assert partials is not None
            merged = partial if arriving is None else _merge(partials, arriving, partial)
            if step == route.carried[-1]:
                own = chunks[ring.rank]
                returning.append(_return_to_owner(ring, partials, merged, step, own))
                merged = None
                if own_chunk is not None:
                    on_chunk(own_chunk)


class _Return(NamedTuple):
    """A transfer of merged partial results to the owners of their columns."""

    partials: Partials
    exchange: P2PExchange
    rows: slice  #: of this rank's shard
    total: Tensor  #: the results for them, filled at the end

    def wait(self) -> tuple[slice, Tensor]:
        """Wait for it; returns the rows and their results, as `Schedule.run` yields them."""
        self.exchange.wait()
        return self.rows, self.total if self.partials.merge is None else self.total[None]


def _return_to_owner(
    ring: Ring, partials: Partials, merged: Tensor, step: int, own: slice
) -> _Return:
    """Begin to send the results merged at the last `step`; `own`: rows of this rank's chunk."""
    exchange = ring.exchange("ring's last step, to the owner", -step)
    incoming = exchange.add(merged, _length(own), partials.dim)
    _start(exchange)
    return _Return(partials, exchange, own, incoming)


def _pass_on(
    exchange: P2PExchange,
    tensors: Sequence[Tensor | None],
    shards: Sequence[Shard],
    coming: slice,
    features: Tensor | None,
    known: bool,
) -> tuple[Tensor | None, ...]:
    """Send a chunk's tensors to the next rank; returns those of the chunk that comes, `coming`.

    `features`: its features if they are known, otherwise room for them; None: new ones.
    """
    found: list[Tensor | None] = []
    for k, (tensor, shard) in enumerate(zip(tensors, shards, strict=True)):
        room = features if k == 0 else None
        if tensor is not None and not (known and k == 0):
            room = exchange.add(tensor, _length(coming), shard.dim, room)
        found.append(room)
    return tuple(found)


def rounds_of(sizes: Sequence[int], rows: int) -> Iterator[list[slice]]:
    """For each round, the rows of each rank's chunk in its shard; empty if it has no more."""
    for first in range(0, max(sizes), rows):
        yield [slice(min(first, size), min(first + rows, size)) for size in sizes]


def _merge(partials: Partials, before: Tensor, partial: Tensor) -> Tensor:
    if partials.merge is None:
        return before.add_(partial)
    return partials.merge(torch.stack([before, partial]))


def _length(rows: slice) -> int:
    return rows.stop - rows.start


def _start(exchange: P2PExchange) -> None:
    exchange.start()
    if not settings.overlap():
        exchange.wait()
