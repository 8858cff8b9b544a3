"""The interface of a schedule, which exchanges rows, columns and results between ranks.

A schedule brings chunks of other ranks' columns to this rank, and returns this rank's partial
results for them to their owners. `Local` is the schedule of one process; `ranks.Ranks` that of a
group, which gathers (`gathered`) or passes chunks around a ring (`ring`). These compute this rank's
rows against all columns; `grid.Grid` shares rows between ranks as well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Protocol

from torch import Tensor


class Route(NamedTuple):
    """The ranks that a chunk reaches: made by `full`, `rows_only`, `consecutive` or `symmetric`."""

    steps: int  #: number of ranks that a chunk reaches, its owner first
    carried: range  #: steps whose partial results are passed on; after the last, to the owner
    symmetric: bool = False  #: x against itself: half of the blocks, see `symmetric`
    consecutive: bool = False  #: the rows of a chunk must be consecutive among those of all ranks


def full(n: int) -> Route:
    """Chunks reach all n ranks, and partial results return to their owners."""
    return Route(n, range(n))


def rows_only(n: int) -> Route:
    """Chunks reach all n ranks; there are no partial results."""
    return Route(n, range(0))


def consecutive(n: int) -> Route:
    """As `rows_only`, and each chunk's rows are consecutive."""
    return Route(n, range(0), consecutive=True)


def symmetric(n: int) -> Route:
    """Chunks reach half of the other ranks, since the block of ranks (r, o) serves (o, r) too.

    If n is even, opposite ranks get each other's chunks; each computes a part of their block, see
    `halves`. Partial results return to the owner from the last of these ranks.
    """
    return Route(n // 2 + 1, range(1, n // 2 + 1), symmetric=True)


class Shard(NamedTuple):
    """A tensor of this rank (or None) that is sent in chunks of its rows along `dim`."""

    tensor: Tensor | None
    dim: int = 0

    def narrow(self, rows: slice) -> Tensor | None:
        """These rows."""
        if self.tensor is None:
            return None
        return self.tensor.narrow(self.dim, rows.start, rows.stop - rows.start)


class Block(NamedTuple):
    """A part of the matrix: some of the rows that a rank computes, and columns of a chunk."""

    rows: slice  #: among those of `Rows`
    cols: slice  #: of the chunk


class Partials(NamedTuple):
    """Partial results for the owner of a chunk: one tensor from each rank, rows along `dim`."""

    empty: Callable[[int], Tensor]  #: a tensor for so many rows, to be written
    dim: int = 0
    #: (k, ...) -> k of them merged; the owner then gets (k, ...). None: the owner gets their sum.
    merge: Callable[[Tensor], Tensor] | None = None
    #: sets a tensor to the results of no row at all, in place
    clear: Callable[[Tensor], Tensor] = Tensor.zero_


class Chunk(NamedTuple):
    """Columns of one rank or of several, at this rank."""

    owner: int | None  #: the rank whose columns they are; None: several ranks', or another's
    rows: slice  #: in its owner's shard, or among all shards one after another
    start: int  #: index of the first among the columns of all ranks. If these are not consecutive:
    #: a place where the diagonal does not cross them
    tensors: tuple[Tensor | None, ...]  #: of the shards, in their order
    partial: Tensor | None  #: to be written, if the route has partial results; uninitialised
    blocks: tuple[Block, ...] | None = None  #: to be computed; None: all rows against all columns

    @property
    def size(self) -> int:
        """Number of columns."""
        return self.rows.stop - self.rows.start

    def narrow(self, block: Block, dims: Sequence[int], partials: Partials | None) -> Chunk:
        """The columns of a block; `dims`: of the tensors, along which they lie.

        Their place is given for rows that begin with the block's.
        """
        first, size = block.cols.start, block.cols.stop - block.cols.start
        tensors = tuple(
            None if t is None else t.narrow(dim, first, size)
            for t, dim in zip(self.tensors, dims, strict=True)
        )
        partial = self.partial
        if partial is not None and partials is not None:
            partial = partial.narrow(partials.dim, first, size)
        rows = slice(self.rows.start + first, self.rows.start + first + size)
        return Chunk(self.owner, rows, self.start + first - block.rows.start, tensors, partial)


OnChunk = Callable[[Chunk], None]
Gathered = tuple[Tensor | None, ...]  #: tensors of several shards, in their order


class Rows:
    """The rows that a rank computes against the columns of its chunks: its own.

    `grid.SharedRows` are those of several ranks, each of which computes them against other columns.
    """

    shared = False

    def __init__(self, start: int) -> None:
        """`start`: index of the first among the columns of all ranks, as in `Chunk`."""
        self.start = start

    def bounds(self, own: int) -> list[int]:
        """Where the rows of each rank begin, and where the last one's end; `own`: of this rank."""
        return [0, own]

    def gather(self, shards: Sequence[Shard]) -> Callable[[], Gathered]:
        """Begin to bring these tensors of all rows here; the result waits for them."""
        tensors = tuple(shard.tensor for shard in shards)
        return lambda: tensors

    def exchange(self, states: Tensor) -> Tensor:
        """Exchange states (numbers, rows) of all rows; returns every rank's of this rank's rows.

        Those are (k, numbers, own rows).
        """
        return states[None]

    def sum(self, totals: Tensor) -> Tensor:
        """Sum totals (rows, ...) of all rows over ranks; returns the sums of this rank's rows."""
        return totals

    def sum_by_rank(self, parts: Tensor) -> Tensor:
        """Sum parts (ranks that share rows, ...) over these ranks; returns this rank's own part."""
        return parts[0]


class Schedule(Protocol):
    """Exchanges columns and partial results between this rank and the others."""

    alone: bool  #: this process has all of them
    rank: int
    n: int  #: number of ranks
    starts: list[int]  #: index of each rank's first column among those of all ranks
    rows: Rows

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
            route: the ranks that chunks reach.
            partials: how partial results are made and merged, if the route has them.
            meanwhile: called once after the last chunk, during the last transfer of results.

        Yields:
            `(rows of this rank's shard, their results from all ranks: see Partials)`, as they
            arrive. The iterator must be exhausted, as it makes the transfers.

        Raises:
            CommunicationError: it names the operation, the step, this rank and its neighbours.
        """
        ...


class Local:
    """The schedule of one process: all columns at once."""

    alone, rank, n = True, 0, 1

    def __init__(self) -> None:
        self.starts, self.rows = [0], Rows(0)

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
