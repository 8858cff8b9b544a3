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
        first: "image" or "text". parts: see `Part`.
        shares: a line for each source, its size and its draws; empty if all factors are 1.
        damage, notes: those of all sources.

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
        self.notes = [line for source in sources for line in getattr(source, "notes", [])]
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
                raise UsageError(f"{_OPTION}: {share}; expected 1 or more")
            self.shares.append(share)


def parse_factors(text: str, sources: int) -> list[float]:
    """Parse factors in OpenCLIP's notation, "1::2".

    Raises:
        UsageError: they are not numbers above 0, one per source.
    """
    try:
        factors = [float(part) for part in text.split(SEPARATOR)]
    except ValueError:
        factors = []
    if len(factors) != sources or not all(0 < factor < math.inf for factor in factors):
        raise UsageError(
            f"{_OPTION}: {text!r}; expected {plural(sources, 'number')} above 0, one for each "
            f"source, joined by {SEPARATOR!r}, as in '1::2'"
        )
    return factors
