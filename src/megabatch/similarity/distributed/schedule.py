"""How the other rows and columns reach a rank: what a schedule takes, and what it brings.

A schedule brings chunks of columns to this rank's rows and takes home what the rank adds to them.
`Local` is that of one process; `ranks.Ranks` is that of a group, which gathers (`gathered`) or
passes chunks around a ring (`ring`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Protocol

from torch import Tensor


class Route(NamedTuple):
    """How far chunks travel: `full`, `rows_only`, `consecutive` or `symmetric`."""

    steps: int  #: ranks that a chunk visits, its own first
    carried: range  #: steps after which the partial results travel on; they go home after the last
    everyone: bool = True  #: every rank is visited by every other rank's columns
    consecutive: bool = False  #: the rows of a chunk must be consecutive among those of all ranks


def full(n: int) -> Route:
    """Chunks visit all n ranks, and what these add comes home."""
    return Route(n, range(n))


def rows_only(n: int) -> Route:
    """Chunks visit all n ranks; nothing comes home."""
    return Route(n, range(0))


def consecutive(n: int) -> Route:
    """As `rows_only`, and each chunk's rows are consecutive."""
    return Route(n, range(0), consecutive=True)


def symmetric(n: int) -> Route:
    """Chunks visit half of the ranks, since the block of ranks (r, o) is the transpose of (o, r).

    One visit serves both. Its results go straight home after the last one, (n - 1) // 2 ranks on.
    If n is even, opposite ranks visit each other and each keeps its own part: that block is
    computed twice, n / 2 + 1 / 2 blocks a rank instead of the full route's n.
    """
    return Route(n // 2 + 1, range(1, (n + 1) // 2), everyone=False)


class Shard(NamedTuple):
    """A tensor of this rank that travels in chunks of its rows along `dim`; or None."""

    tensor: Tensor | None
    dim: int = 0

    def narrow(self, rows: slice) -> Tensor | None:
        """These rows."""
        if self.tensor is None:
            return None
        return self.tensor.narrow(self.dim, rows.start, rows.stop - rows.start)


class Partials(NamedTuple):
    """The results that visits add for a chunk's rank: one tensor a visit, rows along `dim`."""

    empty: Callable[[int], Tensor]  #: a tensor for so many rows, to be written
    dim: int = 0
    #: (k, ...) -> k of them merged; then (k, ...) comes home as well. None: their sum comes home.
    merge: Callable[[Tensor], Tensor] | None = None


class Chunk(NamedTuple):
    """Columns of one rank or of several, at this rank."""

    owner: int | None  #: the rank whose columns they are; None: several ranks'
    rows: slice  #: in its owner's shard, or among all shards one after another
    start: int  #: index of the first among the columns of all ranks. If these are not consecutive:
    #: a place where the diagonal does not cross them
    tensors: tuple[Tensor | None, ...]  #: of the shards, in their order
    partial: Tensor | None  #: to be written by the visit if the route carries it; uninitialised

    @property
    def size(self) -> int:
        """Number of columns."""
        return self.rows.stop - self.rows.start


OnChunk = Callable[[Chunk], None]


class Schedule(Protocol):
    """Who has the other columns."""

    alone: bool  #: this process has all of them
    rank: int
    n: int  #: number of ranks
    starts: list[int]  #: index of each rank's first column among those of all ranks

    def run(
        self,
        shards: Sequence[Shard],
        on_chunk: OnChunk,
        route: Route,
        partials: Partials | None = None,
        meanwhile: Callable[[], None] = lambda: None,
    ) -> Iterator[tuple[slice, Tensor]]:
        """Bring all chunks of the route to this rank.

        Args:
            shards: this rank's columns, the features first.
            on_chunk: called with each chunk, this rank's own columns included.
            route: how far chunks travel.
            partials: what `on_chunk` adds to, if the route carries results home.
            meanwhile: called once after the last chunk, while its results are on their way home.

        Yields:
            `(rows of this rank's shard, their results from all ranks: see Partials)`, as they come
            home. The iterator must be used up: the transfers happen on the way.

        Raises:
            CommunicationError: it names the operation, the step, this rank and its neighbours.
        """
        ...


class Local:
    """The schedule of one process: all columns at once."""

    alone, rank, n = True, 0, 1

    def __init__(self) -> None:
        self.starts = [0]

    def run(
        self,
        shards: Sequence[Shard],
        on_chunk: OnChunk,
        route: Route,
        partials: Partials | None = None,
        meanwhile: Callable[[], None] = lambda: None,
    ) -> Iterator[tuple[slice, Tensor]]:
        """See `Schedule`."""
        features, dim = shards[0]
        assert features is not None
        rows = slice(0, features.shape[dim])
        partial = partials.empty(rows.stop) if partials is not None and route.carried else None
        on_chunk(Chunk(0, rows, 0, tuple(shard.tensor for shard in shards), partial))
        meanwhile()
        if partial is not None and partials is not None:
            yield rows, partial if partials.merge is None else partial[None]
