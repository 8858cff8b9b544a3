"""Mixtures of several sources, with upsampling factors."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from megabatch.data.order import Part
from megabatch.data.pairs import ArrayDataset, Pair, PairDataset
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
        if not 0 <= index < len(self):
            raise IndexError(f"index {index} of {len(self)} samples")
        source = int(np.searchsorted(self._ends, index, side="right"))
        before = int(self._ends[source - 1]) if source else 0
        return self.sources[source][index - before]


class MixedArrays(MixedPairs):
    """A mixture of `ArrayDataset`s, and one itself."""

    def arrays(self, indices: Sequence[int] | np.ndarray) -> np.ndarray:
        """Return images, uint8 (b, channels, height, width)."""
        found: np.ndarray | None = None
        for source, rows, own in self._by_source(indices):
            images = source.arrays(own)
            if found is None:
                found = np.empty((len(indices), *images.shape[1:]), images.dtype)
            found[rows] = images
        assert found is not None
        return found

    def texts(self, indices: Sequence[int] | np.ndarray) -> list[str]:
        """Return their captions."""
        found = [""] * len(indices)
        for source, rows, own in self._by_source(indices):
            for row, caption in zip(rows, source.texts(own), strict=True):
                found[row] = caption
        return found

    def _by_source(
        self, indices: Sequence[int] | np.ndarray
    ) -> Iterator[tuple[Any, np.ndarray, np.ndarray]]:
        """Each source that occurs, its positions in `indices`, and its own indices."""
        index = np.asarray(indices)
        source_of = np.searchsorted(self._ends, index, side="right")
        for number, source in enumerate(self.sources):
            (rows,) = np.nonzero(source_of == number)
            if len(rows):
                yield source, rows, index[rows] - self._ends[number] + len(source)


class MixedArraysWithIds(MixedArrays):
    """`MixedArrays` of sources that know their pairs' ids."""

    def ids(self, indices: Sequence[int] | np.ndarray) -> np.ndarray:
        """Return the pairs' ids, int64 (b,)."""
        found = np.empty(len(indices), dtype=np.int64)
        for source, rows, own in self._by_source(indices):
            found[rows] = source.ids(own)
        return found


def mix(
    sources: Sequence[PairDataset], names: Sequence[str], factors: Sequence[float] | None = None
) -> MixedPairs:
    """Return the mixture of sources, with `arrays` if all have them, of one shape."""
    kind = MixedPairs
    if all(isinstance(source, ArrayDataset) for source in sources):
        shapes = {source.arrays([0]).shape for source in sources}  # type: ignore[attr-defined]
        with_ids = [hasattr(source, "ids") for source in sources]
        if len(shapes) == 1 and (all(with_ids) or not any(with_ids)):
            kind = MixedArraysWithIds if with_ids[0] else MixedArrays
    return kind(sources, names, factors)


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
