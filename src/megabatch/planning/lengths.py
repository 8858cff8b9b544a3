"""The tokens of each micro-batch's texts, which the trainer sorts by length and cuts."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from megabatch.data.late import UndecodedPairs
from megabatch.data.pairs import BadSample, PairDataset
from megabatch.models import Towers
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


def sampled_lengths(dataset: PairDataset, towers: Towers, samples: int = 1024) -> TextLengths:
    """The lengths of texts spread evenly over a data set, of the towers that take them cut."""
    if not towers.lengths:
        return TextLengths()
    pairs, found = UndecodedPairs(dataset), []
    for index in np.unique(np.linspace(0, len(dataset) - 1, samples).astype(int)):
        with contextlib.suppress(BadSample):
            found.append(pairs[int(index)])
    made: dict[Tower, list[int]] = {}
    for tower, lengths in towers.lengths.items():
        if not found:
            continue
        if tower == "image":
            tokens = torch.stack([towers.train_transform(pair.image) for pair in found])
        else:
            tokens = towers.tokenizer([pair.caption for pair in found])
        made[tower] = lengths(tokens).tolist()
    return TextLengths(made)


def cut(length: int, context: int) -> int:
    """Tokens of a micro-batch whose longest text has this length."""
    return min(context, -(-length // MULTIPLE) * MULTIPLE)
