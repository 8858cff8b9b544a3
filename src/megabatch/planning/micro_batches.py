"""The micro-batches of a step: their texts, their activations, and how many of them are kept."""

from __future__ import annotations

import bisect
import contextlib
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

import numpy as np
import torch

from megabatch.data.pairs import BadSample, PairDataset
from megabatch.gradient_cache.batches import equal_token_runs, growth
from megabatch.models import Towers
from megabatch.models.towers import Tower
from megabatch.planning.counter import Work
from megabatch.planning.towers import MicroBatch

#: Texts are cut to multiples of this many tokens (`megabatch.models.padding.trimmed`).
MULTIPLE = 8
#: Rows and tokens of a micro-batch's texts, and how many in a row are equal to it.
Texts: TypeAlias = "list[tuple[int, int, int]]"


@dataclass(frozen=True)
class TextLengths:
    """Lengths of a sample of texts, in tokens that features depend on.

    Attributes:
        samples: by tower; those of other towers have all of the tokens that the model takes.
    """

    samples: Mapping[Tower, Sequence[int]] = field(default_factory=dict)

    def micro_batches(self, tower: Tower, context: int, rows: int, count: int) -> Texts:
        """The texts of `count` micro-batches, `rows` in all, as a run divides them.

        context: tokens that the model takes.
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
    found = []
    for index in np.unique(np.linspace(0, len(dataset) - 1, samples).astype(int)):
        with contextlib.suppress(BadSample):
            found.append(dataset[int(index)])
    made: dict[Tower, list[int]] = {}
    for tower, lengths in towers.lengths.items() if found else ():
        if tower == "image":
            tokens = torch.stack([towers.train_transform(pair.image) for pair in found])
        else:
            tokens = towers.tokenizer([pair.caption for pair in found])
        made[tower] = lengths(tokens).tolist()
    return TextLengths(made)


def cut(length: int, context: int) -> int:
    """Tokens to which texts are cut if the longest has this length."""
    return min(context, -(-length // MULTIPLE) * MULTIPLE)


def kept_at_most(micro_batches: int, ranks: int) -> int:
    """The most graphs that can wait for the second pass; a single micro-batch has none.

    On several ranks the micro-batch that synchronises gradients is always encoded again.
    """
    return 0 if micro_batches == 1 else micro_batches - (ranks > 1)


def kept_count(runs: Sequence[tuple[int, int]], possible: int, *limits: int | None) -> int:
    """How many graphs, the last ones, are together within all limits of bytes.

    runs: bytes of a graph and how many in a row are as large, in the order of the micro-batches.
    possible: at most so many.
    """
    limit = min((limit for limit in limits if limit is not None), default=None)
    if limit is None:
        return possible
    count, limit = 0, max(0, limit)
    for graph, number in reversed(runs):
        size = max(1, graph)
        fitting = min(number, limit // size)
        count += fitting
        limit -= fitting * size
        if fitting < number:
            break
    return min(possible, count)


@dataclass(frozen=True)
class MicroBatches:
    """The micro-batches of a step in order, those with the longest texts first.

    A step may have millions, of which only a few differ.

    Attributes:
        runs: a micro-batch's bytes and work, and how many in a row are equal to it.
        size: pairs of one; if texts are sorted by length, their mean number.
        texts: by tower, if they are cut.
    """

    runs: tuple[tuple[MicroBatch, int], ...]
    size: int
    texts: Mapping[Tower, Texts] = field(default_factory=dict)

    @property
    def count(self) -> int:
        """How many there are."""
        return sum(number for _, number in self.runs)

    @property
    def largest(self) -> MicroBatch:
        """The one that takes the most memory."""
        return max((micro for micro, _ in self.runs), key=lambda micro: micro.peak)

    @property
    def mean_graph(self) -> int:
        """Mean bytes of a graph."""
        return sum(micro.further * number for micro, number in self.runs) // self.count

    def total(self, part: str) -> Work:
        """The work of a part of all of them."""
        work = Work()
        for micro, number in self.runs:
            work = work.plus(getattr(micro, part), number)
        return work

    def split(self, waiting: int) -> tuple[MicroBatches, MicroBatches]:
        """All but the last `waiting` ones, and those."""
        before, after, left = [], [], self.count - waiting
        for micro, number in self.runs:
            first = min(number, left)
            left -= first
            before += [(micro, first)] * (first > 0)
            after += [(micro, number - first)] * (number > first)
        return replace(self, runs=tuple(before)), replace(self, runs=tuple(after))

    def passes(self) -> dict[str, int]:
        """Bytes of activations by phase; a single micro-batch keeps its graph for the loss."""
        one = self.largest
        if self.count == 1:
            return {"encode": one.peak, "loss": one.kept, "second pass": one.peak}
        return {"encode": one.forward, "second pass": one.peak}

    def beside(self, count: int) -> dict[str, int]:
        """Bytes of this many kept graphs, at least one, by phase, beside those of `passes`."""
        waiting = self.split(count)[1].runs
        graphs = sum(micro.further * number for micro, number in waiting)
        # Forward passes without a graph come first, and the second pass begins with these graphs.
        most = graphs + max(micro.peak - micro.further for micro, _ in waiting)
        encoded = max(0, most - self.largest.forward)
        second = max(0, most - self.largest.peak)
        return {"encode": encoded, "loss": graphs, "second pass": second}


@dataclass
class Encoders:
    """The micro-batches of a model's towers, of which few are counted.

    Attributes:
        count: counts a micro-batch of so many pairs with so many tokens, by tower.
        size: pairs of one that is counted. Others are interpolated between this size and half of
            it, linearly, which is accurate but for small ones.
        contexts: tokens of the texts of the towers that get them cut.
        lengths: of these texts.
    """

    count: Callable[[int, Mapping[Tower, int]], MicroBatch]
    size: int
    contexts: Mapping[Tower, int]
    lengths: TextLengths
    _known: dict[tuple[int, tuple[int, ...]], MicroBatch] = field(default_factory=dict)

    def micro_batches(self, rows: int, size: int) -> MicroBatches:
        """The micro-batches of a process's `rows` pairs.

        They are a linear function of the tokens of each tower, from texts of the least and the
        most. Where texts are shorter than attention's tiles, its work depends on their number
        instead, and only the sum over micro-batches is right.
        """
        size = min(size, rows)
        count = -(-rows // size)
        texts = {
            tower: self.lengths.micro_batches(tower, context, rows, count)
            for tower, context in self.contexts.items()
        }
        ranges = {t: self.lengths.range(t, context) for t, context in self.contexts.items()}
        shortest = {tower: least for tower, (least, _) in ranges.items()}
        base = self._one(size, shortest)
        slopes = {
            tower: self._one(size, {**shortest, tower: most}).plus(base, -1)
            for tower, (least, most) in ranges.items()
            if most > least
        }
        if not slopes:
            return MicroBatches(((base, count),), size, texts)
        runs = []
        for at, number in side_by_side([*texts.values()]):
            micro = base
            for (tower, (least, most)), (n, width) in zip(ranges.items(), at, strict=True):
                if tower in slopes:
                    share = (n * width - size * least) / (size * (most - least))
                    micro = micro.plus(slopes[tower], share)
            runs.append((micro, number))
        return MicroBatches(tuple(runs), size, texts)

    def longer(self, rows: int, count: int) -> float:
        """How many times as many tokens a micro-batch of another batch may have, as for a run."""
        found = (self.lengths.longer(t, most, rows, count) for t, most in self.contexts.items())
        return max(found, default=1.0)

    def _one(self, size: int, widths: Mapping[Tower, int]) -> MicroBatch:
        if size != self.size and self.size > 1:
            half = self.size // 2
            first, second = self._counted(half, widths), self._counted(self.size, widths)
            return first.plus(second.plus(first, -1), (size - half) / (self.size - half))
        return self._counted(size, widths)

    def _counted(self, size: int, widths: Mapping[Tower, int]) -> MicroBatch:
        key = size, tuple(widths.values())
        if key not in self._known:
            self._known[key] = self.count(size, widths)
        return self._known[key]


def side_by_side(towers: Sequence[Texts]) -> Iterator[tuple[tuple[tuple[int, int], ...], int]]:
    """Rows and tokens of each tower, and how many micro-batches in a row have them."""
    ends = [[*itertools.accumulate(number for *_, number in runs)] for runs in towers]
    start = 0
    for end in sorted({*itertools.chain(*ends)}):
        at = [bisect.bisect_right(those, start) for those in ends]
        yield tuple(runs[i][:2] for runs, i in zip(towers, at, strict=True)), end - start
        start = end
