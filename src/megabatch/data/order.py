"""The order in which samples of one or several sources are visited, and the position in it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, get_args

import numpy as np
from torch.utils.data import ConcatDataset

from megabatch.config.settings import Batches
from megabatch.data.pairs import Pair, PairDataset
from megabatch.errors import UsageError, plural

FACTORS = "--train-data-upsampling-factors"
TEMPERATURE = "--train-data-temperature"
BATCHES = "--train-data-batches"


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


def largest_batch(dataset: PairDataset) -> tuple[int, str]:
    """The most pairs that a batch may have, and which pairs they are."""
    parts = parts_of(dataset)
    if getattr(dataset, "batches", "mixed") == "mixed":
        return sum(part.drawn for part in parts), "the pairs that there are"
    names: Sequence[str] = dataset.names  # type: ignore[attr-defined]
    most, name = min((min(p.size, p.drawn), n) for p, n in zip(parts, names, strict=True))
    return most, f"the pairs of {name} in an epoch, as each batch is from one source"


def order_of(dataset: PairDataset, batch_size: int, seed: int = 0) -> Order:
    """The order of a data set's samples, in batches of at most `largest_batch`."""
    batches = getattr(dataset, "batches", "mixed")
    block = 1 if batches == "mixed" else batch_size
    return Order(parts_of(dataset), seed, block=block, in_turn=batches == "in-turn")


class Request(NamedTuple):
    """A request for samples of an epoch; `draws`: see `Order`."""

    epoch: int
    draws: np.ndarray


@dataclass
class Order:
    """The order of a data set's samples in each epoch; `epoch` and `position`: of the next one.

    Each part has an order of its own, and the parts are interleaved at random, or in turn (equally
    many draws of each). With a `block` above 1, so many draws from one part follow one another: the
    batches of one source. Then an epoch leaves out draws that fill no block. A pass leaves out
    samples that fill none, others each time, so that no block has a sample twice; after any number
    of blocks no sample is ahead of another of its part by more than two.
    """

    parts: Sequence[Part]
    seed: int
    epoch: int = 0
    position: int = 0
    block: int = 1
    in_turn: bool = False

    @property
    def drawn(self) -> list[int]:
        """Draws from each part in an epoch."""
        return [part.drawn - part.drawn % self.block for part in self.parts]

    @property
    def pairs(self) -> int:
        """Draws in an epoch."""
        return sum(self.drawn)

    def end_epoch(self) -> None:
        """Go to the start of the next epoch."""
        self.epoch += 1
        self.position = 0

    def parameters(self) -> dict[str, Any]:
        """Return the parameters of the order, for JSON."""
        found: dict[str, Any] = {"pairs": self.pairs, "seed": self.seed}
        if self.block > 1 or any(part.size != part.drawn for part in self.parts):
            found["parts"] = [[part.size, part.drawn] for part in self.parts]
        if self.block > 1:
            found["batches"] = f"{self.block} of a source" + ", in turn" * self.in_turn
        return found

    def draws(self) -> np.ndarray:
        """Return the draws of the current epoch, int64 (pairs,), all different.

        A draw below the data set's length is the index of a sample. Each further time that an
        epoch visits the sample, its draw is larger by that length.
        """
        own = [self._draws_of(number, drawn) for number, drawn in enumerate(self.drawn)]
        if len(own) == 1:
            return own[0]
        part_of = np.arange(len(own), dtype=np.int32).repeat([n // self.block for n in self.drawn])
        if self.in_turn:
            part_of = part_of.reshape(len(own), -1).T.ravel()
        else:
            part_of = _random(self.seed, self.epoch, 0).permutation(part_of)
        part_of = part_of.repeat(self.block)
        draws = np.empty(self.pairs, dtype=np.int64)
        first = 0
        for number, part in enumerate(self.parts):
            draws[part_of == number] = first + own[number]
            first += part.size
        return draws

    def _draws_of(self, number: int, drawn: int) -> np.ndarray:
        """One part's draws of the epoch, relative to its first sample: pieces of its passes."""
        size, length = self.parts[number].size, sum(part.size for part in self.parts)
        start, end = self.epoch * drawn, (self.epoch + 1) * drawn
        pieces, again = [], 0
        while start < end:
            this_pass, offset = divmod(start, size - size % self.block)
            piece = self._pass(number, this_pass, size)[offset : offset + end - start]
            pieces.append(piece + again * length)
            start, again = start + len(piece), again + 1
        return np.concatenate(pieces)

    def _pass(self, number: int, this_pass: int, size: int) -> np.ndarray:
        # The first part's order is that of a data set of this part alone.
        words = (self.seed, this_pass, number) if number else (self.seed, this_pass)
        whole = size - size % self.block
        if whole == size:
            return _random(*words).permutation(size)
        # The next ones of a fixed cycle through the part, so that all are left out equally often.
        cycle = _random(self.seed, 0, number, 0).permutation(size)
        return _random(*words).permutation(np.roll(cycle, -this_pass * whole)[:whole])

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
        temperature: T above 0; the draws of sources are in proportion to (f * n) ** (1 / T), as
            many in all as without (arXiv 1907.05019). Above 1 it favours small sources.
        batches: "mixed", or "one-source": each global batch is from one source, at random in
            proportion to the draws; "in-turn": likewise, with equal draws of the sources, in turn.

    Attributes:
        first, parts, batches, damage: see `PairDataset`.
        shares: a line for each source, its size and its draws; empty if the sources are one.

    Raises:
        UsageError: an epoch would draw nothing from a source, the sources are of different kinds,
            or there is one but temperature or batches need several.
    """

    def __init__(
        self,
        sources: Sequence[PairDataset],
        names: Sequence[str],
        factors: Sequence[float] | None = None,
        temperature: float | None = None,
        batches: Batches = "mixed",
    ) -> None:
        super().__init__(sources)  # type: ignore[arg-type]
        self.first, *others = (getattr(source, "first", "image") for source in sources)
        for name, kind in zip(names[1:], others, strict=True):
            if kind != self.first:
                raise UsageError(f"{names[0]} has {self.first}s with texts, but {name} {kind}s")
        self.names, self.batches = names, batches
        self.damage = [line for source in sources for line in getattr(source, "damage", [])]
        self.shares: list[str] = []
        self.parts = [Part(len(self), len(self))]
        sizes = [len(source) for source in sources]
        draws = _expected_draws(sizes, factors, temperature, batches)
        if draws == sizes and batches == "mixed":
            return
        self.parts = [Part(n, round(drawn)) for n, drawn in zip(sizes, draws, strict=True)]
        for name, part in zip(names, self.parts, strict=True):
            share = f"{name}: {plural(part.size, 'pair')}, of which an epoch draws {part.drawn:,}"
            if part.drawn == 0:
                option = FACTORS if temperature is None else TEMPERATURE
                raise UsageError(f"{option}: {share}; expected 1 or more")
            self.shares.append(f"{share} ({part.drawn / sum(map(round, draws)):.1%})")


def _expected_draws(
    sizes: list[int], factors: Sequence[float] | None, temperature: float | None, batches: str
) -> list[float]:
    """The draws of an epoch from sources of these sizes, not rounded; see `MixedPairs`."""
    if len(sizes) == 1 and (temperature is not None or batches != "mixed"):
        raise UsageError(
            f"{TEMPERATURE}, {BATCHES}: expected several sources joined by '::', got 1"
        )
    if batches not in get_args(Batches):
        raise UsageError(f"{BATCHES} {batches}: expected {', '.join(get_args(Batches))}")
    draws = [n * f for n, f in zip(sizes, factors or [1] * len(sizes), strict=True)]
    if batches == "in-turn":
        if factors or temperature:
            raise UsageError(f"{BATCHES} in-turn: expected without {FACTORS} and {TEMPERATURE}")
        temperature = math.inf  # equal draws
    if temperature in (None, 1):
        return draws
    if not (temperature and temperature > 0):
        raise UsageError(f"{TEMPERATURE} {temperature}: expected a number above 0")
    weights = [(drawn / max(draws)) ** (1 / temperature) for drawn in draws]
    return [sum(draws) * weight / sum(weights) for weight in weights]
