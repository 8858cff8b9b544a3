"""The micro-batches of a step: their texts, their activations, and how many of them are kept."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from megabatch.data.pairs import BadSample, PairDataset
from megabatch.gradient_cache.by_length import equal_token_runs, growth
from megabatch.models import Towers
from megabatch.models.towers import Tower
from megabatch.planning.towers import MicroBatch, Work

#: Texts are cut to multiples of this many tokens (`megabatch.models.padding.trimmed`).
MULTIPLE = 8


@dataclass(frozen=True)
class TextLengths:
    """Lengths of a sample of texts, in tokens that features depend on.

    Attributes:
        samples: by tower; other towers' samples have all of the tokens that the model takes.
    """

    samples: Mapping[Tower, Sequence[int]] = field(default_factory=dict)

    def widths(self, tower: Tower, context: int, rows: int, count: int) -> tuple[float, float]:
        """Tokens of a text, with padding, as a run divides `rows` into `count` micro-batches.

        Their mean in all micro-batches, and in the one with the most tokens, as if all had equally
        many texts. `context`: tokens that the model takes.
        """
        runs = equal_token_runs(self._runs(tower, context, rows), count)
        mean = sum(n * width * number for n, width, number in runs) / rows
        most = max(n * width for n, width, _ in runs) / -(-rows // count)
        return mean, max(mean, most)

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


#: Texts that have all of the tokens that the model takes.
WHOLE = TextLengths()


def sampled_lengths(dataset: PairDataset, towers: Towers, samples: int = 1024) -> TextLengths:
    """The lengths of texts spread evenly over a data set, of the towers that take them cut."""
    found = []
    for index in np.unique(np.linspace(0, len(dataset) - 1, samples).astype(int)):
        with contextlib.suppress(BadSample):
            found.append(dataset[int(index)])
    made: dict[Tower, list[int]] = {}
    for tower, lengths in towers.lengths.items() if found else ():
        if tower == towers.first == "image":
            continue  # of patches, for which there is no plan
        if tower == "image":
            tokens = torch.stack([towers.train_transform(pair.image) for pair in found])
        else:
            tokens = towers.tokenizer([pair.caption for pair in found])
        made[tower] = lengths(tokens).tolist()
    return TextLengths(made)


def cut(length: int, context: int) -> int:
    """Tokens to which texts are cut if the longest has this length."""
    return min(context, -(-length // MULTIPLE) * MULTIPLE)


@dataclass(frozen=True)
class MicroBatches:
    """The micro-batches of a step: nearly alike, as texts are divided by tokens.

    Attributes:
        mean: their mean bytes and work. largest: bytes and work of the largest one.
        count: their number.
        tokens: mean tokens of a text, if texts are cut to known lengths.
    """

    mean: MicroBatch
    largest: MicroBatch
    count: int
    tokens: float = 0.0

    def nbytes(self, kept: int) -> dict[str, int]:
        """Bytes of activations by phase if the activations of `kept` micro-batches are kept.

        A single micro-batch keeps its graph for the loss.
        """
        one, graphs = self.largest, kept * self.mean.further
        if self.count == 1:
            return {"encode": one.peak, "loss": one.kept, "second pass": one.peak}
        # Forward passes without a graph come first, and the second pass begins with these graphs.
        last = graphs + one.peak - one.further if kept else 0
        return {
            "encode": max(one.forward, last),
            "loss": graphs,
            "second pass": max(one.peak, last),
        }


def weighted(parts: Sequence[MicroBatch], shares: Sequence[float]) -> MicroBatch:
    """The sum of the micro-batches' numbers, each times its share."""

    def total(name: str) -> Any:
        return np.asarray(shares) @ [getattr(one, name) for one in parts]

    made: dict[str, Any] = {n: round(total(n)) for n in ("forward", "kept", "peak", "further")}
    made["peak"] = max(made["peak"], made["kept"])  # of small ones it is nearly constant
    made |= {name: Work(*total(name)) for name in ("encode", "record", "backward")}
    return replace(parts[0], **made)
