"""What travels between devices, and how far."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor


class Route(NamedTuple):
    """How far a piece goes: `full`, `rows_only` or `symmetric`."""

    steps: int  #: visits, the first one at home
    carried: range  #: the steps after which what a visit added travels on, and home after the last
    everyone: bool = True  #: every rank visits every other
    ordered: bool = False  #: a visit's rows are to follow one another among those of all ranks


def full(n: int) -> Route:
    """Every rank is visited and adds to what the piece brings home."""
    return Route(n, range(n))


def rows_only(n: int) -> Route:
    """Every rank is visited; nothing comes home."""
    return Route(n, range(0))


def ordered(n: int) -> Route:
    """As `rows_only`, and each visit is of rows that follow one another."""
    return Route(n, range(0), ordered=True)


def symmetric(n: int) -> Route:
    """Half the ranks are visited, where the block of ranks (r, o) is the mirror of (o, r).

    A visit serves both. What it adds goes straight home after the last one, (n - 1) // 2 ranks
    on. Where n is even, opposite ranks visit each other and each keeps its own part: that block is
    computed twice, n / 2 + 1 / 2 blocks a rank instead of the full route's n.
    """
    return Route(n // 2 + 1, range(1, (n + 1) // 2), everyone=False)


class Parcel(NamedTuple):
    """A tensor that travels, in pieces of its rows along `dim`; None where there is nothing."""

    tensor: Tensor | None
    dim: int = 0


class Parts(NamedTuple):
    """What visits add to the rows they are paid by: one tensor a visit, rows along `dim`."""

    empty: Callable[[int], Tensor]  #: of so many rows, for a visit's to be written
    dim: int = 0
    #: (k, ...) -> k of them as one, and what comes home is such (k, ...); None: their sum
    merge: Callable[[Tensor], Tensor] | None = None


class Visit(NamedTuple):
    """Rows of other ranks' shards, or of this one's, at this rank."""

    owner: int | None  #: whose shard they are of; None: several ranks'
    rows: slice  #: of its owner's shard, or of all shards one after another
    start: int  #: of the first among the rows of all ranks; if these do not follow one another,
    #: a place where they would not touch this rank's own
    cargo: tuple[Tensor | None, ...]
    part: Tensor | None  #: to be written where the route carries it; holds nothing yet

    @property
    def size(self) -> int:
        """Number of rows."""
        return self.rows.stop - self.rows.start


def narrow(parcel: Parcel, rows: slice) -> Tensor | None:
    """These rows of a parcel."""
    if parcel.tensor is None:
        return None
    return parcel.tensor.narrow(parcel.dim, rows.start, rows.stop - rows.start)
