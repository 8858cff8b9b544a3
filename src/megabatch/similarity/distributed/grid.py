"""The grid schedule: each rank (r, c) of R x C computes a block of the matrix, not a strip.

Rank (r, c) gathers the rows of the ranks (r, *) and the columns of the ranks (*, c) and computes
the former against the latter: as many pairs as its own rows against all columns, but it receives
R - 1 + C - 1 shards instead of R C - 1. Columns are gathered in rounds, as those of any group
(`gathered`). States of rows are exchanged, and their gradients summed, along (r, *), those of
columns along (*, c).

All rows of the ranks (r, *) are in memory at once. Shards that are too large for that are gathered
by all ranks in rounds: their computation takes longer than any transfer (docs/distributed.md).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from megabatch.similarity import settings
from megabatch.similarity.distributed import gathered, sides
from megabatch.similarity.distributed.gathered import Layout
from megabatch.similarity.distributed.ranks import Ranks
from megabatch.similarity.distributed.schedule import (
    Gathered,
    OnChunk,
    Partials,
    Route,
    Rows,
    Shard,
    full,
    rows_only,
)
from megabatch.similarity.distributed.sides import Sides


def choose(
    name: str,
    sizes: Sequence[Sequence[int]],
    operation: str,
    features: Tensor,
    symmetric: bool = False,
) -> Ranks:
    """The schedule of a call over a group; the same on all ranks.

    A grid takes no empty shard, and not x against itself, of which other schedules compute half.

    Args:
        name: of the group. sizes: (rows by rank, columns by rank). operation: its name in errors.
        features: this rank's, (m, d). symmetric: x against itself.
    """
    rows, cols = sizes
    takes = not symmetric and min(*rows, *cols) > 0
    found = sides.of(name, features.device) if takes else None
    if found is not None:
        row = features.shape[1] * features.element_size()
        sharing = found.rows.size(), found.cols.size()
        if gathered.fits_grid(*sharing, max(rows), max(cols), row):
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
        groups: Sides,
    ) -> None:
        """As of `Ranks`; `rows`, `cols`: numbers of each by rank of the whole group."""
        super().__init__(name, cols, operation, device)
        self._cols, self._col_sizes = groups.cols, self._of(groups.cols, cols)
        layout = Layout(groups.rows, self._of(groups.rows, rows), operation)
        self.rows: SharedRows = SharedRows(layout, self.starts[self.rank])

    def _of(self, side: dist.ProcessGroup, sizes: Sequence[int]) -> list[int]:
        """The sizes of a side's ranks."""
        by_rank = dict(zip(dist.get_process_group_ranks(self.group), sizes, strict=True))
        return [by_rank[rank] for rank in dist.get_process_group_ranks(side)]

    def run(
        self,
        shards: Sequence[Shard],
        on_chunk: OnChunk,
        route: Route,
        partials: Partials | None = None,
        meanwhile: Callable[[], None] = lambda: None,
    ) -> Iterator[tuple[slice, Tensor]]:
        """See `Schedule`: the chunks are those of the ranks that share this one's columns."""
        features = shards[0].tensor
        assert features is not None
        n, size = self._cols.size(), max(self._col_sizes)
        row = n * features.shape[1] * features.element_size()
        rounds = gathered.rounds_of(size, gathered.round_rows(size, row))
        place = gathered.Place(
            self._cols,
            self._col_sizes,
            start=self.starts[self.rank],
            behind=self.rows.end,
            consecutive=False,
            operation=self.operation,
            overlap=settings.overlap(),
        )
        route, partials = (full(n), partials) if route.carried else (rows_only(n), None)
        yield from gathered.run(place, rounds, shards, on_chunk, route, partials, meanwhile, None)


class SharedRows(Rows):
    """The rows of the ranks (r, *), one rank after another."""

    shared = True

    def __init__(self, layout: Layout, start: int) -> None:
        """`start`: index of this rank's own rows, as in `Chunk`."""
        super().__init__(start - layout.starts[layout.group.rank()])
        self._layout = layout

    @property
    def end(self) -> int:
        """Index behind the last row."""
        return self.start + self._layout.starts[-1]

    def bounds(self, own: int) -> list[int]:
        """See `Rows`."""
        return self._layout.starts

    def gather(self, shards: Sequence[Shard]) -> Callable[[], Gathered]:
        """See `Rows`."""
        coming = [
            None if tensor is None else self._layout.gather(tensor, dim) for tensor, dim in shards
        ]

        def arrived() -> Gathered:
            tensors: list[Tensor | None] = []
            for transfer, shard in zip(coming, shards, strict=True):
                if transfer is not None:
                    transfer[1].wait()
                tensors.append(
                    None if transfer is None else self._layout.join(transfer[0], shard.dim)
                )
            return tuple(tensors)

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
