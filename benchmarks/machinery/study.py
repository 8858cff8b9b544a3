"""The runs of batch_study.py: which there are, in which order, and what each of them does.

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

import itertools
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

import torch
from torch import Tensor

from machinery.study_data import MODELS, Pairs, StudyData
from megabatch.config.objective import Objective, create_objective
from megabatch.config.settings import TrainConfig
from megabatch.data import Batch
from megabatch.data.order import Order, Part
from megabatch.evaluation.retrieval import retrieval_metrics
from megabatch.training.checkpoint import TrainingStopped
from megabatch.training.setup import build_towers
from megabatch.training.trainer import Trainer

ARMS = ("negatives", "long", "samples", "steps")
#: Groups of a batch in the arm `long`.
LONG_PARTS = (32, 8, 2, 1)
#: Learning rates differ by factors of two.
FIRST_RATES = (1e-3, 2e-3, 4e-3)
LOWEST_RATE, HIGHEST_RATE = 1e-3 / 2**5, 1e-3 * 2**6
#: Seed of the runs that choose learning rates; the study's own seeds are 0, 1, ...
TUNING_SEED = 100
#: Rows that go through the towers at a time. It changes memory only, no gradient.
MICRO_BATCH = 8192
#: Losses of a run's record: the training loss in as many equal parts of the run.
CURVE = 32
KS = (1, 10)

Record = dict[str, Any]


@dataclass(frozen=True)
class Run:
    """The settings of a training run.

    data: a key of `MODELS`.
    loss: of the trainer.
    batch: pairs of a step.
    group: pairs of a step that meet in the loss; `batch` for the usual loss.
    """

    data: str
    loss: str
    batch: int
    group: int
    steps: int
    lr: float
    seed: int


Found = Mapping[Run, Record]


# --- which runs, and in which order ---------------------------------------------------------------


@dataclass(frozen=True)
class Series:
    """The runs of one loss on one data set.

    sizes: batch sizes, ascending, each a divisor of the last.
    samples: of a run, a multiple of the largest size.
    """

    data: str
    loss: str
    sizes: tuple[int, ...]
    samples: int

    def points(self, arm: str) -> list[tuple[int, int, int, int]]:
        """The points of an arm: its size, then batch, group and steps."""
        largest = self.sizes[-1]
        fewest = self.samples // largest
        if arm == "negatives":
            return [(size, largest, size, fewest) for size in self.sizes]
        if arm == "long":
            m = middle(self.sizes)
            groups = [m // part for part in LONG_PARTS if m // part > 1]
            return [(group, m, group, self.samples // m) for group in groups]
        if arm == "samples":
            return [(size, size, size, self.samples // size) for size in self.sizes]
        return [(size, size, size, fewest) for size in self.sizes]

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
            scores = [_score(found[trial]) for trial in trials]
            best = scores.index(max(scores))
            if best == 0 and rates[0] > LOWEST_RATE:
                rates.insert(0, rates[0] / 2)
            elif best == len(rates) - 1 and rates[-1] < HIGHEST_RATE:
                rates.append(rates[-1] * 2)
            else:
                return rates[best], []

    def runs(self, seeds: int, found: Found) -> Iterator[Run]:
        """The runs that can begin or are done: first those that tune, then seed after seed."""
        for batch, group, steps in self.shapes():
            if batch == group:
                yield from self.rate(batch, steps, found)[1]
        for seed, (batch, group, steps) in itertools.product(range(seeds), self.shapes()):
            rate, _ = self.rate(batch, steps, found)
            if rate is not None:
                yield self._run(batch, group, steps, rate, seed)

    def _run(self, batch: int, group: int, steps: int, lr: float, seed: int) -> Run:
        return Run(self.data, self.loss, batch, group, steps, lr, seed)


def middle(sizes: Sequence[int]) -> int:
    """The middle one of ascending sizes."""
    return sizes[(len(sizes) - 1) // 2]


def pending(plan: Sequence[Series], seeds: int, found: Found) -> list[Run]:
    """The runs that can begin, most informative first.

    Other runs follow when these have chosen their learning rates.
    """
    every = (run for series in plan for run in series.runs(seeds, found))
    return [run for run in every if run not in found]


def run_of(record: Record) -> Run:
    """The run that a record is of."""
    return Run(**{field.name: record[field.name] for field in fields(Run)})


def _score(record: Record) -> float:
    """The score by which the best learning rate is chosen; -1 for a run that stopped early."""
    return float(record["tests"]["validation"]["recall@10"]) if "tests" in record else -1.0


# --- one run --------------------------------------------------------------------------------------


class InGroups(Objective):
    """The mean of a loss over groups of consecutive pairs; pairs of two groups never meet.

    So the optimizer's batch stays the same, and only the number of negatives changes.
    """

    def __init__(self, objective: Objective, size: int) -> None:
        super().__init__(objective.loss, objective.takes - {"ids", "negatives"})
        self.size = size

    def forward(
        self, image_features: Tensor, text_features: Tensor, *scale_and_bias: Any, **named: Any
    ) -> Tensor:
        """As `Objective`, without ids and negatives."""
        groups = zip(image_features.split(self.size), text_features.split(self.size), strict=True)
        return torch.stack(
            [super(InGroups, self).forward(*g, *scale_and_bias, **named) for g in groups]
        ).mean()


def train_and_evaluate(run: Run, data: StudyData, precision: str) -> Record:
    """A run's record: its settings, the training loss, and the figures of each test set."""
    device = data.train.ids.device
    began = time.perf_counter()
    record: Record = {**asdict(run), "status": "ok"}
    torch.manual_seed(run.seed)
    config = TrainConfig(
        model=MODELS[run.data],
        loss=run.loss,
        global_batch_size=run.batch,
        micro_batch_size=min(run.batch, MICRO_BATCH),
        steps=run.steps,
        lr=run.lr,
        warmup=max(1, run.steps // 10),
        seed=run.seed,
        precision=precision,  # type: ignore[arg-type]
    )
    towers = build_towers(config)
    objective = create_objective(config)
    if run.group != run.batch:
        objective = InGroups(objective, run.group)
    trainer = Trainer(config, towers.module, device, run.steps, objective=objective)
    losses = []
    try:
        for batch in batches(data.train, run):
            losses.append(trainer.train_step(batch)["loss"])
    except TrainingStopped as stopped:
        record["status"] = str(stopped)
    trained = time.perf_counter()
    record |= {
        "losses": in_parts(losses, CURVE),
        "logit_scale": trainer.scale_values().get("logit_scale"),
        "training_seconds": round(trained - began, 2),
    }
    if record["status"] == "ok":
        record["tests"] = {name: evaluate(towers.module, test) for name, test in data.tests.items()}
    return {**record, "seconds": round(time.perf_counter() - began, 2)}


def batches(train: Pairs, run: Run) -> Iterator[Batch]:
    """The batches of a run.

    A seed gives one sequence of samples, each once in a pass over the data: runs of other batch
    sizes cut the same one into other steps.
    """
    count, total = len(train.ids), run.batch * run.steps
    order = Order([Part(count, total)], run.seed).draws() % count
    rows = torch.from_numpy(order).to(train.ids.device)
    for chosen in rows.split(run.batch):
        first, texts, _ = train.rows(chosen)
        yield Batch(first, texts, chosen)


def in_parts(values: list[float], parts: int) -> list[float]:
    """The means of equal parts of a list, of each value if there are fewer."""
    parts = min(parts, len(values))
    bounds = [len(values) * i // parts for i in range(parts + 1)] if parts else []
    return [round(statistics.fmean(values[a:b]), 5) for a, b in itertools.pairwise(bounds)]


@torch.no_grad()
def evaluate(module: Any, test: Pairs) -> dict[str, float]:
    """Figures of retrieval in both directions, and recalls' means over the two.

    Each test set is on its own: its first elements (x) against its distinct texts (y).
    """
    module.eval()
    texts, ids = distinct(test)
    x = torch.cat(
        [module.encode_image(rows, normalize=True) for rows in test.first.split(MICRO_BATCH)]
    )
    y = torch.cat([module.encode_text(rows, normalize=True) for rows in texts.split(MICRO_BATCH)])
    found = retrieval_metrics(x, y, x_ids=test.ids, y_ids=ids, ks=KS, group="local")
    return {**means(found), **{name: round(value, 6) for name, value in found.items()}}


def chance(test: Pairs) -> dict[str, float]:
    """The same figures of answers in random order."""
    _, ids = distinct(test)
    x, y = (torch.ones(len(side), 1) for side in (test.ids, ids))  # equal scores are random orders
    return means(retrieval_metrics(x, y, x_ids=test.ids, y_ids=ids, ks=KS, group="local"))


def means(figures: dict[str, float]) -> dict[str, float]:
    """The mean over both directions of each recall."""
    both = {k: (figures[f"x_to_y/recall@{k}"] + figures[f"y_to_x/recall@{k}"]) / 2 for k in KS}
    return {f"recall@{k}": round(value, 6) for k, value in both.items()}


def distinct(test: Pairs) -> tuple[Tensor, Tensor]:
    """The distinct texts of a test set, and their ids."""
    ids, which = test.ids.unique(return_inverse=True)
    first = torch.empty_like(ids).scatter_(0, which, torch.arange(len(which), device=ids.device))
    return test.texts[first], ids
