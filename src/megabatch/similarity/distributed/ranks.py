"""The schedules of a group of ranks, each of which has a shard of the columns.

Shards of one size are gathered (`gathered`), which is faster on GPUs of one host: 262,144 x 768 on
4 H200s take 179 ms instead of 184 around the ring, most of it ranks' waiting for each other at each
step (benchmarks/results/transfers-4gpu.json). Shards of different sizes use the ring (`ring`) on
one host. It passes chunks from one rank to the next, by one network card of a host; between hosts
they are gathered too, by all cards. x against itself uses half of a ring (`halves`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate

import torch
from torch import Tensor

from megabatch.similarity import settings
from megabatch.similarity.distributed import comm, gathered, halves, hosts, ring
from megabatch.similarity.distributed.schedule import OnChunk, Partials, Route, Rows, Shard


def plan(features: Tensor) -> str:
    """Description of how features like these (n, d) are sent, on which all ranks must agree."""
    grid = settings.grid()
    return (
        f"chunks of {ring.chunk_rows(features)} rows, gathered up to {settings.gather()} bytes, "
        f"transfers {'overlap' if settings.overlap() else 'one by one'}, "
        f"grid: {'by hosts' if grid < 0 else f'{grid} columns' if grid else 'never'}"
    )


class Ranks:
    """The ranks of one group and the sizes of their shards; see `Schedule`."""

    alone = False

    def __init__(
        self, name: str, sizes: Sequence[int], operation: str, device: torch.device
    ) -> None:
        """`name`: of the group. `sizes`: columns by rank. `operation`: its name in errors.

        `device`: of the features.
        """
        self.group = comm.resolve(name)
        self.name, self.operation = name, operation
        self.rank, self.n = self.group.rank(), self.group.size()
        self.sizes = list(sizes)
        self.starts = list(accumulate(self.sizes, initial=0))
        self.rows = Rows(self.starts[self.rank])
        self._several_hosts = hosts.several(self.group, device)
        #: the features of all ranks, once they are gathered; a later run may start with them
        self.gathered: Tensor | None = None
        self._buffer: ring.FeatureBuffer | None = None

    def run(
        self,
        shards: Sequence[Shard],
        on_chunk: OnChunk,
        route: Route,
        partials: Partials | None = None,
        meanwhile: Callable[[], None] = lambda: None,
    ) -> Iterator[tuple[slice, Tensor]]:
        """See `Schedule`."""
        if route.symmetric:
            half = self._half()
            yield from halves.run(half, shards, on_chunk, partials, meanwhile, self._buffer)
            return
        features = shards[0].tensor
        assert features is not None
        rounds = self._gathered_rounds(features, route)
        if rounds:
            start, rows_end = self.starts[self.rank : self.rank + 2]
            ranks = gathered.GatheringRanks(
                self.group, self.sizes, start, rows_end, True, self.operation, settings.overlap()
            )
            carried = partials if route.carried else None
            found = yield from gathered.run(
                ranks, rounds, shards, on_chunk, carried, meanwhile, self.gathered
            )
            if len(set(self.sizes)) == 1:
                self.gathered = found
            return
        chunks = ring.rounds_of(self.sizes, ring.chunk_rows(features))
        yield from ring.run(self._ring(), chunks, shards, on_chunk, route, partials, meanwhile)

    def use_buffer(self, features: Tensor, filled: bool) -> None:
        """For x against itself: use the features of an earlier run, or save those of this one.

        Features of shards of different sizes, or of too many for this tensor, are sent again.

        Args:
            features: (rows, d), room for them. filled: an earlier run wrote them.
        """
        half = self._half()
        reached, size = half.ring.n // 2, half.sizes[0]
        if len(set(self.sizes)) == 1 and reached * size <= len(features):
            columns = features[: reached * size].unflatten(0, (reached, size))
            self._buffer = ring.FeatureBuffer(columns, filled)

    def _half(self) -> halves.GridPosition:
        """This rank's position for x against itself: a grid of one column, a ring of all ranks."""
        own = self.rows.bounds(self.sizes[self.rank])
        return halves.GridPosition(self._ring(), self.sizes, own, 0, self.rank)

    def _ring(self) -> ring.Ring:
        return ring.Ring(self.group, self.rank, self.n, self.starts, self.operation)

    def _gathered_rounds(self, features: Tensor, route: Route) -> list[slice]:
        """The rounds in which all ranks' columns are gathered; none for the ring.

        The result is the same on all ranks.
        """
        size = max(self.sizes)
        even = len(set(self.sizes)) == 1
        if size == 0 or not (even or self._several_hosts):
            return []
        row = self.n * features.shape[1] * features.element_size()
        step = gathered.round_rows(size, row, self._several_hosts)
        if step == 0 or (route.consecutive and step < size):
            return []
        return gathered.rounds_of(size, step)
