"""Mixtures of several sources, with upsampling factors."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from megabatch.data.order import Part
from megabatch.data.pairs import ArrayDataset, Pair, PairDataset, ids_of, undecoded
from megabatch.errors import UsageError, plural

SEPARATOR = "::"

_OPTION = "--train-data-upsampling-factors"


class MixedPairs:
    """The concatenation of sources, each drawn from in proportion to its factor.

    A source of n samples with factor f gives round(f * n) of an epoch's pairs, at random positions.
    The factor is how often each of its samples comes, like OpenCLIP's upsampling factors, but
    exact: with factor 1 once per epoch, with 2 twice, with 1/2 in every other epoch. To draw
    equally from all sources, make the factors inversely proportional to their sizes. If all factors
    are 1, the sources are shuffled as one.

    Args:
        sources: all of images with texts, or all of texts with texts.
        names: of the sources, for messages.
        factors: above 0, one per source; default: all 1.

    Attributes:
        parts: see `Part`.
        shares: a line for each source, its size and its draws; empty if all factors are 1.

    Raises:
        UsageError: factors have a wrong number or are out of range, or so small that an epoch
            draws nothing from a source; the sources are of different kinds.
    """

    def __init__(
        self,
        sources: Sequence[PairDataset],
        names: Sequence[str],
        factors: Sequence[float] | None = None,
    ) -> None:
        self.sources = list(sources)
        factors = [1.0] * len(sources) if factors is None else factors
        check_factors(factors, len(sources))
        sizes = [len(source) for source in sources]
        self._ends = np.cumsum(sizes)
        kinds = [getattr(source, "first", "image") for source in sources]
        self.first = kinds[0]
        for name, kind in zip(names, kinds, strict=True):
            if kind != self.first:
                raise UsageError(f"{names[0]} has {self.first}s with texts, but {name} {kind}s")
        self.shares: list[str] = []
        self.parts = [Part(len(self), len(self))]
        if all(factor == 1 for factor in factors):
            return
        self.parts = [Part(n, round(n * f)) for n, f in zip(sizes, factors, strict=True)]
        for name, part, factor in zip(names, self.parts, factors, strict=True):
            if part.drawn == 0:
                raise UsageError(
                    f"{_OPTION}: {factor:g} of the {plural(part.size, 'pair')} of {name} is less "
                    "than one pair"
                )
            self.shares.append(
                f"{name}: {plural(part.size, 'pair')}, of which an epoch draws {part.drawn:,}"
            )

    @property
    def damage(self) -> list[str]:
        """A line for each part of any source's files that cannot be read."""
        return [line for source in self.sources for line in getattr(source, "damage", [])]

    @property
    def notes(self) -> list[str]:
        """Other remarks on the sources, for the user."""
        return [line for source in self.sources for line in getattr(source, "notes", [])]

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, index: int) -> Pair:
        source, own = self._find(index)
        return source[own]

    def undecoded(self, index: int) -> Pair:
        """Sample `index`, with an EncodedImage instead of an image from a file."""
        source, own = self._find(index)
        return undecoded(source)(own)

    def _find(self, index: int) -> tuple[PairDataset, int]:
        """A sample's source, and its index there."""
        if not 0 <= index < len(self):
            raise IndexError(f"index {index} of {len(self)} samples")
        source = int(np.searchsorted(self._ends, index, side="right"))
        return self.sources[source], index - (int(self._ends[source - 1]) if source else 0)


class MixedArrays(MixedPairs):
    """A mixture of `ArrayDataset`s, and one itself."""

    def arrays(self, indices: Sequence[int] | np.ndarray) -> np.ndarray:
        """Return images, uint8 (b, channels, height, width)."""
        return self._from_each(indices, lambda source, own: source.arrays(own))

    def texts(self, indices: Sequence[int] | np.ndarray) -> list[str]:
        """Return their captions."""
        found = self._from_each(indices, lambda source, own: np.array(source.texts(own), object))
        return list(found)

    def ids(self, indices: Sequence[int] | np.ndarray) -> np.ndarray:
        """Return the pairs' ids, int64 (b,)."""
        return self._from_each(indices, ids_of)

    def _from_each(
        self, indices: Sequence[int] | np.ndarray, read: Callable[[Any, np.ndarray], np.ndarray]
    ) -> np.ndarray:
        """read(source, indices in it) for the sources that occur, in the order of `indices`."""
        index = np.asarray(indices)
        source_of = np.searchsorted(self._ends, index, side="right")
        starts = [0, *self._ends[:-1]]
        parts = [
            read(self.sources[number], index[source_of == number] - starts[number])
            for number in np.unique(source_of)
        ]
        together = np.concatenate(parts)
        found = np.empty_like(together)
        found[np.argsort(source_of, kind="stable")] = together
        return found


def mix(
    sources: Sequence[PairDataset], names: Sequence[str], factors: Sequence[float] | None = None
) -> MixedPairs:
    """Return the mixture of sources, with `arrays` if all have them, of one shape."""
    if all(isinstance(source, ArrayDataset) for source in sources):
        shapes = {source.arrays([0]).shape for source in sources}  # type: ignore[attr-defined]
        if len(shapes) == 1:
            return MixedArrays(sources, names, factors)
    return MixedPairs(sources, names, factors)


def parse_factors(text: str) -> list[float]:
    """Parse factors in OpenCLIP's notation, "1::2".

    Raises:
        UsageError: one of them is not a number.
    """
    try:
        return [float(part) for part in text.split(SEPARATOR)]
    except ValueError as error:
        raise UsageError(
            f"{_OPTION}: {text!r}; expected numbers joined by {SEPARATOR!r}, as in '1::2'"
        ) from error


def check_factors(factors: Sequence[float], sources: int) -> None:
    """Raise a UsageError if the factors are out of range, or not one per source."""
    given = SEPARATOR.join(f"{factor:g}" for factor in factors)
    if len(factors) != sources:
        raise UsageError(
            f"{_OPTION}: {given!r}: expected {sources} numbers, one for each source, got "
            f"{len(factors)}"
        )
    if not all(0 < factor < math.inf for factor in factors):
        raise UsageError(f"{_OPTION}: {given!r}; expected numbers above 0")
