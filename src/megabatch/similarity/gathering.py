"""Between devices, shards of one size: all ranks gather pieces of all of them at once.

n steps around a ring take longer to give out than a small shard takes to compute, and at each of
them every rank waits for the slowest one's turn. Here each rank holds its rows to a piece of
everyone's columns, and what it adds to the others' comes home to them at once: states are dealt out
and merged, gradients are reduced and scattered. Large shards go in rounds, a piece at a time, so
that what is in flight is bounded whatever their size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch.distributed as dist
from torch import Tensor

from megabatch.similarity.exchange import Pending, deal, gather, scatter_sum
from megabatch.similarity.routes import Parcel, Parts, Visit, narrow

#: Columns of a kernel's tile.
TILE = 128


class Place(NamedTuple):
    """This rank among the others, and how they go about it."""

    group: dist.ProcessGroup
    rank: int
    size: int  #: rows of every shard
    operation: str  #: how errors call what is going on
    overlap: bool  #: transfers run beside the computation


class Round(NamedTuple):
    """One round: these rows of every rank's shard."""

    rows: slice
    hidden: bool  #: there is enough to transfer to hide it behind a part of the computation
    whole: bool  #: it is the only one

    @property
    def size(self) -> int:
        """Number of rows of one rank."""
        return self.rows.stop - self.rows.start


def tour(
    place: Place,
    one: Round,
    coming: Sequence[Coming],
    visit: Callable[[Visit], None],
    parts: Parts | None,
) -> Iterator[tuple[slice, Tensor]]:
    """As `Ring.tour`, one round of it; parts None: nothing comes home.

    In one visit of all columns where they follow one another and there is nothing to hide; else in
    visits of the own columns while the others' arrive, of the others', and, while gradients are
    added up, of the rest of the own.
    """
    m, n, rank = one.size, place.group.size(), place.rank
    home, end = rank * m, n * m  # places among the columns of this round
    own_first = own_last = 0
    if one.hidden and place.overlap:
        if parts is not None and parts.merge is None:  # something is added up at the end
            own_last = m if coming[0].here else m - min(m, max(TILE, m // 2 // TILE * TILE))
        own_first = m - own_last
    elif not one.whole:
        own_first = m
    if not place.overlap:
        _wait(coming)
    found = None if parts is None else parts.empty(end)

    def own(a: int, b: int, part: Tensor | None) -> None:
        """Rows a to b of this rank's piece; the others' may not be here yet."""
        rows = slice(one.rows.start + a, one.rows.start + b)
        if a < b:
            cargo = tuple(c.own(a, b) for c in coming)
            visit(Visit(rank, rows, rank * place.size + rows.start, cargo, part))

    def others(a: int, b: int, start: int) -> None:
        """Columns a to b of this round."""
        if a < b:
            visit(Visit(None, slice(a, b), start, tuple(c.rows(a, b) for c in coming), share(a, b)))

    def share(a: int, b: int) -> Tensor | None:
        return None if found is None or parts is None else found.narrow(parts.dim, a, b - a)

    own(0, own_first, share(home, home + own_first))
    _wait(coming)
    if own_first or own_last:
        # Rows of several ranks do not follow one another: they begin somewhere before this rank's
        # rows, or behind them.
        others(0, home, rank * place.size - home)
        others(home + m, end, (rank + 1) * place.size)
    else:
        others(0, end, 0)
    if parts is None or found is None:
        return
    if parts.merge is not None:
        by_rank = found.unflatten(parts.dim, (n, m)).movedim(parts.dim, 0).contiguous()
        yield one.rows, parts.merge(deal(by_rank, place.group, place.operation))
        return
    if own_last:
        share(home + m - own_last, home + m).zero_()  # type: ignore[union-attr]  # comes later
    total, adding = scatter_sum(found, place.group, place.operation)
    if not place.overlap:
        adding.wait()
    rest = None
    if own_last:
        rest = parts.empty(own_last)
        own(m - own_last, m, rest)
    adding.wait()
    if rest is not None:
        total[m - own_last :] += rest
    yield one.rows, total


class Coming:
    """A piece of a parcel from every rank, on its way here; or here already, as `whole`."""

    def __init__(self, place: Place, piece: Parcel, whole: Tensor | None = None) -> None:
        self.piece, self.whole = piece, whole
        self.here = whole is not None
        self._pending: Pending | None = None
        if piece.tensor is not None and whole is None:
            self.whole, self._pending = gather(piece.tensor, place.group, place.operation)

    def wait(self) -> None:
        """Until it is here, for this rank's stream."""
        if self._pending is None or self.whole is None:
            return
        self._pending.wait()
        dim = self.piece.dim  # of the pieces; the ranks' is in front of it
        self.whole, self._pending = self.whole.movedim(0, dim).flatten(dim, dim + 1), None

    def rows(self, a: int, b: int) -> Tensor | None:
        """Of all ranks."""
        return None if self.whole is None else self.whole.narrow(self.piece.dim, a, b - a)

    def own(self, a: int, b: int) -> Tensor | None:
        """Of this rank."""
        return narrow(self.piece, slice(a, b))


def _wait(coming: Sequence[Coming]) -> None:
    for one in coming:
        one.wait()
