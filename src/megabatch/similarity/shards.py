"""A rank's part of a matrix over several processes, and how the other ranks' columns visit it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, TypeAlias

from torch import Tensor

from megabatch.similarity import sweep
from megabatch.similarity.distributed import ring
from megabatch.similarity.distributed.ring import Parcel, Parts, Ring, Visit
from megabatch.similarity.pairs import Pairs

if TYPE_CHECKING:
    from megabatch.similarity.backends.triton.blocks import FusedBlocks

Blocks: TypeAlias = "sweep.Blocks | FusedBlocks"


class Shards:
    """This rank's rows of the matrix, which stay, and its columns, which travel."""

    def __init__(
        self,
        x: Tensor,
        y: Tensor | None,
        ids: tuple[Tensor | None, Tensor | None],
        ceiling: Tensor | None,
        diagonal: str,
        circle: Ring,
    ) -> None:
        self.ring, self.symmetric = circle, y is None
        # Each shard in an order of its own: pairs (i, i) of one rank stay on the diagonal.
        self.order = sweep.ordered(x, y, Pairs(diagonal, *ids, ceiling))
        self.features = self.order.x, self.order.y
        start = circle.starts[circle.rank]
        self.pairs = replace(self.order.pairs, row_start=start, column_start=start)
        #: the rank's rows against its own columns
        self.own = sweep.blocks(*self.features, self.pairs, symmetric=y is None)
        self.x, self.y = self.own.x, self.own.y

    def route(self, carries: bool) -> ring.Route:
        """How far columns go; whether they bring something home is up to the route or `carries`."""
        if self.symmetric:
            return ring.symmetric(self.ring.n)
        return ring.full(self.ring.n) if carries else ring.rows_only(self.ring.n)

    def tour(
        self,
        pull: Tensor | None,
        visit: Callable[[Visit, Blocks], None],
        route: ring.Route,
        parts: Parts,
        itself: Callable[[], None] = lambda: None,
        meanwhile: Callable[[], None] = lambda: None,
    ) -> Iterator[tuple[slice, Tensor]]:
        """`Ring.tour` of the columns with their ids and pull; `visit` gets the blocks as well.

        Where x is held against itself its own part is one sweep of half the blocks: `itself`.
        """

        def meet(piece: Visit) -> None:
            if self.symmetric and piece.owner == self.ring.rank:
                if piece.rows.start == 0:  # the whole shard, in the first round
                    itself()
                return
            features, ids, _ = piece.cargo
            assert features is not None
            if len(self.x) and piece.size:
                pairs = replace(self.pairs, column_ids=ids, column_start=piece.start)
                visit(piece, sweep.blocks(self.x, features, pairs))

        parcels = [Parcel(self.y), Parcel(self.pairs.column_ids), Parcel(pull, dim=1)]
        return self.ring.tour(parcels, meet, route, ring.piece_rows(self.y), parts, meanwhile)


class Once:
    """Whether something is the first of its kind."""

    def __init__(self) -> None:
        self._asked = False

    def first(self) -> bool:
        """True when asked for the first time."""
        before, self._asked = self._asked, True
        return not before


def catch_up(later: list[Callable[[], None]]) -> None:
    """Do what was put off."""
    while later:
        later.pop()()
