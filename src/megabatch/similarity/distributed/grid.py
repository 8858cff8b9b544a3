"""The grid schedule: each rank (r, c) of R x C computes a block of the matrix, not a strip.

Rank (r, c) gathers the rows of the ranks (r, *) and the columns of the ranks (*, c) and computes
the former against the latter: as many pairs as its own rows against all columns, but it receives
R - 1 + C - 1 shards instead of R C - 1. Columns are gathered in rounds, as those of any group
(`gathered`). States of rows are exchanged, and their gradients summed, along (r, *), those of
columns along (*, c). For x against itself the columns travel half of the way around a ring of the
ranks (*, c), so that R // 2 + C - 1 shards suffice (`halves`).

All rows of the ranks (r, *) are in memory at once. Shards that are too large for that are gathered
by all ranks in rounds: their computation takes longer than any transfer (docs/distributed.md).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from megabatch.similarity import settings
from megabatch.similarity.distributed import gathered, grid_groups, halves, ring
from megabatch.similarity.distributed.gathered import Layout
from megabatch.similarity.distributed.grid_groups import GridGroups
from megabatch.similarity.distributed.ranks import Ranks
from megabatch.similarity.distributed.schedule import (
    Gathered,
    OnChunk,
    Partials,
    Route,
    Rows,
    Shard,
)


def choose(
    name: str,
    sizes: Sequence[Sequence[int]],
    operation: str,
    features: Tensor,
    symmetric: bool = False,
) -> Ranks:
    """The schedule of a call over a group; the same on all ranks.

    A grid takes no empty shard.

    Args:
        name: of the group. sizes: (rows by rank, columns by rank). operation: its name in errors.
        features: this rank's, (m, d). symmetric: x against itself.
    """
    rows, cols = sizes
    row = features.shape[1] * features.element_size()
    most = gathered.most_sharing(max(rows), row)
    takes = min(*rows, *cols) > 0
    found = grid_groups.find(name, features.device, most, symmetric) if takes else None
    if found is not None:
        sharing = found.rows.size(), found.cols.size()
        if gathered.fits_grid(*sharing, max(rows), max(cols), row, symmetric):
            return Grid(name, rows, cols, operation, features.device, found)
    return Ranks(name, cols, operation, features.device)


class Grid(Ranks):
    """The ranks of a grid and the sizes of their shards; see `Schedule`."""

    def __init__(
        self,
        name: str,
        rows: Sequence[int],
        cols: Sequence[int],
        operation: str,
        device: torch.device,
        groups: GridGroups,
    ) -> None:
        """As of `Ranks`; `rows`, `cols`: numbers of each by rank of the whole group."""
        super().__init__(name, cols, operation, device)
        self._cols, self._col_sizes = groups.cols, self._of(groups.cols, cols)
        self._features: Tensor | None = None
        layout = Layout(groups.rows, self._of(groups.rows, rows), operation)
        self.rows: SharedRows = SharedRows(layout, self.starts[self.rank])

    @property
    def gathered(self) -> Tensor | None:
        """Features of the shared rows, then of the shared columns; a later run may start with them.

        They are copied into a tensor for the columns of all ranks, as operators return it. Both fit
        on any grid of several rows and columns; None if they do not, or were not gathered at once.
        """
        rows, cols = self.rows.features, self._features
        if rows is None or cols is None or len(set(self.sizes)) > 1:
            return None
        m, n = len(rows), len(cols)
        if m + n > self.starts[-1]:
            return None
        features = cols.new_empty(self.starts[-1], cols.shape[1])
        features[:m] = rows
        features[m : m + n] = cols
        return features

    @gathered.setter
    def gathered(self, features: Tensor | None) -> None:
        self._features = None
        if features is not None:
            m, n = self.rows.bounds(0)[-1], sum(self._col_sizes)
            if m + n <= len(features):
                self.rows.features, self._features = features[:m], features[m : m + n]

    def _of(self, part: dist.ProcessGroup, sizes: Sequence[int]) -> list[int]:
        """The sizes of the ranks of a row or column."""
        by_rank = dict(zip(dist.get_process_group_ranks(self.group), sizes, strict=True))
        return [by_rank[rank] for rank in dist.get_process_group_ranks(part)]

    def run(
        self,
        shards: Sequence[Shard],
        on_chunk: OnChunk,
        route: Route,
        partials: Partials | None = None,
        meanwhile: Callable[[], None] = lambda: None,
    ) -> Iterator[tuple[slice, Tensor]]:
        """See `Schedule`: the chunks are those of the ranks that share this one's columns."""
        if route.symmetric:
            yield from super().run(shards, on_chunk, route, partials, meanwhile)
            return
        features = shards[0].tensor
        assert features is not None
        n, size = self._cols.size(), max(self._col_sizes)
        row = n * features.shape[1] * features.element_size()
        rounds = gathered.rounds_of(size, gathered.round_rows(size, row))
        ranks = gathered.GatheringRanks(
            self._cols,
            self._col_sizes,
            start=self.starts[self.rank],
            rows_end=self.rows.end,
            consecutive=False,
            operation=self.operation,
            overlap=settings.overlap(),
        )
        carried = partials if route.carried else None
        self._features = yield from gathered.run(
            ranks, rounds, shards, on_chunk, carried, meanwhile, self._features
        )

    def use_buffer(self, features: Tensor, filled: bool) -> None:
        """See `Ranks`; the shared rows come first."""
        shared = self.rows.bounds(0)[-1]
        if shared <= len(features):
            super().use_buffer(features[shared:], filled)
        if self._buffer is not None:
            self.rows.use_buffer(features[:shared], filled)

    def _half(self) -> halves.GridPosition:
        """A ring of the ranks that share this one's columns."""
        n = self._cols.size()
        # No block of these columns has a pair (i, i): see `Chunk.start`.
        own = ring.Ring(self._cols, self._cols.rank(), n, [self.rows.end] * n, self.operation)
        bounds = self.rows.bounds(0)
        return halves.GridPosition(own, self._col_sizes, bounds, self.rows.column, self.rank)


class SharedRows(Rows):
    """The rows of the ranks (r, *), one rank after another."""

    shared = True

    def __init__(self, layout: Layout, start: int) -> None:
        """`start`: index of this rank's own rows, as in `Chunk`."""
        super().__init__(start - layout.starts[layout.group.rank()])
        self._layout = layout
        #: position of this rank's rows among those of these ranks
        self.column = layout.group.rank()
        #: those of all rows, once they are gathered; a later `gather` may start with them
        self.features: Tensor | None = None
        self._buffer: Tensor | None = None

    @property
    def end(self) -> int:
        """Index behind the last row."""
        return self.start + self._layout.starts[-1]

    def bounds(self, own: int) -> list[int]:
        """See `Rows`."""
        return self._layout.starts

    def use_buffer(self, features: Tensor, filled: bool) -> None:
        """See `Ranks.use_buffer`."""
        if filled:
            self.features = features
        else:
            self._buffer = features

    def gather(self, shards: Sequence[Shard]) -> Callable[[], Gathered]:
        """See `Rows`."""
        layout = self._layout
        ranks = gathered.GatheringRanks(
            layout.group, layout.sizes, 0, 0, True, layout.operation, True
        )
        coming = gathered.Round(ranks, slice(0, layout.padded), shards, self.features)
        if not settings.overlap():
            coming.wait()

        def arrived() -> Gathered:
            coming.wait()
            self.features = coming.gathered[0]
            if self._buffer is not None and self.features is not None:
                self._buffer.copy_(self.features)
            return tuple(coming.gathered)

        return arrived

    def exchange(self, states: Tensor) -> Tensor:
        """See `Rows`."""
        return self._layout.exchange(states, 1)

    def sum(self, totals: Tensor) -> Tensor:
        """See `Rows`."""
        total, pending = self._layout.sum(totals)
        pending.wait()
        return total

    def sum_by_rank(self, parts: Tensor) -> Tensor:
        """See `Rows`."""
        group = self._layout.group
        total, pending = gathered.reduce_scatter(parts, group, self._layout.operation)
        pending.wait()
        return total[0]
