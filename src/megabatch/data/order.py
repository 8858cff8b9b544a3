"""The order in which samples are visited, and the place reached in it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from megabatch.data.fetch import Request


@dataclass
class Order:
    """One rank's order of a data set's samples, epoch for epoch.

    Each rank takes every `world_size`-th sample of one global order, the same number on each, so
    no sample comes twice in an epoch. `epoch` and `position` say which sample is next.
    """

    pairs: int
    seed: int
    shuffle: bool
    rank: int
    world_size: int
    epoch: int = 0
    position: int = 0

    @property
    def samples(self) -> int:
        """Samples of this rank in an epoch."""
        return self.pairs // self.world_size

    def facts(self) -> dict[str, int]:
        """Return what the order depends on."""
        return {
            "pairs": self.pairs,
            "seed": self.seed,
            "shuffle": self.shuffle,
            "rank": self.rank,
            "world_size": self.world_size,
        }

    def indices(self) -> np.ndarray:
        """Return this rank's samples of the current epoch, int64 (samples,)."""
        if self.shuffle:
            # The legacy generator: numpy promises its stream for good, so a run can be continued
            # under another numpy; the newer ones carry no such promise.
            order = np.random.RandomState([self.seed, self.epoch]).permutation(self.pairs)
        else:
            order = np.arange(self.pairs)
        return order[: self.samples * self.world_size][self.rank :: self.world_size]


@dataclass
class Requests:
    """What is left of the epoch, in pieces: the sampler that DataLoader wants.

    It knows the order and not the loader: in a cycle of references the workers' queues would be
    closed before the workers are told to end, which takes them 5 s each.
    """

    order: Order
    piece: int

    def __iter__(self) -> Iterator[Request]:
        indices = self.order.indices()
        for start in range(self.order.position, len(indices), self.piece):
            yield Request(self.order.epoch, start, indices[start : start + self.piece])
