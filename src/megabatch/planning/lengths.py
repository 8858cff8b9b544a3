"""The tokens of each micro-batch's texts, which the trainer sorts by length and cuts."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from megabatch.data.pairs import BadSample, PairDataset, undecoded
from megabatch.gradient_cache.by_length import equal_token_runs, growth
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

    def micro_batches(
        self, tower: Tower, context: int, rows: int, count: int
    ) -> list[tuple[int, int, int]]:
        """The texts of `count` micro-batches, `rows` in all, as a run divides them.

        context: tokens that the model takes.

        Returns:
            Texts and tokens of a micro-batch, and how many in a row are equal to it.
        """
        return equal_token_runs(self._runs(tower, context, rows), count)

    def longer(self, tower: Tower, context: int, rows: int, count: int) -> float:
        """How many times as many tokens a micro-batch of another batch may have, as for a run.

        A single length is every text's.
        """
        if len(self.samples.get(tower, ())) == 1:
            return 1.0
        return growth(self._runs(tower, context, rows), context, count)

    def range(self, tower: Tower, context: int) -> tuple[int, int]:
        """Tokens of the shortest and of the longest texts, as they are cut."""
        sample = self.samples.get(tower) or (context,)
        return cut(min(sample), context), cut(max(sample), context)

    def _runs(self, tower: Tower, context: int, rows: int) -> list[tuple[int, int]]:
        """The texts of a batch, which are spread as the sample is; without one, none is cut."""
        sample = sorted(self.samples.get(tower) or (context,), reverse=True)
        runs, share, start = [], 0, 0
        for tokens, group in itertools.groupby(sample, key=lambda length: cut(length, context)):
            share += len([*group])
            end = -(-share * rows // len(sample))
            runs.append((tokens, end - start))
            start = end
        return [(tokens, n) for tokens, n in runs if n]


def sampled_lengths(dataset: PairDataset, towers: Towers, samples: int = 1024) -> TextLengths:
    """The lengths of texts spread evenly over a data set, of the towers that take them cut."""
    if not towers.lengths:
        return TextLengths()
    read, found = undecoded(dataset), []
    for index in np.unique(np.linspace(0, len(dataset) - 1, samples).astype(int)):
        with contextlib.suppress(BadSample):
            found.append(read(int(index)))
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
    """Tokens to which texts are cut if the longest has this length."""
    return min(context, -(-length // MULTIPLE) * MULTIPLE)
