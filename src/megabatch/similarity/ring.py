"""Between devices: pieces of the ranks' shards travel a ring, each rank holds its rows to them.

Rank r keeps its rows. At step s of a round it is visited by a piece of the shard of rank r - s,
while the next piece is on its way to it from rank r - 1: reading features and sending them on do
not disturb each other. What a visit adds to the piece's owner (column statistics, gradients) must
follow later, and travels one step behind: each rank computes its own part afresh while the sum of
the parts before it arrives, adds the two and sends the sum on with the next exchange. So there is
one exchange a step, hidden behind that step's computation, and one more that brings the sum home.

Large shards travel in several rounds, a piece of each at a time, so that what is in flight is
bounded whatever their size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

from torch import Tensor

from megabatch.similarity import exchange
from megabatch.similarity.exchange import Swap

#: Bytes of features of a piece: 32,768 rows of 768 bfloat16 numbers, whose products are as fast as
#: larger ones. Two pieces of features and three of fp32 gradients are in memory at once.
DEFAULT_PIECE = 48 << 20
#: A larger piece has a multiple of this many rows, as blocks of a GPU have.
UNIT = 16384

_piece = DEFAULT_PIECE
_overlap = True


def set_overlap(on: bool) -> bool:
    """Whether transfers overlap computation (they do at the start); returns how it was before.

    For measuring what overlap is worth: off, each exchange is waited for before its step's
    computation. It changes no result. Holds for all calls in this process.
    """
    global _overlap
    before, _overlap = _overlap, bool(on)
    return before


def set_piece(size: int | None) -> int:
    """Bound the features that travel at once, in bytes; returns the bound before.

    All ranks must set the same. None is the bound at the start, 48 MiB.

    Raises:
        TypeError: `size` is neither None nor an integer.
        ValueError: `size` is not positive.
    """
    global _piece
    if size is not None and (not isinstance(size, int) or isinstance(size, bool)):
        raise TypeError(f"size: expected a number of bytes, got {type(size).__name__}")
    if size is not None and size < 1:
        raise ValueError(f"size: expected at least 1 byte, got {size}")
    before, _piece = _piece, DEFAULT_PIECE if size is None else size
    return before


def piece_rows(features: Tensor) -> int:
    """Rows of a piece of features like these (n, d)."""
    rows = max(1, _piece // (features.shape[1] * features.element_size()))
    return rows if rows < UNIT else rows // UNIT * UNIT


class Route(NamedTuple):
    """How far a piece goes: `full`, `rows_only` or `symmetric`."""

    steps: int  #: visits, the first one at home
    carried: range  #: the steps after which what a visit added travels on, and home after the last


def full(n: int) -> Route:
    """Every rank is visited and adds to what the piece brings home."""
    return Route(n, range(n))


def rows_only(n: int) -> Route:
    """Every rank is visited; nothing comes home."""
    return Route(n, range(0))


def symmetric(n: int) -> Route:
    """Half the ranks are visited, where the block of ranks (r, o) is the mirror of (o, r).

    A visit serves both. What it adds goes straight home after the last one, (n - 1) // 2 ranks
    on. Where n is even, opposite ranks visit each other and each keeps its own part: that block is
    computed twice, n / 2 + 1 / 2 blocks a rank instead of the full route's n.
    """
    return Route(n // 2 + 1, range(1, (n + 1) // 2))


class Parcel(NamedTuple):
    """A tensor that travels, in pieces of its rows along `dim`; None where there is nothing."""

    tensor: Tensor | None
    dim: int = 0


class Visit(NamedTuple):
    """A piece of a rank's shard, at this rank."""

    step: int
    rows: slice  #: of its owner's shard
    start: int  #: of its first row among those of all ranks
    cargo: tuple[Tensor | None, ...]

    @property
    def size(self) -> int:
        """Number of rows."""
        return _length(self.rows)


class Ring:
    """The ranks of one group with the sizes of their shards."""

    def __init__(self, name: str, sizes: Sequence[int], operation: str) -> None:
        """`name` of the group; `sizes` by rank; `operation` is how errors call what is going on."""
        self.group = exchange.resolve(name)
        self.name, self.operation = name, operation
        self.rank, self.n = self.group.rank(), self.group.size()
        self.sizes = list(sizes)
        #: index of each shard's first row among the rows of all ranks
        self.starts = list(accumulate(self.sizes, initial=0))

    def tour(
        self,
        parcels: Sequence[Parcel],
        visit: Callable[[Visit], Tensor | None],
        route: Route,
        rows: int,
        *,
        dim: int = 0,
        merge: Callable[[Tensor, Tensor], Tensor] = Tensor.add_,
    ) -> Iterator[tuple[slice, Tensor]]:
        """Take this rank's shard around the ring while the others' come by.

        Args:
            parcels: this rank's shard.
            visit: called for every piece that comes by, the rank's own at step 0. Returns what it
                adds to the piece's owner at the steps that the route carries.
            route: how far pieces go. rows: of a piece, the same on all ranks.
            dim: along which that lies in what `visit` returns.
            merge: (sum of the parts before, this rank's part) -> their sum; may reuse either.

        Yields:
            `(rows of this rank's shard, sum of what all ranks added to them)`, as it comes home.
            It must be used up: the transfers happen on the way.

        Raises:
            CommunicationError: naming the operation, the step, this rank and its neighbours.
        """
        home: tuple[Swap, slice, Tensor] | None = None
        for pieces in self._rounds(rows):
            here = tuple(_narrow(parcel, pieces[self.rank]) for parcel in parcels)
            carry: Tensor | None = None
            for step in range(route.steps):
                piece = pieces[self._owner(step)]
                swap = self._swap(f"ring step {step + 1} of {route.steps}", 1)
                coming = here
                if step + 1 < route.steps:
                    size = _length(pieces[self._owner(step + 1)])
                    coming = tuple(
                        None if t is None else swap.add(t, size, parcel.dim)
                        for t, parcel in zip(here, parcels, strict=True)
                    )
                arriving = None if carry is None else swap.add(carry, _length(piece), dim)
                _start(swap)
                start = self.starts[self._owner(step)] + piece.start
                part = visit(Visit(step, piece, start, here))
                swap.wait()
                here = coming
                if home is not None:
                    yield _arrived(*home)
                    home = None
                if step in route.carried:
                    assert part is not None
                    carry = part if arriving is None else merge(arriving, part)
                    if step == route.carried[-1]:
                        own = pieces[self.rank]
                        swap = self._swap("ring's way home", -step)
                        home = swap, own, swap.add(carry, _length(own), dim)
                        _start(swap)
                        carry = None
        if home is not None:
            yield _arrived(*home)

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


def _narrow(parcel: Parcel, rows: slice) -> Tensor | None:
    if parcel.tensor is None:
        return None
    return parcel.tensor.narrow(parcel.dim, rows.start, _length(rows))


def _length(rows: slice) -> int:
    return rows.stop - rows.start


def _start(swap: Swap) -> None:
    swap.start()
    if not _overlap:
        swap.wait()


def _arrived(swap: Swap, rows: slice, total: Tensor) -> tuple[slice, Tensor]:
    swap.wait()
    return rows, total
