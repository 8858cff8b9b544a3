"""Shards of one size: all ranks gather chunks of all of them at once.

For small shards, launching n ring steps takes longer than the computation, and at each step every
rank waits for the slowest. Here each rank computes its rows against a chunk of all ranks' columns
at once; then an all-to-all exchanges states, to be merged, and a reduce-scatter sums gradients.
Large shards are gathered in rounds, one chunk of each shard per round, so that the memory in flight
is bounded for any shard size: while one round is computed, the next one's columns arrive and the
gradients of the previous one are summed.

In the first round a rank's own columns come first, while the others' arrive (262,144 rows on 4
H200s: 181.6 ms instead of 182.1, 65,536: 12.07 instead of 12.21;
benchmarks/results/hiding-4gpu.json). The rows' own results are completed during the last transfer
(65,536 on 2: 23.51 instead of 23.62; hiding-2gpu.json). Hiding a round's own transfers behind parts
of its computation as well gained nothing (there and in scaling-two-parts.json).
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from typing import NamedTuple

import torch.distributed as dist
from torch import Tensor

from megabatch.similarity import settings
from megabatch.similarity.distributed.comm import (
    Pending,
    all_gather,
    all_to_all,
    let_begin,
    reduce_scatter,
)
from megabatch.similarity.distributed.schedule import Chunk, OnChunk, Partials, Shard

#: With at least this many rows of a rank in a round, its own columns come first, and `let_begin` is
#: called for transfers of results. With fewer, launches by the host decide the time.
LARGE = 16_384

#: Shards above the bound are gathered in rounds of this part of it: features of three rounds and
#: gradients of two are in memory at once, and smaller rounds are as fast where there are many
#: (98.9% at 1,048,576 rows on 4 H200s; scaling.json).
ROUND = 4
#: Rows of a round are a multiple of this, as those of a GPU's tiles.
TILE = 128


def round_rows(size: int, row: int) -> int:
    """Rows of each rank's shard of `size` rows that are gathered at a time; 0: use the ring.

    row: bytes of features of one row of each rank.
    """
    limit = settings.gather()
    if size * row <= limit:
        return size
    most = limit // ROUND // row // TILE * TILE
    if most == 0:
        return 0
    rounds = -(-size // most)
    return -(-size // (rounds * TILE)) * TILE  # even rounds, of whole tiles


def fits_one_round(features: Tensor, ranks: int, limit: int) -> bool:
    """Whether shards of this size, one a rank, are gathered in one round of up to `limit` bytes.

    They are then saved for the backward pass.
    """
    return 0 < ranks * features.numel() * features.element_size() <= limit


class Place(NamedTuple):
    """This rank in its group."""

    group: dist.ProcessGroup
    rank: int
    size: int  #: rows of every shard
    operation: str  #: for errors
    overlap: bool  #: transfers of a round run beside the computation of others


class Round:
    """A transfer of these rows of every rank's shard; the features may be gathered already."""

    def __init__(
        self, place: Place, rows: slice, shards: Sequence[Shard], features: Tensor | None
    ) -> None:
        self.place, self.rows = place, rows
        self.size = rows.stop - rows.start
        self.own = [Shard(shard.narrow(rows), shard.dim) for shard in shards]
        self.gathered: list[Tensor | None] = [features] + [None] * (len(shards) - 1)
        self._pending: dict[int, Pending] = {}
        for k, shard in enumerate(self.own):
            if shard.tensor is not None and self.gathered[k] is None:
                self.gathered[k], self._pending[k] = all_gather(
                    shard.tensor, place.group, place.operation
                )

    def wait(self) -> None:
        """Wait for the whole transfer, on this rank's stream."""
        for k, pending in self._pending.items():
            pending.wait()
            whole, dim = self.gathered[k], self.own[k].dim
            assert whole is not None
            self.gathered[k] = whole.movedim(0, dim).flatten(dim, dim + 1)
        self._pending = {}

    def chunks(self, found: Tensor | None, partials: Partials | None) -> Iterator[Chunk]:
        """This rank's own columns, then the others', which arrive meanwhile; or all at once.

        All at once if they are consecutive and have arrived, or will soon.
        """
        m, rank, size = self.size, self.place.rank, self.place.size
        own, end = rank * m, self.place.group.size() * m  # places among the columns of this round
        if m == size and not (0 in self._pending and m >= LARGE):
            self.wait()
            yield self._chunk(0, end, 0, found, partials)
            return
        tensors = tuple(shard.tensor for shard in self.own)
        start = rank * size + self.rows.start
        yield Chunk(rank, self.rows, start, tensors, _share(found, partials, own, own + m))
        self.wait()
        # Columns of several ranks are not consecutive: they begin somewhere before this rank's
        # rows, or behind them.
        yield self._chunk(0, own, rank * size - own, found, partials)
        yield self._chunk(own + m, end, (rank + 1) * size, found, partials)

    def _chunk(
        self, a: int, b: int, start: int, found: Tensor | None, partials: Partials | None
    ) -> Chunk:
        tensors = tuple(
            None if whole is None else whole.narrow(shard.dim, a, b - a)
            for whole, shard in zip(self.gathered, self.own, strict=True)
        )
        return Chunk(None, slice(a, b), start, tensors, _share(found, partials, a, b))


def run(
    place: Place,
    rounds: Sequence[slice],
    shards: Sequence[Shard],
    on_chunk: OnChunk,
    partials: Partials | None,
    meanwhile: Callable[[], None],
    features: Tensor | None,
) -> Generator[tuple[slice, Tensor], None, Tensor | None]:
    """`Schedule.run` in these rounds; `partials` None: there are no partial results.

    `features`: those of all ranks, if they were gathered before; a single round uses them, and
    returns them at its end.
    """
    now = None
    coming = [Round(place, rounds[0], shards, features if len(rounds) == 1 else None)]
    summing: tuple[slice, Tensor, Pending] | None = None
    for k, rows in enumerate(rounds):
        now = coming.pop()
        if place.overlap and k + 1 < len(rounds):
            coming.append(Round(place, rounds[k + 1], shards, None))
        if not place.overlap:
            now.wait()
        found = None if partials is None else partials.empty(place.group.size() * now.size)
        for chunk in now.chunks(found, partials):
            if chunk.size:
                on_chunk(chunk)
        if summing is not None:
            yield _summed(*summing)
            summing = None
        if partials is not None and found is not None:
            if partials.merge is not None:
                yield rows, _of_all_ranks(found, now, partials)
            else:
                summing = (rows, *reduce_scatter(found, place.group, place.operation))
        if not place.overlap:
            if summing is not None:
                yield _summed(*summing)
                summing = None
            coming += [Round(place, r, shards, None) for r in rounds[k + 1 : k + 2]]
    if summing is not None and len(summing[1]) >= LARGE:
        let_begin(summing[1])
    meanwhile()
    if summing is not None:
        yield _summed(*summing)
    return now.gathered[0] if now is not None and len(rounds) == 1 else None


def _share(found: Tensor | None, partials: Partials | None, a: int, b: int) -> Tensor | None:
    return None if found is None or partials is None else found.narrow(partials.dim, a, b - a)


def _of_all_ranks(found: Tensor, now: Round, partials: Partials) -> Tensor:
    """The results of every rank for this one's rows, (ranks, ...)."""
    n = now.place.group.size()
    by_rank = found.unflatten(partials.dim, (n, now.size)).movedim(partials.dim, 0).contiguous()
    return all_to_all(by_rank, now.place.group, now.place.operation)


def _summed(rows: slice, total: Tensor, pending: Pending) -> tuple[slice, Tensor]:
    pending.wait()
    return rows, total
