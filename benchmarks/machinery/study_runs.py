"""One run of batch_study.py: training by the library's trainer, then retrieval on each test set."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from machinery.study_data import MODELS, Pairs, StudyData
from megabatch.config.objective import Objective, create_objective
from megabatch.config.settings import TrainConfig
from megabatch.data import Batch
from megabatch.data.order import Order, Part
from megabatch.evaluation.retrieval import chance_metrics, retrieval_metrics
from megabatch.training.setup import build_towers
from megabatch.training.trainer import Trainer, TrainingStopped

#: Rows that go through the towers at a time. It changes memory only, no gradient.
MICRO_BATCH = 8192
#: Losses of a run's record: the training loss in as many equal parts of the run.
CURVE = 32
KS = (1, 10)

Precision: TypeAlias = Literal["bf16", "fp32"]


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


def train_and_evaluate(run: Run, data: StudyData, precision: Precision = "bf16") -> dict[str, Any]:
    """A run's record: its settings, the training loss, and the figures of each test set."""
    device = data.train.ids.device
    began = time.perf_counter()
    record: dict[str, Any] = {**asdict(run), "status": "ok"}
    torch.manual_seed(run.seed)
    config = configuration(run, precision)
    towers = build_towers(config)
    objective = create_objective(config)
    trainer = Trainer(
        *(config, towers.module, device, run.steps),
        objective=objective if run.group == run.batch else InGroups(objective, run.group),
    )
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


def configuration(run: Run, precision: Precision) -> TrainConfig:
    """The trainer's settings; what is not here is its default."""
    return TrainConfig(
        model=MODELS[run.data],
        loss=run.loss,
        global_batch_size=run.batch,
        micro_batch_size=min(run.batch, MICRO_BATCH),
        steps=run.steps,
        lr=run.lr,
        warmup=warmup(run.steps),
        seed=run.seed,
        precision=precision,
    )


def warmup(steps: int) -> int:
    """Steps of the warm-up: a tenth of the run, whatever the batch size."""
    return max(1, steps // 10)


def batches(train: Pairs, run: Run) -> Iterator[Batch]:
    """The batches of a run.

    A seed gives one sequence of samples, each once in a pass over the data: runs of other batch
    sizes cut the same one into other steps.
    """
    count, total = len(train.ids), run.batch * run.steps
    order = Order([Part(count, total)], run.seed, shuffle=True).draws() % count
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
    return means(chance_metrics(test.ids, distinct(test)[1], ks=KS))


def means(figures: dict[str, float]) -> dict[str, float]:
    """The mean over both directions of each recall."""
    both = {k: (figures[f"x_to_y/recall@{k}"] + figures[f"y_to_x/recall@{k}"]) / 2 for k in KS}
    return {f"recall@{k}": round(value, 6) for k, value in both.items()}


def distinct(test: Pairs) -> tuple[Tensor, Tensor]:
    """The distinct texts of a test set, and their ids."""
    ids, which = test.ids.unique(return_inverse=True)
    first = torch.empty_like(ids).scatter_(0, which, torch.arange(len(which), device=ids.device))
    return test.texts[first], ids
