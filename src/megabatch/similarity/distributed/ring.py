"""Between devices: pieces of the ranks' shards travel a ring, each rank holds its rows to them.

Rank r keeps its rows. At step s of a round it is visited by a piece of the shard of rank r - s,
while the next piece is on its way to it from rank r - 1: reading features and sending them on do
not disturb each other. What a visit adds to the piece's owner (column statistics, gradients) must
follow later, and travels one step behind: each rank computes its own part afresh while the sum of
the parts before it arrives, adds the two and sends the sum on with the next exchange. So there is
one exchange a step, hidden behind that step's computation, and one more that brings the sum home.

Large shards travel in several rounds, a piece of each at a time, so that what is in flight is
bounded whatever their size.

Shards of one size need not travel: see `gathering`, which is faster on GPUs of one host (262,144 x
768 on 4 H200s: 179 ms instead of 184, most of which is ranks' waiting for each other at each step;
benchmarks/results/transfers-4gpu.json).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate

import torch
from torch import Tensor

from megabatch.similarity import settings
from megabatch.similarity.distributed import comm, gathered
from megabatch.similarity.distributed.comm import Swap
from megabatch.similarity.distributed.gathered import Place
from megabatch.similarity.distributed.schedule import (
    Parcel,
    Parts,
    Route,
    Visit,
    full,
    narrow,
    ordered,
    rows_only,
    symmetric,
)
from megabatch.similarity.settings import (
    DEFAULT_GATHER,
    DEFAULT_PIECE,
    set_gather,
    set_overlap,
    set_piece,
)

__all__ = [
    "DEFAULT_GATHER",
    "DEFAULT_PIECE",
    "Parcel",
    "Parts",
    "Ring",
    "Route",
    "Visit",
    "full",
    "ordered",
    "rows_only",
    "set_gather",
    "set_overlap",
    "set_piece",
    "symmetric",
]

#: A larger piece has a multiple of this many rows, as blocks of a GPU have.
UNIT = 16384

#: Where they take more, a round has this part of it: features of three and gradients of two are in
#: memory at once, and where there are many rounds smaller ones are as fast (98.9% at 1,048,576 rows
#: on 4 H200s; scaling.json).
ROUND = 4
#: Rows of a round are a multiple of this, as those of a GPU's tiles.
TILE = 128


def plan(features: Tensor) -> str:
    """How features like these (n, d) travel, in words that all ranks must agree on."""
    return (
        f"pieces of {piece_rows(features)} rows, gathered up to {settings.gather()} bytes, "
        f"transfers {'overlap' if settings.overlap() else 'one by one'}"
    )


def piece_rows(features: Tensor) -> int:
    """Rows of a piece of features like these (n, d)."""
    rows = max(1, settings.piece() // (features.shape[1] * features.element_size()))
    return rows if rows < UNIT else rows // UNIT * UNIT


def round_rows(size: int, row: int) -> int:
    """Rows of each rank's shard of `size` that are gathered at a time; 0: they travel the ring.

    row: bytes of features of one row of each rank.
    """
    gather = settings.gather()
    if size * row <= gather:
        return size
    most = gather // ROUND // row // TILE * TILE
    if most == 0:
        return 0
    rounds = -(-size // most)
    return -(-size // (rounds * TILE)) * TILE  # even rounds, of whole tiles


def keeps(features: Tensor, ranks: int, gather: int) -> bool:
    """Whether shards of this size, one a rank, stay for the backward pass where they are gathered.

    That is in one round, of up to `gather` bytes.
    """
    return 0 < ranks * features.numel() * features.element_size() <= gather


class Ring:
    """The ranks of one group with the sizes of their shards."""

    def __init__(self, name: str, sizes: Sequence[int], operation: str) -> None:
        """`name` of the group; `sizes` by rank; `operation` is how errors call what is going on."""
        self.group = comm.resolve(name)
        self.name, self.operation = name, operation
        self.rank, self.n = self.group.rank(), self.group.size()
        self.sizes = list(sizes)
        #: index of each shard's first row among the rows of all ranks
        self.starts = list(accumulate(self.sizes, initial=0))
        #: every rank's features, once they were gathered; a later ring of the same may start so
        self.gathered: Tensor | None = None

    def tour(
        self,
        parcels: Sequence[Parcel],
        visit: Callable[[Visit], None],
        route: Route,
        rows: int,
        parts: Parts | None = None,
        meanwhile: Callable[[], None] = lambda: None,
    ) -> Iterator[tuple[slice, Tensor]]:
        """Let this rank's shard visit the others while theirs come by.

        Args:
            parcels: this rank's shard, its features first.
            visit: called until all that the route brings has been here, the rank's own included.
            route: how far pieces go. rows: of a piece, the same on all ranks.
            parts: what a visit adds to, where the route carries that.
            meanwhile: called once, after the last visit, while what it brings is on its way home.

        Yields:
            `(rows of this rank's shard, what all ranks added to them: see Parts)`, as it comes
            home. It must be used up: the transfers happen on the way.

        Raises:
            CommunicationError: naming the operation, the step, this rank and its neighbours.
        """
        rounds = self._gatherings(parcels[0], route)
        if not rounds:
            yield from self._in_turn(parcels, visit, route, rows, parts, meanwhile)
            return
        place = Place(self.group, self.rank, self.sizes[0], self.operation, settings.overlap())
        home = parts if route.carried else None
        self.gathered = yield from gathered.tour(
            place, rounds, parcels, visit, home, meanwhile, self.gathered
        )

    def _in_turn(
        self,
        parcels: Sequence[Parcel],
        visit: Callable[[Visit], None],
        route: Route,
        rows: int,
        parts: Parts | None,
        meanwhile: Callable[[], None],
    ) -> Iterator[tuple[slice, Tensor]]:
        """Around the ring."""
        home: tuple[Parts, Swap, slice, Tensor] | None = None
        for pieces in self._rounds(rows):
            here = tuple(narrow(parcel, pieces[self.rank]) for parcel in parcels)
            carry: Tensor | None = None
            for step in range(route.steps):
                owner = self._owner(step)
                piece = pieces[owner]
                swap = self._swap(f"ring step {step + 1} of {route.steps}", 1)
                coming = here
                if step + 1 < route.steps:
                    size = _length(pieces[self._owner(step + 1)])
                    coming = tuple(
                        None if t is None else swap.add(t, size, parcel.dim)
                        for t, parcel in zip(here, parcels, strict=True)
                    )
                arriving = part = None
                if carry is not None:
                    assert parts is not None
                    arriving = swap.add(carry, _length(piece), parts.dim)
                _start(swap)
                if step in route.carried:
                    assert parts is not None
                    part = parts.empty(_length(piece))
                visit(Visit(owner, piece, self.starts[owner] + piece.start, here, part))
                swap.wait()
                here = coming
                if home is not None:
                    yield _arrived(*home)
                    home = None
                if part is not None:
                    assert parts is not None
                    carry = part if arriving is None else _join(parts, arriving, part)
                    if step == route.carried[-1]:
                        own = pieces[self.rank]
                        swap = self._swap("ring's way home", -step)
                        home = parts, swap, own, swap.add(carry, _length(own), parts.dim)
                        _start(swap)
                        carry = None
        meanwhile()
        if home is not None:
            yield _arrived(*home)

    def _gatherings(self, features: Parcel, route: Route) -> list[slice]:
        """The rounds in which all ranks' columns are gathered; none where they are not.

        Alike on all ranks.
        """
        size = self.sizes[0]
        if not route.everyone or size == 0 or len(set(self.sizes)) > 1:
            return []
        assert features.tensor is not None
        step = round_rows(size, self.n * features.tensor.nbytes // size)
        if step == 0 or (route.ordered and step < size):
            return []
        return [slice(i, min(i + step, size)) for i in range(0, size, step)]

    def _rounds(self, rows: int) -> Iterator[list[slice]]:
        """For each round the rows of each rank's piece in its shard, empty where it has no more."""
        for first in range(0, max(self.sizes), rows):
            yield [slice(min(first, size), min(first + rows, size)) for size in self.sizes]

    def _owner(self, step: int) -> int:
        """Whose piece is here at a step."""
        return (self.rank - step) % self.n

    def _swap(self, what: str, distance: int) -> Swap:
        """Sends `distance` ranks on."""
        to, source = (self.rank + distance) % self.n, (self.rank - distance) % self.n
        return Swap(self.group, to, source, f"{self.operation}: {what}")


def _join(parts: Parts, before: Tensor, part: Tensor) -> Tensor:
    return before.add_(part) if parts.merge is None else parts.merge(torch.stack([before, part]))


def _length(rows: slice) -> int:
    return rows.stop - rows.start


def _start(swap: Swap) -> None:
    swap.start()
    if not settings.overlap():
        swap.wait()


def _arrived(parts: Parts, swap: Swap, rows: slice, total: Tensor) -> tuple[slice, Tensor]:
    swap.wait()
    return rows, total if parts.merge is None else total[None]
