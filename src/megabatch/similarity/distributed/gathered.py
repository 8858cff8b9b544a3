"""Between devices, shards of one size: all ranks gather pieces of all of them at once.

n steps around a ring take longer to give out than a small shard takes to compute, and at each of
them every rank waits for the slowest one's turn. Here each rank holds its rows to a piece of
everyone's columns, and what it adds to the others' comes home to them at once: states are dealt out
and merged, gradients are reduced and scattered. Large shards go in rounds, a piece at a time, so
that what is in flight is bounded whatever their size: while one round is computed the next one's
columns arrive and the gradients of the one before are added up.

In the first round own columns come first, while the others' arrive (262,144 rows on 4 H200s: 181.6
ms instead of 182.1, 65,536: 12.07 instead of 12.21; benchmarks/results/hiding-4gpu.json), and after
the last what stays here is completed while the rest comes home (65,536 on 2: 23.51 instead of
23.62; hiding-2gpu.json). Beyond that a round's own transfers do not hide behind parts of its
computation, which gained nothing (there and in scaling-two-parts.json).
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from typing import NamedTuple

import torch.distributed as dist
from torch import Tensor

from megabatch.similarity.distributed.comm import Pending, deal, gather, let_begin, scatter_sum
from megabatch.similarity.distributed.schedule import Parcel, Parts, Visit, narrow

#: Rows of a rank in a round from which on its own columns come first, and transfers home are let
#: begin. Of fewer the host's launches count.
LARGE = 16_384


class Place(NamedTuple):
    """This rank among the others, and how they go about it."""

    group: dist.ProcessGroup
    rank: int
    size: int  #: rows of every shard
    operation: str  #: how errors call what is going on
    overlap: bool  #: rounds' transfers run beside other rounds' computation


class Round:
    """These rows of every rank's shard, on their way here; the first parcel's may be here."""

    def __init__(
        self, place: Place, rows: slice, parcels: Sequence[Parcel], here: Tensor | None
    ) -> None:
        self.place, self.rows = place, rows
        self.size = rows.stop - rows.start
        self.pieces = [Parcel(narrow(parcel, rows), parcel.dim) for parcel in parcels]
        self.columns: list[Tensor | None] = [here] + [None] * (len(parcels) - 1)
        self._pending: dict[int, Pending] = {}
        for k, piece in enumerate(self.pieces):
            if piece.tensor is not None and self.columns[k] is None:
                self.columns[k], self._pending[k] = gather(
                    piece.tensor, place.group, place.operation
                )

    def wait(self) -> None:
        """Until all is here, for this rank's stream."""
        for k, pending in self._pending.items():
            pending.wait()
            whole, dim = self.columns[k], self.pieces[k].dim
            assert whole is not None
            self.columns[k] = whole.movedim(0, dim).flatten(dim, dim + 1)
        self._pending = {}

    def visits(self, found: Tensor | None, parts: Parts | None) -> Iterator[Visit]:
        """This rank's own columns, then the others', which arrive meanwhile; or all at once.

        At once where their rows follow one another, and they are here or soon will be.
        """
        m, rank, size = self.size, self.place.rank, self.place.size
        home, end = rank * m, self.place.group.size() * m  # places among the columns of this round
        if m == size and not (0 in self._pending and m >= LARGE):
            self.wait()
            yield self._visit(0, end, 0, found, parts)
            return
        own = tuple(piece.tensor for piece in self.pieces)
        start = rank * size + self.rows.start
        yield Visit(rank, self.rows, start, own, _share(found, parts, home, home + m))
        self.wait()
        # Rows of several ranks do not follow one another: they begin somewhere before this rank's
        # rows, or behind them.
        yield self._visit(0, home, rank * size - home, found, parts)
        yield self._visit(home + m, end, (rank + 1) * size, found, parts)

    def _visit(
        self, a: int, b: int, start: int, found: Tensor | None, parts: Parts | None
    ) -> Visit:
        cargo = tuple(
            None if whole is None else whole.narrow(piece.dim, a, b - a)
            for whole, piece in zip(self.columns, self.pieces, strict=True)
        )
        return Visit(None, slice(a, b), start, cargo, _share(found, parts, a, b))


def tour(
    place: Place,
    rounds: Sequence[slice],
    parcels: Sequence[Parcel],
    visit: Callable[[Visit], None],
    parts: Parts | None,
    meanwhile: Callable[[], None],
    here: Tensor | None,
) -> Generator[tuple[slice, Tensor], None, Tensor | None]:
    """As `Ring.tour`, in these rounds; parts None: nothing comes home.

    `here`: the first parcel's columns of all ranks, if they are here; of use to a single round,
    which returns the same in the end.
    """
    one = None
    coming = [Round(place, rounds[0], parcels, here if len(rounds) == 1 else None)]
    adding: tuple[slice, Tensor, Pending] | None = None
    for k, rows in enumerate(rounds):
        one = coming.pop()
        if place.overlap and k + 1 < len(rounds):
            coming.append(Round(place, rounds[k + 1], parcels, None))
        if not place.overlap:
            one.wait()
        found = None if parts is None else parts.empty(place.group.size() * one.size)
        for stop in one.visits(found, parts):
            if stop.size:
                visit(stop)
        if adding is not None:
            yield _added(*adding)
            adding = None
        if parts is not None and found is not None:
            if parts.merge is not None:
                yield rows, _dealt(found, one, parts)
            else:
                adding = (rows, *scatter_sum(found, place.group, place.operation))
        if not place.overlap:
            if adding is not None:
                yield _added(*adding)
                adding = None
            coming += [Round(place, r, parcels, None) for r in rounds[k + 1 : k + 2]]
    if adding is not None and len(adding[1]) >= LARGE:
        let_begin(adding[1])
    meanwhile()
    if adding is not None:
        yield _added(*adding)
    return one.columns[0] if one is not None and len(rounds) == 1 else None


def _share(found: Tensor | None, parts: Parts | None, a: int, b: int) -> Tensor | None:
    return None if found is None or parts is None else found.narrow(parts.dim, a, b - a)


def _dealt(found: Tensor, one: Round, parts: Parts) -> Tensor:
    """What every rank found for this one's rows, (ranks, ...)."""
    n = one.place.group.size()
    by_rank = found.unflatten(parts.dim, (n, one.size)).movedim(parts.dim, 0).contiguous()
    return deal(by_rank, one.place.group, one.place.operation)


def _added(rows: slice, total: Tensor, adding: Pending) -> tuple[slice, Tensor]:
    adding.wait()
    return rows, total
