"""One training run of batch_study.py, and the time that a step of it takes.

The loop is as bare as can be, so that a small batch is at its best too: the data are in the GPU's
memory, and a step (rows, augmentation, towers, loss, backward pass, AdamW) is one CUDA graph, so
the host costs nothing at any size. Batches above `LARGEST_GRAPH`, and on GPUs of less than 100 GB
those of texts above `MICRO_BATCH`, go through `GradientCache`.

Losses, by name:

- `clip`, `siglip`: `ClipLoss` and `SigLipLoss` with what they learn: scale, and bias.
- `fixed-S`: `ClipLoss` with the scale S, which is not learnt.
- `sogclr-G`, `sogclr-G-S`: a global loss estimated from small batches: each sample keeps a moving
  average of its normalisers, with the rate G (Yuan et al. 2022, arXiv 2202.12387); the scale is
  learnt, or S as in FastCLIP-v1 (2407.01445).
- `hard-K`: the last three quarters of the run with one more negative for each query, drawn at
  random from its K best-ranked wrong documents after the first quarter (`similarity.topk`):
  InfoNCE in the direction of queries, which is CLIP's first half.
- `query`: that InfoNCE without mined negatives.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from typing import Any

import torch
from torch import Tensor, nn

from machinery.study_data import TOWERS, WIDTH, Pairs, StudyData
from megabatch import ClipLoss, GradientCache, InfoNCELoss, SigLipLoss
from megabatch.data.order import Order, Part
from megabatch.evaluation.retrieval import retrieval_metrics
from megabatch.similarity import topk

#: Pairs of a step in one CUDA graph; and of a micro-batch above that.
LARGEST_GRAPH, MICRO_BATCH = 65_536, 32_768
#: Points of a run at which it is evaluated, as fractions of its steps.
POINTS = (1 / 64, 1 / 32, *(i / 16 for i in range(1, 17)))
OFTEN = ("in_domain", "seen")  # the tests at all of them; the others at the end
EAGER_STEPS = 3  # before the graph is recorded, as PyTorch asks
WEIGHT_DECAY, BETAS, CLIP_NORM = 0.1, (0.9, 0.98), 1.0
KS = (1, 10)
#: Pairs of the loss that is comparable between batch sizes, and rows that are encoded at a time.
LOSS_PAIRS, ENCODED = 4096, 4096

Record = dict[str, Any]


@dataclass(frozen=True)
class Run:
    """The settings of a training run.

    data: "icons" or "texts".
    loss: see above.
    batch: pairs of a step.
    group: pairs of a step that meet in the loss; `batch` for the usual loss.
    steps: of the run, of which the fraction `warmup` is a linear warm-up; then the rate falls to
        zero by a cosine.
    lr: the largest learning rate.
    """

    data: str
    loss: str
    batch: int
    group: int
    steps: int
    lr: float
    warmup: float
    seed: int


def run_of(record: Record) -> Run:
    """The run that a record is of."""
    return Run(**{field.name: record[field.name] for field in fields(Run)})


def train_and_evaluate(run: Run, data: StudyData) -> Record:
    """A run's record: its settings, the figures at each of its `POINTS`, and all at the end."""
    began, training = time.perf_counter(), Training(run, data.train)
    record: Record = {**asdict(run), "status": "ok", "curve": []}
    for step in sorted({max(1, round(run.steps * point)) for point in POINTS}):
        first = training.done
        training.advance(step - first)
        losses = training.losses[first:step]
        if not bool(losses.isfinite().all()):
            record["status"] = f"diverged before step {step}"
            break
        figures = {name: evaluate(training.model, data.tests[name]) for name in OFTEN}
        record["curve"].append({"step": step, "training_loss": float(losses.mean()), **figures})
    else:
        record["final"] = {
            "training_loss": record["curve"][-1]["training_loss"],
            **{name: evaluate(training.model, test) for name, test in data.tests.items()},
        }
    record["scale"] = float(training.model.objective.scale.detach())
    return {**record, "seconds": round(time.perf_counter() - began, 2)}


def step_time(run: Run, data: StudyData, seconds: float) -> Record:
    """The median time of a run's step on a GPU that has nothing else to do, and its memory."""
    torch.cuda.reset_peak_memory_stats()
    training = Training(run, data.train)
    times: list[float] = []
    training.advance(EAGER_STEPS + 2)
    torch.cuda.synchronize()
    each = max(1, 8192 // run.batch)  # steps between two looks at the clock
    while sum(times) * each < seconds and training.done + each <= run.steps:
        began = time.perf_counter()
        training.advance(each)
        torch.cuda.synchronize()
        times.append((time.perf_counter() - began) / each)
    ms = 1e3 * sorted(times)[len(times) // 2]
    shape = {name: asdict(run)[name] for name in ("data", "loss", "batch", "group")}
    peak, device = torch.cuda.max_memory_allocated(), torch.cuda.get_device_name()
    return {
        **shape,
        "ms": round(ms, 4),
        "repetitions": len(times),
        "peak_bytes": peak,
        "gpu": device,
    }


class Model(nn.Module):
    """The two towers of a data set, and a loss with what it learns."""

    first: nn.Module
    second: nn.Module
    objective: Clip

    def __init__(self, run: Run, pairs: Pairs) -> None:
        super().__init__()
        self.first, self.second = TOWERS[run.data]()
        self.objective = OBJECTIVES[run.loss.partition("-")[0]](run, pairs)


class Training:
    """The state of a run.

    Attributes:
        done: steps so far.
        losses: (steps,), of each step that is done.
        at_once: whether a step has one micro-batch.
    """

    def __init__(self, run: Run, pairs: Pairs) -> None:
        self.run, self.pairs, self.done = run, pairs, 0
        device = pairs.ids.device
        torch.manual_seed(run.seed)
        self.model = Model(run, pairs).to(device).train()
        for tower in {self.model.first, self.model.second} if device.type == "cuda" else ():
            tower.compile(dynamic=False)
        matrices = [p for p in self.model.parameters() if p.ndim > 1]
        others = [p for p in self.model.parameters() if p.ndim < 2]
        groups: list[dict[str, Any]] = [
            {"params": matrices, "weight_decay": WEIGHT_DECAY},
            {"params": others},
        ]
        self.lr = torch.zeros((), device=device)
        self.optimizer = torch.optim.AdamW(
            groups, lr=self.lr, betas=BETAS, weight_decay=0.0, fused=True,
            capturable=device.type == "cuda",
        )  # fmt: skip
        # A seed gives one sequence of samples, each once in a pass over the data; the batch size
        # cuts it into steps.
        samples = Order([Part(len(pairs.ids), run.batch * run.steps)], run.seed).draws()
        self.order = torch.from_numpy(samples % len(pairs.ids)).to(device, torch.int32)
        self.rates = torch.tensor(rates(run), device=device)
        self.step = torch.zeros(1, dtype=torch.int64, device=device)
        self.losses = torch.full((run.steps,), math.nan, device=device)
        self.within = torch.arange(run.batch, device=device)
        self.graph: torch.cuda.CUDAGraph | None = None
        memory = math.inf
        if device.type == "cuda":
            memory = torch.cuda.get_device_properties(device).total_memory
        self.at_once = run.batch <= most_at_once(run, memory)

    def advance(self, steps: int) -> None:
        """Do so many steps more; the host does not wait for them."""
        for _ in range(steps):
            if self.done == self.model.objective.mined_at:
                self.model.objective.mine(self.model, self.pairs)
                self.graph = None
            if self.graph is not None:
                self.graph.replay()
            else:
                self._one()
                self._record()
            self.done += 1

    def _record(self) -> None:
        """Record the next steps' graph, after a few steps without one since the start or mining."""
        since = self.done + 1 - (self.model.objective.mined_at if self.model.objective.mined else 0)
        if self.step.is_cuda and self.at_once and since == EAGER_STEPS:
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):
                self._one()

    def _one(self) -> None:
        rows = self.order[self.step * self.run.batch + self.within].long()
        self.lr.copy_(self.rates[self.step].squeeze())
        self.optimizer.zero_grad(set_to_none=True)
        loss = self._loss(rows)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), CLIP_NORM)
        self.optimizer.step()
        self.model.objective.limit()
        self.losses.index_copy_(0, self.step, loss.detach().float().view(1))
        self.step += 1

    def _loss(self, rows: Tensor) -> Tensor:
        model, (first, second, _) = self.model, self.pairs

        def of_features(x: Tensor, y: Tensor) -> Tensor:
            negatives = model.objective.negatives(rows)
            z = None if negatives is None else encode(model.second, second[negatives])
            return model.objective(x, y, rows, z)

        if self.at_once:
            return of_features(encode(model.first, first[rows]), encode(model.second, second[rows]))
        towers = (lambda part: encode(model.first, part), lambda part: encode(model.second, part))
        step = GradientCache(towers, of_features, MICRO_BATCH)
        return step(first[rows], second[rows])


def most_at_once(run: Run, memory: float) -> int:
    """The most pairs of a micro-batch on a device of that many bytes.

    65,536 pairs of texts take 93 GB, and half as much again with a mined negative of each.
    """
    large = run.data == "texts" and (memory < 100e9 or run.loss.startswith("hard"))
    return MICRO_BATCH if large else LARGEST_GRAPH


def rates(run: Run) -> list[float]:
    """The learning rate of each step."""
    warm = max(1, round(run.warmup * run.steps))
    rest = max(1, run.steps - warm)
    falling = (0.5 + 0.5 * math.cos(math.pi * i / rest) for i in range(rest))
    return [run.lr * (i + 1) / warm for i in range(warm)] + [run.lr * share for share in falling]


def encode(tower: nn.Module, rows: Tensor) -> Tensor:
    """Normalised features, bfloat16 on a GPU."""
    with torch.autocast(rows.device.type, torch.bfloat16, rows.is_cuda, cache_enabled=False):
        # Attention's kernels take at most 65,535 sequences (torch 2.11).
        parts = [tower(part) for part in rows.split(MICRO_BATCH)]
        features = nn.functional.normalize(torch.cat(parts).float(), dim=-1)
    return features.bfloat16() if rows.is_cuda else features


# --- losses ---------------------------------------------------------------------------------------


class Clip(nn.Module):
    """`ClipLoss` with a learnt scale; pairs of equal ids are no negatives of each other."""

    mined_at, mined = -1, False  #: the step before which `mine` is called, if there is one
    start = 1 / 0.07

    def __init__(self, run: Run, pairs: Pairs) -> None:
        super().__init__()
        self.run, self.ids = run, pairs.ids
        self.loss: Any = ClipLoss(duplicates="ignored")
        self.log_scale = nn.Parameter(torch.tensor(math.log(self.start)))

    @property
    def scale(self) -> Tensor:
        """What similarities are multiplied by."""
        return self.log_scale.exp()

    def limit(self) -> None:
        """Keep the scale at or below 100, as CLIP does."""
        self.log_scale.data.clamp_(max=math.log(100))

    def keep_scale(self, scale: float) -> None:
        """Set the scale, which is not learnt."""
        self.log_scale.data.fill_(math.log(scale))
        self.log_scale.requires_grad_(False)

    def negatives(self, rows: Tensor) -> Tensor | None:
        """Rows of the training pairs whose second texts are further negatives."""
        return None

    def mine(self, model: Model, pairs: Pairs) -> None:
        """Find negatives, where a loss does."""
        raise NotImplementedError

    def forward(self, x: Tensor, y: Tensor, rows: Tensor, z: Tensor | None) -> Tensor:
        """The mean over groups of the batch: pairs of two groups never meet."""
        parts = zip(*(t.split(self.run.group) for t in (x, y, self.ids[rows])), strict=True)
        return torch.stack([self.loss(*part[:2], self.scale, ids=part[2]) for part in parts]).mean()


class Fixed(Clip):
    """`ClipLoss` with a constant scale."""

    def __init__(self, run: Run, pairs: Pairs) -> None:
        super().__init__(run, pairs)
        self.keep_scale(float(run.loss.partition("-")[2]))


class SigLip(Clip):
    """`SigLipLoss` with a learnt scale and bias, which start as its paper's."""

    start = 10.0

    def __init__(self, run: Run, pairs: Pairs) -> None:
        super().__init__(run, pairs)
        self.loss, self.bias = SigLipLoss(), nn.Parameter(torch.tensor(-10.0))

    def forward(self, x: Tensor, y: Tensor, rows: Tensor, z: Tensor | None) -> Tensor:
        """The mean over the batch."""
        loss: Tensor = self.loss(x, y, self.scale, self.bias, ids=self.ids[rows])
        return loss


class SogClr(Clip):
    """CLIP's loss over all training pairs, estimated from a batch.

    log u of a row is a moving average of its normaliser, the mean over negatives of
    exp(scale · (logit - own logit)). The gradient of log(normaliser) over the whole data set is
    estimated by that of the batch's normaliser divided by u.
    """

    log_u: Tensor

    def __init__(self, run: Run, pairs: Pairs) -> None:
        super().__init__(run, pairs)
        rate, _, scale = run.loss.partition("-")[2].partition("-")
        self.rate = float(rate)
        if scale:
            self.keep_scale(float(scale))
        self.register_buffer("log_u", torch.full((2, len(pairs.ids)), -math.inf))

    def forward(self, x: Tensor, y: Tensor, rows: Tensor, z: Tensor | None) -> Tensor:
        """The batch's mean of log(normaliser) of both directions, with the estimate's gradient."""
        logits = self.scale * (x.float() @ y.float().T)
        ids = self.ids[rows]
        masked = logits.masked_fill(ids[:, None] == ids, -math.inf)
        own, several = logits.diagonal(), math.log(len(x) - 1)
        log_g = torch.stack([masked.logsumexp(1), masked.logsumexp(0)]) - own - several
        old, now = self.log_u[:, rows], log_g.detach()
        mixed = torch.logaddexp(old + math.log1p(-self.rate), now + math.log(self.rate))
        new = torch.where(old.isinf(), now, mixed)
        self.log_u.index_copy_(1, rows, new)
        value = (now - new).exp() * log_g
        return (value - value.detach() + now).mean()


class Query(Clip):
    """InfoNCE of queries against the batch's documents."""

    def __init__(self, run: Run, pairs: Pairs) -> None:
        super().__init__(run, pairs)
        self.loss = InfoNCELoss(temperature=1 / self.start)

    def forward(self, x: Tensor, y: Tensor, rows: Tensor, z: Tensor | None) -> Tensor:
        """The mean over queries; z (b, d) has a further negative of each query alone.

        For others it might be right: of 65,536 mined documents many are another query's own.
        """
        own = None if z is None else z.unsqueeze(1)
        loss: Tensor = self.loss(x, y, own, ids=self.ids[rows], temperature=1 / self.scale)
        return loss


class Hard(Query):
    """`Query` with mined negatives from a quarter of the run on."""

    hardest: Tensor

    def __init__(self, run: Run, pairs: Pairs) -> None:
        super().__init__(run, pairs)
        self.mined_at, self.kept = run.steps // 4, int(run.loss.partition("-")[2])
        self.register_buffer("hardest", torch.zeros(len(pairs.ids), self.kept, dtype=torch.int64))

    def mine(self, model: Model, pairs: Pairs) -> None:
        """Find each query's best-ranked documents that are not its own."""
        documents, ids, rows = distinct(pairs)
        x, y = features(model.first, pairs.first), features(model.second, documents)
        _, found = topk(x, y, self.kept, ids=(pairs.ids, ids))
        self.hardest.copy_(rows[found])
        self.mined = True

    def negatives(self, rows: Tensor) -> Tensor | None:
        """One of the mined documents of each row."""
        if not self.mined:
            return None
        which = torch.randint(self.kept, (len(rows), 1), device=rows.device)
        return self.hardest[rows].gather(1, which).squeeze(1)


OBJECTIVES: dict[str, Callable[[Run, Pairs], Clip]] = {
    "clip": Clip, "fixed": Fixed, "siglip": SigLip, "sogclr": SogClr, "query": Query, "hard": Hard,
}  # fmt: skip


# --- evaluation -----------------------------------------------------------------------------------


def evaluate(model: Model, test: Pairs) -> dict[str, float]:
    """Recall at 1 and 10, the mean of both directions, and CLIP's loss of some pairs.

    Each test set is on its own: its first elements against its distinct second ones. `x_to_y` is
    the direction that a loss of queries alone trains.
    """
    documents, ids, _ = distinct(test)
    x, y = features(model.first, test.first), features(model.second, documents)
    found = retrieval_metrics(x, y, x_ids=test.ids, y_ids=ids, ks=KS, group="local")
    recalls = {
        f"recall@{k}": (found[f"x_to_y/recall@{k}"] + found[f"y_to_x/recall@{k}"]) / 2 for k in KS
    }
    recalls |= {name: found[name] for name in (f"x_to_y/recall@{k}" for k in KS)}
    few = test.rows(slice(0, LOSS_PAIRS))
    own = features(model.second, few.second)
    with torch.no_grad():
        loss = ClipLoss(duplicates="ignored")(
            x[:LOSS_PAIRS], own, model.objective.scale, ids=few.ids
        )
    return {name: round(value, 6) for name, value in {**recalls, "loss": float(loss)}.items()}


@torch.no_grad()
def features(tower: nn.Module, rows: Tensor) -> Tensor:
    """The features of rows without augmentation, (n, 256)."""
    tower.eval()
    found = rows.new_empty(len(rows), WIDTH, dtype=torch.float32)
    with torch.compiler.set_stance("force_eager"):
        for part, into in zip(rows.split(ENCODED), found.split(ENCODED), strict=True):
            into.copy_(encode(tower, part))
    tower.train()
    return found


def distinct(pairs: Pairs) -> tuple[Tensor, Tensor, Tensor]:
    """The distinct second elements of pairs, their ids, and a row of each."""
    ids, which = pairs.ids.unique(return_inverse=True)
    rows = torch.empty_like(ids).scatter_(0, which, torch.arange(len(which), device=ids.device))
    return pairs.second[rows], ids, rows
