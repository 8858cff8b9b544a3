"""The order in which samples of one or several sources are visited, and the position in it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from torch.utils.data import ConcatDataset

from megabatch.data.pairs import Pair, PairDataset
from megabatch.errors import UsageError, plural

FACTORS = "--train-data-upsampling-factors"


@dataclass(frozen=True)
class Part:
    """A contiguous part of a data set: its number of samples, and of draws from it in an epoch.

    The draws go through the part pass by pass, across the ends of epochs: each pass visits every
    sample once, in an order of its own. With half as many draws, each comes once in two epochs.
    """

    size: int
    drawn: int


def parts_of(dataset: PairDataset) -> list[Part]:
    """The data set's own parts, or else all of it as one, each sample once an epoch."""
    found: list[Part] | None = getattr(dataset, "parts", None)
    return found or [Part(len(dataset), len(dataset))]


def pairs_per_epoch(dataset: PairDataset) -> int:
    """The number of pairs in an epoch of the data set."""
    return sum(part.drawn for part in parts_of(dataset))


class Request(NamedTuple):
    """A request for samples of an epoch; `draws`: see `Order`."""

    epoch: int
    draws: np.ndarray


@dataclass
class Order:
    """The order of a data set's samples in each epoch; `epoch` and `position`: of the next one.

    Each part has an order of its own, and the parts are interleaved at random.
    """

    parts: Sequence[Part]
    seed: int
    epoch: int = 0
    position: int = 0

    @property
    def pairs(self) -> int:
        """Draws in an epoch."""
        return sum(part.drawn for part in self.parts)

    def end_epoch(self) -> None:
        """Go to the start of the next epoch."""
        self.epoch += 1
        self.position = 0

    def parameters(self) -> dict[str, Any]:
        """Return the parameters of the order, for JSON."""
        found: dict[str, Any] = {"pairs": self.pairs, "seed": self.seed}
        if any(part.size != part.drawn for part in self.parts):
            found["parts"] = [[part.size, part.drawn] for part in self.parts]
        return found

    def draws(self) -> np.ndarray:
        """Return the draws of the current epoch, int64 (pairs,), all different.

        A draw below the data set's length is the index of a sample. Each further time that an
        epoch visits the sample, its draw is larger by that length.
        """
        own = [self._draws_of(number, part) for number, part in enumerate(self.parts)]
        if len(own) == 1:
            return own[0]
        part_of = np.repeat(np.arange(len(own), dtype=np.int32), [len(draws) for draws in own])
        part_of = _random(self.seed, self.epoch, 0).permutation(part_of)
        draws = np.empty(self.pairs, dtype=np.int64)
        first = 0
        for number, part in enumerate(self.parts):
            draws[part_of == number] = first + own[number]
            first += part.size
        return draws

    def _draws_of(self, number: int, part: Part) -> np.ndarray:
        """One part's draws of the epoch, relative to its first sample: pieces of its passes."""
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
        # The first part's order is that of a data set of this part alone.
        words = (self.seed, this_pass, number) if number else (self.seed, this_pass)
        return _random(*words).permutation(size)

    def requests(self, batch_size: int, rows: range, piece: int) -> Iterator[Request]:
        """Requests for these rows of each batch that is left of the epoch, `piece` at a time."""
        epoch, draws = self.epoch, self.draws()
        for start in range(self.position, len(draws) - batch_size + 1, batch_size):
            for first in rows[::piece]:
                yield Request(epoch, draws[start + first : start + min(first + piece, rows.stop)])


def _random(*words: int) -> np.random.RandomState:
    # The legacy generator: numpy guarantees its stream, so a run can be continued under another
    # version; the newer ones carry no such guarantee.
    return np.random.RandomState(list(words))


class MixedPairs(ConcatDataset[Pair]):
    """The concatenation of sources, each drawn from in proportion to its factor.

    A source of n samples with factor f gives round(f * n) of an epoch's pairs, at random positions.
    The factor is how often each of its samples comes, like OpenCLIP's upsampling factors, but
    exact: with factor 1 once per epoch, with 2 twice, with 1/2 in every other epoch. If all factors
    are 1, the sources are shuffled as one.

    Args:
        sources: all of images with texts, or all of texts with texts.
        names: of the sources, for messages.
        factors: above 0, one per source; default: all 1.

    Attributes:
        first, parts, damage: see `PairDataset`.
        shares: a line for each source, its size and its draws; empty if all factors are 1.

    Raises:
        UsageError: an epoch would draw nothing from a source, or the sources are of different
            kinds.
    """

    def __init__(
        self,
        sources: Sequence[PairDataset],
        names: Sequence[str],
        factors: Sequence[float] | None = None,
    ) -> None:
        super().__init__(sources)  # type: ignore[arg-type]
        self.first, *others = (getattr(source, "first", "image") for source in sources)
        for name, kind in zip(names[1:], others, strict=True):
            if kind != self.first:
                raise UsageError(f"{names[0]} has {self.first}s with texts, but {name} {kind}s")
        self.damage = [line for source in sources for line in getattr(source, "damage", [])]
        self.shares: list[str] = []
        self.parts = [Part(len(self), len(self))]
        if factors is None or all(factor == 1 for factor in factors):
            return
        self.parts = [
            Part(len(s), round(len(s) * f)) for s, f in zip(sources, factors, strict=True)
        ]
        for name, part in zip(names, self.parts, strict=True):
            share = f"{name}: {plural(part.size, 'pair')}, of which an epoch draws {part.drawn:,}"
            if part.drawn == 0:
                raise UsageError(f"{FACTORS}: {share}; expected 1 or more")
            self.shares.append(share)
