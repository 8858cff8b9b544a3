"""The runs of batch_study.py, their order, and the rule that chooses learning rates.

The arms of a series share runs. Let B be the largest batch, M the middle one, S the samples of a
run and N = S / B:

- `negatives`: batches of B, N steps, the rate of (B, N); the loss sees groups of each size.
- `long`: batches of M, S / M steps, the rate of (M, S / M); groups of M and of three smaller sizes.
- `samples`: batches of each size b, S / b steps, so that all runs see the same samples.
- `steps`: batches of each size b, N steps.

Each (b, steps) of the last two arms has a learning rate of its own. The rule: full runs with a seed
of their own, at `FIRST_RATES`; the best one has the highest recall@10 (the mean of both directions)
on the validation pairs. If the best rate is the lowest or the highest one, half or twice of it is
tried too, until it is neither, or a bound is reached. A run that diverged counts as the worst.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from machinery.study_runs import Run

ARMS = ("negatives", "long", "samples", "steps")
#: Groups of a batch in the arm `long`.
LONG_PARTS = (32, 8, 2, 1)
#: Learning rates differ by factors of two.
FIRST_RATES = (1e-3, 2e-3, 4e-3)
LOWEST_RATE, HIGHEST_RATE = 1e-3 / 2**5, 1e-3 * 2**6
#: Seed of the runs that choose learning rates; the study's own seeds are 0, 1, ...
TUNING_SEED = 100
#: A guess of what a run takes in addition to its steps: a new model, the evaluation.
OVERHEAD_SECONDS = 3.0

Record = dict[str, Any]
Found = Mapping[Run, Record]


@dataclass(frozen=True)
class Series:
    """The runs of one loss on one data set.

    sizes: batch sizes, each a divisor of the last and largest.
    samples: of a run, a multiple of the largest size.
    """

    data: str
    loss: str
    sizes: tuple[int, ...]
    samples: int

    def __post_init__(self) -> None:
        largest = self.sizes[-1]
        if any(largest % size for size in self.sizes) or [*self.sizes] != sorted(set(self.sizes)):
            raise ValueError(f"sizes: expected divisors of the last, ascending, got {self.sizes}")
        if self.samples % largest or not self.samples:
            raise ValueError(f"samples: expected a multiple of {largest}, got {self.samples}")

    @property
    def largest(self) -> int:
        """The largest batch, B."""
        return self.sizes[-1]

    @property
    def fewest_steps(self) -> int:
        """Steps of a run with the largest batch, N."""
        return self.samples // self.largest

    def points(self, arm: str) -> list[tuple[int, int, int, int]]:
        """The points of an arm: its size, then batch, group and steps."""
        b, n = self.largest, self.fewest_steps
        if arm == "negatives":
            return [(size, b, size, n) for size in self.sizes]
        if arm == "long":
            m = middle(self.sizes)
            groups = [m // part for part in LONG_PARTS if m // part > 1]
            return [(group, m, group, self.samples // m) for group in groups]
        if arm == "samples":
            return [(size, size, size, self.samples // size) for size in self.sizes]
        return [(size, size, size, n) for size in self.sizes]

    def shapes(self) -> list[tuple[int, int, int]]:
        """Batch, group and steps of all points, the largest size first, each once."""
        every = [point[1:] for arm in ARMS for point in reversed(self.points(arm))]
        return list(dict.fromkeys(every))

    def rate(self, batch: int, steps: int, found: Found) -> tuple[float | None, list[Run]]:
        """The learning rate of (batch, steps) if it is known, and the runs that it waits for."""
        rates = list(FIRST_RATES)
        while True:
            trials = [self._run(batch, batch, steps, rate, TUNING_SEED) for rate in rates]
            if missing := [trial for trial in trials if trial not in found]:
                return None, missing
            scores = [score(found[trial]) for trial in trials]
            best = scores.index(max(scores))
            if best == 0 and rates[0] > LOWEST_RATE:
                rates.insert(0, rates[0] / 2)
            elif best == len(rates) - 1 and rates[-1] < HIGHEST_RATE:
                rates.append(rates[-1] * 2)
            else:
                return rates[best], []

    def tuning(self, found: Found) -> Iterator[Run]:
        """The runs that learning rates wait for."""
        for batch, group, steps in self.shapes():
            if batch == group:
                yield from self.rate(batch, steps, found)[1]

    def run(self, shape: tuple[int, int, int], seed: int, found: Found) -> Run | None:
        """The run of a shape and a seed; None: its learning rate is not known yet."""
        batch, group, steps = shape
        rate, _ = self.rate(batch, steps, found)
        return None if rate is None else self._run(batch, group, steps, rate, seed)

    def _run(self, batch: int, group: int, steps: int, lr: float, seed: int) -> Run:
        return Run(self.data, self.loss, batch, group, steps, lr, seed)


def middle(sizes: Sequence[int]) -> int:
    """The middle one of ascending sizes."""
    return sizes[(len(sizes) - 1) // 2]


def pending(plan: Sequence[Series], seeds: int, found: Found) -> Iterator[Run]:
    """The runs that can begin, most informative first: of each series first those that tune.

    Then seed after seed all points of all arms, so that a study that stops early is balanced.
    """
    for series in plan:
        yield from series.tuning(found)
        for seed in range(seeds):
            for shape in series.shapes():
                run = series.run(shape, seed, found)
                if run is not None and run not in found:
                    yield run


def waiting(plan: Sequence[Series], seeds: int, found: Found) -> list[Run]:
    """The runs whose learning rate is not known yet; it is 0 here."""
    return [
        series._run(*shape, 0.0, seed)
        for series in plan
        for seed in range(seeds)
        for shape in series.shapes()
        if series.run(shape, seed, found) is None
    ]


def score(record: Record) -> float:
    """The score by which the best learning rate is chosen; -1 for a run that stopped early."""
    return float(record["tests"]["validation"]["recall@10"]) if "tests" in record else -1.0


def run_of(record: Record) -> Run:
    """The run that a record is of."""
    return Run(**{field.name: record[field.name] for field in fields(Run)})


def step_seconds(run: Run) -> float:
    """A guess of a step's time on an H200, for runs without a record of their shape.

    7 ms for the host, or 0.8 µs a pair if that is more, and 1 ms for each further group.
    """
    return max(0.007, 8e-7 * run.batch) + 1e-3 * (run.batch // run.group - 1)


def estimate(run: Run, found: Found) -> float:
    """Seconds of a run: those of its like, else a guess."""
    like = ("data", "loss", "batch", "group", "steps")
    seconds = [
        float(record["seconds"])
        for other, record in found.items()
        if all(getattr(run, name) == getattr(other, name) for name in like)
    ]
    # The least: the first run of a shape also compiles kernels.
    return min(seconds, default=OVERHEAD_SECONDS + run.steps * step_seconds(run))
