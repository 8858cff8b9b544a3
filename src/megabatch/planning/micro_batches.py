"""The micro-batches of a step: their activations, and how many of them are kept."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TypeAlias

from torch import nn

from megabatch.models.layers import Tower
from megabatch.planning.compiled import CompiledBlocks
from megabatch.planning.kept import kept_at_most, kept_count
from megabatch.planning.lengths import TextLengths
from megabatch.planning.towers import MicroBatch, Sample, measure
from megabatch.planning.work import Work

#: Micro-batches, each with how many in a row are equal to it.
Runs: TypeAlias = tuple[tuple[MicroBatch, int], ...]


@dataclass(frozen=True)
class MicroBatches:
    """The micro-batches of a step in order, those with the longest texts first.

    A step may have millions, of which only a few differ.

    Attributes:
        runs: a micro-batch's bytes and work, and how many in a row are equal to it.
        size: pairs of one; if texts are sorted by length, their mean number.
        texts: by tower, if they are cut: rows and tokens of a micro-batch's texts, and how many in
            a row are equal to it.
    """

    runs: Runs
    size: int
    texts: Mapping[Tower, Sequence[tuple[int, int, int]]] = field(default_factory=dict)

    @property
    def count(self) -> int:
        """How many there are."""
        return sum(number for _, number in self.runs)

    @property
    def largest(self) -> MicroBatch:
        """The one that takes the most memory."""
        return max((micro for micro, _ in self.runs), key=lambda micro: micro.peak)

    @property
    def once(self) -> bool:
        """Whether there is only one, which is encoded once."""
        return self.count == 1

    def split(self, waiting: int) -> tuple[Runs, Runs]:
        """All but the last `waiting` ones, and those."""
        before, after = [], []
        left = self.count - waiting
        for micro, number in self.runs:
            first = min(number, left)
            left -= first
            before += [(micro, first)] * (first > 0)
            after += [(micro, number - first)] * (number > first)
        return tuple(before), tuple(after)

    def passes(self) -> dict[str, int]:
        """Bytes of activations by phase; a single micro-batch keeps its graph for the loss."""
        one = self.largest
        if self.once:
            return {"encode": one.peak, "loss": one.kept, "second pass": one.peak}
        return {"encode": one.forward, "second pass": one.peak}

    def kept(self, ranks: int, bound: int | None, room: int | None) -> int:
        """How many graphs wait for the second pass, the last ones.

        bound, room: bytes for them that the user and the memory allow; None: any number.
        """
        graphs = [(micro.further, number) for micro, number in self.runs]
        return kept_count(graphs, kept_at_most(self.count, ranks), bound, room)

    def beside(self, count: int) -> dict[str, int]:
        """Bytes of this many kept graphs, by phase, in addition to those of `passes`."""
        if not count:
            return {}
        _, waiting = self.split(count)
        graphs = sum(micro.further * number for micro, number in waiting)
        # Forward passes without a graph come first, and the second pass begins with these graphs.
        most = graphs + max(micro.peak - micro.further for micro, _ in waiting)
        encoded = max(0, most - self.largest.forward)
        second = max(0, most - self.largest.peak)
        return {"encode": encoded, "loss": graphs, "second pass": second}

    def typical_graph(self) -> int:
        """Bytes of a typical graph, as the trainer takes it for its choice."""
        graphs = sorted((micro.further, number) for micro, number in self.runs)
        ends = [*itertools.accumulate(number for _, number in graphs)]
        middle = (self.count - 1) // 2, self.count // 2
        return sum(graphs[bisect.bisect_right(ends, at)][0] for at in middle) // 2


@dataclass
class Encoders:
    """Counts micro-batches of a model's towers, each kind once.

    Attributes:
        module: the model's.
        sample: one of its pairs.
        device, precision: of the run.
        lengths: of the texts.
        cut: the towers whose texts are cut.
        compiled: counts blocks as compiled ones; None: as they are.
        context: makes the context of a count.
    """

    module: nn.Module
    sample: Sample
    device: str
    precision: str
    lengths: TextLengths
    cut: frozenset[Tower]
    compiled: CompiledBlocks | None
    context: Callable[[], AbstractContextManager[None]]
    _known: dict[tuple[int, tuple[int, ...]], MicroBatch] = field(default_factory=dict)

    def micro_batches(
        self, rows: int, size: int, between: tuple[int, int] | None = None
    ) -> MicroBatches:
        """The micro-batches of a process's `rows` pairs.

        between: two sizes, of which the size's memory is interpolated linearly; that is accurate
            but for small ones, and nothing needs to be counted for the size itself.
        """
        count = -(-rows // size)
        texts = {
            tower: self.lengths.micro_batches(tower, self.sample.context(tower), rows, count)
            for tower in ("image", "text")
            if tower in self.cut
        }
        # A linear function of the tokens of each tower, from texts of the least and the most. Where
        # texts are shorter than attention's tiles, its work depends on their number instead, and
        # only the sum over micro-batches is right.
        ranges = {t: self.lengths.range(t, self.sample.context(t)) for t in texts}
        shortest = {tower: least for tower, (least, _) in ranges.items()}
        base = self._one(size, shortest, between)
        slopes = {}
        for tower, (least, most) in ranges.items():
            if most > least:
                other = self._one(size, {**shortest, tower: most}, between)
                slopes[tower] = (other.minus(base), size * (most - least))
        if not slopes:
            return MicroBatches(((base, count),), size, texts)
        runs = []
        for at, number in side_by_side([*texts.values()]):
            micro = base
            for tower, (n, width) in zip(texts, at, strict=True):
                if tower in slopes:
                    slope, span = slopes[tower]
                    share = (n * width - size * shortest[tower]) / span
                    micro = micro.plus(slope, share)
            runs.append((micro, number))
        return MicroBatches(tuple(runs), size, texts)

    def _one(
        self, size: int, widths: Mapping[Tower, int], between: tuple[int, int] | None
    ) -> MicroBatch:
        if between is not None:
            low, high = between
            first, second = self._one(low, widths, None), self._one(high, widths, None)
            return first.plus(second.minus(first), (size - low) / (high - low))
        key = size, tuple(widths.values())
        if key not in self._known:
            sample = self.sample.with_widths(widths)
            with self.context():
                self._known[key] = measure(
                    *(self.module, sample, size, self.device, self.precision, self.compiled)
                )
        return self._known[key]


def side_by_side(
    towers: Sequence[Sequence[tuple[int, int, int]]],
) -> Iterator[tuple[tuple[tuple[int, int], ...], int]]:
    """Rows and tokens of each tower, and how many micro-batches in a row have them."""
    ends = [[*itertools.accumulate(number for *_, number in runs)] for runs in towers]
    start = 0
    for end in sorted({*itertools.chain(*ends)}):
        at = [bisect.bisect_right(those, start) for those in ends]
        yield tuple(runs[i][:2] for runs, i in zip(towers, at, strict=True)), end - start
        start = end


def total(runs: Runs, part: str) -> Work:
    """The work of a part of some micro-batches."""
    return sum((getattr(micro, part) * number for micro, number in runs), Work())
