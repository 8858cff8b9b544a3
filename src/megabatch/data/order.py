"""The order in which samples are visited, and the place reached in it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from megabatch.data.fetch import Request


@dataclass
class Order:
    """The order of a data set's samples, epoch for epoch, the same for any number of ranks.

    `epoch` and `position` say which sample is next.
    """

    pairs: int
    seed: int
    shuffle: bool
    epoch: int = 0
    position: int = 0

    def facts(self) -> dict[str, int]:
        """Return what the order depends on."""
        return {"pairs": self.pairs, "seed": self.seed, "shuffle": self.shuffle}

    def indices(self) -> np.ndarray:
        """Return the samples of the current epoch, int64 (pairs,)."""
        if not self.shuffle:
            return np.arange(self.pairs)
        # The legacy generator: numpy promises its stream for good, so a run can be continued
        # under another numpy; the newer ones carry no such promise.
        return np.random.RandomState([self.seed, self.epoch]).permutation(self.pairs)


@dataclass
class Share:
    """The part of each global batch that one rank takes: a run of its rows, as even as can be."""

    rank: int
    world_size: int
    batch_size: int  #: of all ranks

    def of(self, rows: int) -> slice:
        """This rank's rows of a batch of so many."""
        bounds = (rows * r // self.world_size for r in (self.rank, self.rank + 1))
        return slice(*bounds)


@dataclass
class Requests:
    """What is left of the epoch, in pieces: the sampler that DataLoader wants.

    It knows the order and not the loader: in a cycle of references the workers' queues would be
    closed before the workers are told to end, which takes them 5 s each.
    """

    order: Order
    piece: int
    share: Share

    def __iter__(self) -> Iterator[Request]:
        indices = self.order.indices()
        for first, last in self._runs(len(indices)):
            for start in range(first, last, self.piece):
                piece = indices[start : min(start + self.piece, last)]
                yield Request(self.order.epoch, start, piece)

    def _runs(self, end: int) -> Iterator[tuple[int, int]]:
        """Where the samples that this rank fetches stand in the order."""
        start = self.order.position
        if self.share.world_size == 1:
            yield start, end
            return
        own = self.share.of(self.share.batch_size)
        for batch in range(start, end - self.share.batch_size + 1, self.share.batch_size):
            yield batch + own.start, batch + own.stop
