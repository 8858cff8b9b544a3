"""The micro-batches of a step: their activations, and how many of them are kept."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

from torch import nn

from megabatch.models.layers import Tower
from megabatch.planning.compiled import CompiledBlocks
from megabatch.planning.kept import kept_at_most, kept_count
from megabatch.planning.lengths import TextLengths
from megabatch.planning.towers import MicroBatch, Sample, measure
from megabatch.planning.work import Work


@dataclass(frozen=True)
class MicroBatches:
    """The micro-batches of a step in order, those with the longest texts first.

    Attributes:
        all: each one's bytes and work.
        size: pairs of one; if texts are sorted by length, their mean number.
        texts: rows and tokens of each one's texts, by tower, if they are cut.
    """

    all: tuple[MicroBatch, ...]
    size: int
    texts: Mapping[Tower, Sequence[tuple[int, int]]] = field(default_factory=dict)

    @property
    def largest(self) -> MicroBatch:
        """The one that takes the most memory."""
        return max(self.all, key=lambda micro: micro.peak)

    @property
    def once(self) -> bool:
        """Whether there is only one, which is encoded once."""
        return len(self.all) == 1

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
        graphs = [micro.further for micro in self.all]
        return kept_count(graphs, kept_at_most(len(graphs), ranks), bound, room)

    def beside(self, count: int) -> dict[str, int]:
        """Bytes of so many graphs that wait, by phase, beside those of `passes`."""
        if not count:
            return {}
        waiting = self.all[-count:]
        graphs = sum(micro.further for micro in waiting)
        # Forward passes without a graph come first, and the second pass begins with these graphs.
        most = graphs + max(micro.peak - micro.further for micro in waiting)
        encoded = max(0, most - self.largest.forward)
        second = max(0, most - self.largest.peak)
        return {"encode": encoded, "loss": graphs, "second pass": second}

    def typical_graph(self) -> int:
        """Bytes of a typical graph, as the trainer takes it for its choice."""
        return int(statistics.median(micro.further for micro in self.all))


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
            return MicroBatches((base,) * count, size, texts)
        made: dict[tuple[tuple[int, int], ...], MicroBatch] = {}
        every = []
        for at in zip(*texts.values(), strict=True):
            if at not in made:
                made[at] = base
                for tower, (n, width) in zip(texts, at, strict=True):
                    if tower in slopes:
                        slope, span = slopes[tower]
                        share = (n * width - size * shortest[tower]) / span
                        made[at] = made[at].plus(slope, share)
            every.append(made[at])
        return MicroBatches(tuple(every), size, texts)

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


def total(micro_batches: Sequence[MicroBatch], part: str) -> Work:
    """The work of a part of some micro-batches, of which there are few different ones."""
    counts = Counter(map(id, micro_batches))
    each = {id(micro): micro for micro in micro_batches}
    return sum((getattr(each[key], part) * count for key, count in counts.items()), Work())
