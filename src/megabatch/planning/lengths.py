"""The tokens of each micro-batch's texts, which the trainer sorts by length and cuts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from megabatch.models.layers import Tower

#: Texts are cut to multiples of this many tokens (`megabatch.models.padding.trimmed`).
MULTIPLE = 8


@dataclass(frozen=True)
class TextLengths:
    """Lengths of a sample of texts, in tokens that features depend on.

    Attributes:
        samples: by tower; those of other towers have all of the tokens that the model takes.
    """

    samples: Mapping[Tower, Sequence[int]] = field(default_factory=dict)

    def widths(self, tower: Tower, context: int, rows: int, size: int) -> list[int]:
        """Tokens of each micro-batch of `size` out of `rows` texts, the longest ones first.

        context: tokens that the model takes.
        """
        count = -(-rows // size)
        sample = sorted(self.samples.get(tower, ()), reverse=True)
        if not sample:
            return [context] * count
        # The longest text of a micro-batch has the rank i * size of `rows`.
        longest = (sample[i * size * len(sample) // rows] for i in range(count))
        return [cut(length, context) for length in longest]

    def range(self, tower: Tower, context: int) -> tuple[int, int]:
        """Tokens of the shortest and of the longest texts, as they are cut."""
        sample = self.samples.get(tower) or (context,)
        return cut(min(sample), context), cut(max(sample), context)

    @property
    def mean(self) -> float | None:
        """The mean length; None without a sample."""
        found = [length for sample in self.samples.values() for length in sample]
        return sum(found) / len(found) if found else None


def cut(length: int, context: int) -> int:
    """Tokens of a micro-batch whose longest text has this length."""
    return min(context, -(-length // MULTIPLE) * MULTIPLE)
