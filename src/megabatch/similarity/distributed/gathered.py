"""The gathered schedule: all ranks of a group gather chunks of all of its shards at once.

For small shards, launching n ring steps takes longer than the computation, and at each step every
rank waits for the slowest. Here each rank computes its rows against a chunk of all ranks' columns
at once; then an all-to-all exchanges states, to be merged, and a reduce-scatter sums gradients.
Large shards are gathered in rounds, one chunk of each shard per round, so that the memory in flight
is bounded for any shard size: while one round is computed, the next one's columns arrive and the
gradients of the previous one are summed. Shards of different sizes are padded to the largest.

In the first round a rank's own columns come first, while the others' arrive (262,144 rows on 4
H200s: 181.6 ms instead of 182.1, 65,536: 12.07 instead of 12.21;
benchmarks/results/hiding-4gpu.json). The rows' own results are completed during the last transfer
(65,536 on 2: 23.51 instead of 23.62; hiding-2gpu.json). Hiding a round's own transfers behind parts
of its computation as well gained nothing (there and in scaling-two-parts.json).
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from megabatch.similarity import settings
from megabatch.similarity.distributed.comm import (
    Pending,
    all_gather,
    all_to_all,
    reduce_scatter,
)
from megabatch.similarity.distributed.schedule import Chunk, OnChunk, Partials, Shard
from megabatch.similarity.slices import strips

#: With at least this many rows of a rank in a round, its own columns come first. With fewer,
#: launches by the host decide the time.
LARGE = 16_384

#: Shards above the bound are gathered in rounds of this part of it: features of three rounds and
#: gradients of two are in memory at once, and smaller rounds are as fast where there are many
#: (98.9% at 1,048,576 rows on 4 H200s; scaling.json).
ROUND = 4
#: Rows of a round are a multiple of this, as those of a GPU's tiles.
TILE = 128


def round_rows(size: int, row: int, several_hosts: bool = False) -> int:
    """Rows of each rank's shard of `size` rows that are gathered at a time; 0: use the ring.

    row: bytes of features of one row of each rank. several_hosts: the ring is the last resort, so
        that a round may have less than a tile's rows of each of many ranks.
    """
    limit, tile = settings.gather(), TILE
    if size * row <= limit:
        return size
    while several_hosts and tile > 1 and limit // ROUND // row < tile:
        tile //= 2
    most = limit // ROUND // row // tile * tile
    if most == 0:
        return 0
    rounds = -(-size // most)
    return -(-size // (rounds * tile)) * tile  # even rounds, of whole tiles


def fits_grid(
    columns: int, others: int, rows: int, cols: int, row: int, symmetric: bool = False
) -> bool:
    """Whether so many ranks may share rows of a grid, and so many others columns.

    rows, cols: of the largest shards. row: bytes of features of one row. symmetric: x against
        itself, whose columns come in chunks of a ring.
    """
    return columns <= most_sharing(rows, row) and (symmetric or round_rows(cols, others * row) > 0)


def most_sharing(rows: int, row: int) -> int:
    """Ranks whose `rows` rows of `row` bytes may be in memory at once, as those of a grid are."""
    return settings.gather() // max(1, rows * row)


def rounds_of(size: int, step: int) -> list[slice]:
    """The rows of each round of `step` rows of the largest shard, of `size` rows."""
    return list(strips(size, step))


def saved_shards(features: Tensor, ranks: int, symmetric: bool, limit: int) -> int:
    """The number of shards that are saved for the backward pass: all that a rank receives, or none.

    They are saved if they take up to `limit` bytes, as those of a round do, and if kernels take
    them without padding. Of x against itself these are half of all shards and one more, as many as
    a ring or any grid needs.
    """
    shards = ranks // 2 + 1 if symmetric else ranks
    whole_lines = features.shape[1] * features.element_size() % 16 == 0
    return shards if whole_lines and 0 < shards * features.nbytes <= limit else 0


class Layout:
    """The rows of a group's ranks, one rank after another, and their transfers.

    A transfer takes as many rows of each rank, so shorter shards are padded.
    """

    def __init__(self, group: dist.ProcessGroup, sizes: Sequence[int], operation: str) -> None:
        """`sizes`: rows by rank of the group, not all 0. `operation`: for errors."""
        self.group, self.operation = group, operation
        self.size = sizes[group.rank()]  #: of this rank's rows
        self.starts = list(accumulate(sizes, initial=0))  #: of each rank's rows; the end of all
        self.padded = max(sizes)
        self.sizes = list(sizes)
        self._even = min(sizes) == self.padded
        self._padded_rows: Tensor | None = None

    def gather(self, own: Tensor, dim: int) -> tuple[Tensor, Pending]:
        """Begin to gather all ranks' tensors, rows along `dim`; see `join`."""
        missing = self.padded - self.size
        if missing:
            own = F.pad(own, [0, 0] * (own.dim() - dim - 1) + [0, missing])
        return all_gather(own, self.group, self.operation)

    def join(self, gathered: Tensor, dim: int) -> Tensor:
        """All rows along `dim`, without padding, from what `gather` returned."""
        joined = gathered.movedim(0, dim).flatten(dim, dim + 1)
        return joined if self._even else joined.index_select(dim, self._rows(joined))

    def exchange(self, states: Tensor, dim: int) -> Tensor:
        """Every rank's states of this rank's rows, (ranks, ...); each gives states of all rows."""
        n = self.group.size()
        by_rank = self._pad(states, dim).unflatten(dim, (n, self.padded)).movedim(dim, 0)
        found = all_to_all(by_rank.contiguous(), self.group, self.operation)
        return found if self._even else found.narrow(dim + 1, 0, self.size).contiguous()

    def sum(self, totals: Tensor) -> tuple[Tensor, Pending]:
        """Begin to sum all ranks' totals of all rows, in place; those of this rank's rows."""
        found, pending = reduce_scatter(self._pad(totals, 0), self.group, self.operation)
        return found[: self.size], pending

    def _pad(self, joined: Tensor, dim: int) -> Tensor:
        """The inverse of `join`'s removal of padding, which is left uninitialised."""
        if self._even:
            return joined
        shape = list(joined.shape)
        shape[dim] = self.group.size() * self.padded
        return joined.new_empty(shape).index_copy_(dim, self._rows(joined), joined)

    def _rows(self, like: Tensor) -> Tensor:
        """The index of each row among the padded ones."""
        if self._padded_rows is None:
            total = self.starts[-1]
            shift = [rank * self.padded - start for rank, start in enumerate(self.starts[:-1])]
            # Few numbers leave the host, which therefore waits for no device.
            table = torch.tensor([shift, self.sizes], device="cpu").to(like.device)
            by_row = torch.repeat_interleave(table[0], table[1], output_size=total)
            self._padded_rows = by_row + torch.arange(total, device=like.device)
        return self._padded_rows


class GatheringRanks(NamedTuple):
    """The ranks that gather columns from each other, and where this rank's own columns are."""

    group: dist.ProcessGroup
    sizes: Sequence[int]  #: columns by rank of the group
    start: int  #: index of this rank's first column among those of all ranks
    rows_end: int  #: an index behind those of all rows that this rank computes
    consecutive: bool  #: the columns of this group are those of all ranks, in their order
    operation: str  #: for errors
    overlap: bool  #: transfers of a round overlap the computation of others


class Round:
    """A transfer of these rows of every rank's shard; the features may be gathered already."""

    def __init__(
        self, ranks: GatheringRanks, rows: slice, shards: Sequence[Shard], features: Tensor | None
    ) -> None:
        self.ranks = ranks
        parts = [slice(min(rows.start, size), min(rows.stop, size)) for size in ranks.sizes]
        self.rows = parts[ranks.group.rank()]
        sizes = [part.stop - part.start for part in parts]
        self.layout = Layout(ranks.group, sizes, ranks.operation)
        self.own = [Shard(shard.narrow(self.rows), shard.dim) for shard in shards]
        self.gathered: list[Tensor | None] = [features] + [None] * (len(shards) - 1)
        self._pending: dict[int, Pending] = {}
        for k, (tensor, dim) in enumerate(self.own):
            if tensor is not None and self.gathered[k] is None:
                self.gathered[k], self._pending[k] = self.layout.gather(tensor, dim)
        #: Chunks have their true index among the columns of all ranks.
        self._consecutive = ranks.consecutive and self.layout.padded == max(ranks.sizes)

    def wait(self) -> None:
        """Wait for the whole transfer, on this rank's stream."""
        for k, pending in self._pending.items():
            pending.wait()
            whole = self.gathered[k]
            assert whole is not None
            self.gathered[k] = self.layout.join(whole, self.own[k].dim)
        self._pending = {}

    def chunks(self, found: Tensor | None, partials: Partials | None) -> Iterator[Chunk]:
        """This rank's own columns, then the others', which arrive meanwhile; or all at once.

        All at once if they are consecutive and have arrived, or will soon.
        """
        starts, rank = self.layout.starts, self.ranks.group.rank()
        own_first = 0 in self._pending and self.layout.size >= LARGE
        if self._consecutive and not own_first:
            self.wait()
            yield self._chunk(0, starts[-1], 0, found, partials)
            return
        tensors = tuple(shard.tensor for shard in self.own)
        part = _share(found, partials, starts[rank], starts[rank + 1])
        yield Chunk(rank, self.rows, self.ranks.start + self.rows.start, tensors, part)
        self.wait()
        for a, b in ((starts[rank + 1], starts[-1]), (0, starts[rank])):
            start = a if self._consecutive else self.ranks.rows_end
            yield self._chunk(a, b, start, found, partials)

    def _chunk(
        self, a: int, b: int, start: int, found: Tensor | None, partials: Partials | None
    ) -> Chunk:
        tensors = tuple(
            None if whole is None else whole.narrow(shard.dim, a, b - a)
            for whole, shard in zip(self.gathered, self.own, strict=True)
        )
        return Chunk(None, slice(a, b), start, tensors, _share(found, partials, a, b))


def run(
    ranks: GatheringRanks,
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
    coming = [Round(ranks, rounds[0], shards, features if len(rounds) == 1 else None)]
    summing: tuple[slice, Tensor, Pending] | None = None
    for k in range(len(rounds)):
        now = coming.pop()
        if ranks.overlap and k + 1 < len(rounds):
            coming.append(Round(ranks, rounds[k + 1], shards, None))
        if not ranks.overlap:
            now.wait()
        found = None if partials is None else partials.empty(now.layout.starts[-1])
        for chunk in now.chunks(found, partials):
            if chunk.size:
                on_chunk(chunk)
        if summing is not None:
            yield _summed(*summing)
            summing = None
        if partials is not None and found is not None:
            if partials.merge is not None:
                yield now.rows, now.layout.exchange(found, partials.dim)
            else:
                summing = (now.rows, *now.layout.sum(found))
        if not ranks.overlap:
            if summing is not None:
                yield _summed(*summing)
                summing = None
            coming += [Round(ranks, r, shards, None) for r in rounds[k + 1 : k + 2]]
    meanwhile()
    if summing is not None:
        yield _summed(*summing)
    return now.gathered[0] if now is not None and len(rounds) == 1 else None


def _share(found: Tensor | None, partials: Partials | None, a: int, b: int) -> Tensor | None:
    return None if found is None or partials is None else found.narrow(partials.dim, a, b - a)


def _summed(rows: slice, total: Tensor, pending: Pending) -> tuple[slice, Tensor]:
    pending.wait()
    return rows, total
