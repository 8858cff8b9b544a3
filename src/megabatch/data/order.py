"""The order in which samples are visited, and the place reached in it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from megabatch.data.fetch import Request
from megabatch.data.pairs import PairDataset


@dataclass(frozen=True)
class Part:
    """A run of a data set's samples: how many there are, and how many draws an epoch makes of it.

    The draws go through the part pass by pass, over the ends of epochs too: each pass has every
    sample once, in an order of its own. So as many draws as samples are each sample once an epoch;
    half as many, each once in two epochs; twice as many, each twice an epoch.
    """

    size: int
    drawn: int


def parts_of(dataset: PairDataset) -> list[Part]:
    """The parts that a data set says it has, or else all of it, each sample once an epoch."""
    found: list[Part] | None = getattr(dataset, "parts", None)
    return found or [Part(len(dataset), len(dataset))]


def pairs_per_epoch(dataset: PairDataset) -> int:
    """The number of pairs that an epoch of the data set draws."""
    return sum(part.drawn for part in parts_of(dataset))


@dataclass
class Order:
    """The order of a data set's samples, epoch for epoch, the same for any number of ranks.

    Each part has its own order; where one of its samples comes in the epoch's is random as well.
    `epoch` and `position` say which sample is next.
    """

    parts: Sequence[Part]
    seed: int
    shuffle: bool
    epoch: int = 0
    position: int = 0

    @property
    def pairs(self) -> int:
        """Draws in an epoch."""
        return sum(part.drawn for part in self.parts)

    def facts(self) -> dict[str, Any]:
        """Return what the order depends on, as JSON can hold it."""
        facts: dict[str, Any] = {"pairs": self.pairs, "seed": self.seed, "shuffle": self.shuffle}
        if any(part.size != part.drawn for part in self.parts):
            facts["parts"] = [[part.size, part.drawn] for part in self.parts]
        return facts

    def draws(self) -> np.ndarray:
        """Return the draws of the current epoch (see `Request`), int64 (pairs,), all different."""
        own = [self._draws_of(number, part) for number, part in enumerate(self.parts)]
        if len(own) == 1:
            return own[0]
        whose = np.repeat(np.arange(len(own), dtype=np.int32), [len(draws) for draws in own])
        if self.shuffle:
            whose = _random(self.seed, self.epoch, 0).permutation(whose)
        draws = np.empty(self.pairs, dtype=np.int64)
        first = 0
        for number, part in enumerate(self.parts):
            draws[whose == number] = first + own[number]
            first += part.size
        return draws

    def _draws_of(self, number: int, part: Part) -> np.ndarray:
        """One part's draws of the epoch, counted from its first sample: some passes' pieces."""
        length = sum(p.size for p in self.parts)
        start = self.epoch * part.drawn
        pieces, again = [], 0
        while start < (self.epoch + 1) * part.drawn:
            this_pass, offset = divmod(start, part.size)
            order = self._pass(number, this_pass, part.size)
            piece = order[offset : offset + (self.epoch + 1) * part.drawn - start]
            pieces.append(piece + again * length)
            start, again = start + len(piece), again + 1
        return np.concatenate(pieces)

    def _pass(self, number: int, this_pass: int, size: int) -> np.ndarray:
        if not self.shuffle:
            return np.arange(size)
        # The first part's order is that of a data set of this part alone.
        words = (self.seed, this_pass, number) if number else (self.seed, this_pass)
        return _random(*words).permutation(size)


def _random(*words: int) -> np.random.RandomState:
    # The legacy generator: numpy promises its stream for good, so a run can be continued
    # under another numpy; the newer ones carry no such promise.
    return np.random.RandomState(list(words))


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
        draws = self.order.draws()
        for first, last in self._runs(len(draws)):
            for start in range(first, last, self.piece):
                piece = draws[start : min(start + self.piece, last)]
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
