"""Mixtures of several sources, with upsampling factors."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch.utils.data import ConcatDataset

from megabatch.data.order import Part
from megabatch.data.pairs import Pair, PairDataset
from megabatch.errors import UsageError, plural

SEPARATOR = "::"

_OPTION = "--train-data-upsampling-factors"


class MixedPairs(ConcatDataset[Pair]):
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
        super().__init__(sources)  # type: ignore[arg-type]
        factors = [1.0] * len(sources) if factors is None else factors
        check_factors(factors, len(sources))
        kinds = [getattr(source, "first", "image") for source in sources]
        self.first = kinds[0]
        for name, kind in zip(names, kinds, strict=True):
            if kind != self.first:
                raise UsageError(f"{names[0]} has {self.first}s with texts, but {name} {kind}s")
        self.shares: list[str] = []
        self.parts = [Part(len(self), len(self))]
        if all(factor == 1 for factor in factors):
            return
        sizes = map(len, sources)
        self.parts = [Part(n, round(n * f)) for n, f in zip(sizes, factors, strict=True)]
        for name, part, factor in zip(names, self.parts, factors, strict=True):
            pairs = plural(part.size, "pair")
            if part.drawn == 0:
                too_few = f"{factor:g} of the {pairs} of {name} is less than one pair"
                raise UsageError(f"{_OPTION}: {too_few}")
            self.shares.append(f"{name}: {pairs}, of which an epoch draws {part.drawn:,}")

    @property
    def damage(self) -> list[str]:
        """A line for each part of any source's files that cannot be read."""
        return [line for source in self.datasets for line in getattr(source, "damage", [])]

    @property
    def notes(self) -> list[str]:
        """Other remarks on the sources, for the user."""
        return [line for source in self.datasets for line in getattr(source, "notes", [])]


def mix(
    sources: Sequence[PairDataset], names: Sequence[str], factors: Sequence[float] | None = None
) -> PairDataset:
    """Return the mixture of sources; of a single one itself, with the mixture's `parts`."""
    mixed = MixedPairs(sources, names, factors)
    if len(sources) > 1:
        return mixed
    vars(sources[0]).update(parts=mixed.parts, shares=mixed.shares)
    return sources[0]  # which may give many samples at once


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
    """Raise a UsageError if the factors are not numbers above 0, one per source."""
    given = SEPARATOR.join(f"{factor:g}" for factor in factors)
    if len(factors) != sources:
        raise UsageError(
            f"{_OPTION}: {given!r}: expected {sources} numbers, one for each source, got "
            f"{len(factors)}"
        )
    if not all(0 < factor < math.inf for factor in factors):
        raise UsageError(f"{_OPTION}: {given!r}; expected numbers above 0")
