"""Between devices, small shards of one size: all ranks gather all of them at once.

n steps around a ring would take longer to give out than to compute. Each rank holds its rows to the
columns of all, and what it adds to the others' comes home to them at once: states are dealt out and
merged, gradients are reduced and scattered.
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
    hidden: bool  #: and there is enough of them to hide behind a part of it


def tour(
    place: Place,
    parcels: Sequence[Parcel],
    visit: Callable[[Visit], None],
    parts: Parts | None,
) -> Iterator[tuple[slice, Tensor]]:
    """As `Ring.tour`, for a route that takes everyone to everyone; None: nothing comes home.

    In one visit of all columns; or, to hide the transfers, in visits of the own columns while the
    others' arrive, of the others', and, while gradients are added up, of the rest of the own.
    """
    m, n = place.size, place.group.size()
    first, last, end = place.rank * m, (place.rank + 1) * m, n * m
    own_first = 0
    if place.hidden and place.overlap:
        summed = parts is not None and parts.merge is None
        own_first = min(m, max(TILE, m // 2 // TILE * TILE)) if summed else m
    coming = [_Coming(place, parcel) for parcel in parcels]
    if not place.overlap:
        _wait(coming)
    found = None if parts is None else parts.empty(end)

    def meet(a: int, b: int, own: bool, part: Tensor | None) -> None:
        """Columns a to b of all; `own`: of this rank's, where the others' may not be here yet."""
        if a < b:
            cargo = tuple(c.own(a - first, b - first) if own else c.rows(a, b) for c in coming)
            visit(Visit(place.rank if own else None, slice(a, b), a, cargo, part))

    def share(a: int, b: int) -> Tensor | None:
        return None if found is None or parts is None else found.narrow(parts.dim, a, b - a)

    meet(first, first + own_first, True, share(first, first + own_first))
    _wait(coming)
    if own_first:
        meet(0, first, False, share(0, first))
        meet(last, end, False, share(last, end))
    else:
        meet(0, end, False, found)
    if parts is None or found is None:
        return
    if parts.merge is not None:
        by_rank = found.unflatten(parts.dim, (n, m)).movedim(parts.dim, 0).contiguous()
        yield slice(0, m), parts.merge(deal(by_rank, place.group, place.operation))
        return
    if 0 < own_first < m:
        found.narrow(parts.dim, first + own_first, m - own_first).zero_()  # comes later
    total, adding = scatter_sum(found, place.group, place.operation)
    if not place.overlap:
        adding.wait()
    rest = None
    if 0 < own_first < m:
        rest = parts.empty(m - own_first)
        meet(first + own_first, last, True, rest)
    adding.wait()
    if rest is not None:
        total[own_first:] += rest
    yield slice(0, m), total


class _Coming:
    """A parcel of every rank, on its way here."""

    def __init__(self, place: Place, parcel: Parcel) -> None:
        self.parcel = parcel
        self.whole: Tensor | None = None
        self._pending: Pending | None = None
        if parcel.tensor is not None:
            self.whole, self._pending = gather(parcel.tensor, place.group, place.operation)

    def wait(self) -> None:
        if self._pending is None or self.whole is None:
            return
        self._pending.wait()
        dim = self.parcel.dim  # of the shards; the ranks' is in front of it
        self.whole, self._pending = self.whole.movedim(0, dim).flatten(dim, dim + 1), None

    def rows(self, a: int, b: int) -> Tensor | None:
        """Of all ranks."""
        return None if self.whole is None else self.whole.narrow(self.parcel.dim, a, b - a)

    def own(self, a: int, b: int) -> Tensor | None:
        """Of this rank."""
        return narrow(self.parcel, slice(a, b))


def _wait(coming: Sequence[_Coming]) -> None:
    for one in coming:
        one.wait()
