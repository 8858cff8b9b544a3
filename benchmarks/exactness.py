"""Errors of every row against float64: megabatch, a careful and an ordinary dense loss.

    python benchmarks/exactness.py --output benchmarks/results/exactness.json

The careful one accumulates products in the features' dtype in float32, computes logits and softmax
in float32 with the positive excluded from the sum, and rounds dS once. Its error is the least that
can be expected; the ordinary one is `benchmarking.measure.dense_clip_loss` under autocast.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from machinery import step, truth
from machinery.inputs import FEATURES, features
from megabatch import ClipLoss
from megabatch.benchmarking import records
from megabatch.benchmarking.measure import dense_clip_loss
from megabatch.losses.terms import minus_log_probability
from megabatch.similarity import split_logsumexp

#: Row losses below this are compared with this, as an error of 1e-15 nats does not matter.
SMALL = 1e-6


@dataclass(frozen=True)
class Record:
    """Relative errors of rows: of their losses, and of their gradients (dx and dy).

    None: not finite; of the losses also where a method gives only their mean.
    """

    contender: str
    device: str
    dtype: str
    b: int
    d: int
    features: str
    scale: float
    probability: float  #: median of the positives', over rows
    loss_median: float | None
    loss_max: float | None
    gradient_median: float | None
    gradient_p99: float | None
    gradient_max: float | None


#: (x, y, scale) -> losses (b,) if it has them, dx, dy
Method = Callable[[Tensor, Tensor, float], tuple[Tensor | None, Tensor, Tensor]]


def megabatch_rows(x: Tensor, y: Tensor, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    sides = split_logsumexp(x, y, scale)
    losses = [minus_log_probability(s.positive_sum, s.negative) for s in sides if s is not None]
    return torch.stack(losses).mean(0), *gradients(ClipLoss(), x, y, scale)


def ordinary(x: Tensor, y: Tensor, scale: float) -> tuple[None, Tensor, Tensor]:
    with torch.autocast(x.device.type, x.dtype):
        return None, *gradients(dense_clip_loss, x, y, scale)


def careful(x: Tensor, y: Tensor, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    s = scale * product(x, y.T)
    positive, negative = s.diagonal().clone(), s.fill_diagonal_(-torch.inf)
    losses, ds = rows_of(negative, positive, torch.float32)
    ds = ds.to(x.dtype)  # before 1/b, as p / b underflows in float16
    factor = scale * loss_scale(x) / (2 * len(x))
    return (
        losses,
        (factor * product(ds, y)).to(x.dtype),
        (factor * product(ds.T, x)).to(x.dtype),
    )


def exact(x: Tensor, y: Tensor, scale: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Losses, dx, dy and the positives' probabilities in float64."""
    x, y = x.double(), y.double()
    s = scale * x @ y.T
    positive, negative = s.diagonal().clone(), s.fill_diagonal_(-torch.inf)
    losses, ds = rows_of(negative, positive, torch.float64)
    factor = scale / (2 * len(x))
    return losses, factor * ds @ y, factor * ds.T @ x, (-losses).exp()


def rows_of(negative: Tensor, positive: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Each pair's loss, and 2 b dS, from logits without the diagonal."""
    sides = [torch.logsumexp(negative, dim) for dim in (1, 0)]
    losses = sum(-F.logsigmoid(positive - side) for side in sides) / 2
    wholes = [torch.logaddexp(side, positive) for side in sides]
    ds = (negative - wholes[0][:, None]).exp() + (negative - wholes[1]).exp()
    ds.diagonal().copy_(-sum(torch.sigmoid(side - positive) for side in sides))
    assert isinstance(losses, Tensor)
    assert ds.dtype == dtype
    return losses, ds


def gradients(loss: Callable[..., Tensor], x: Tensor, y: Tensor, scale: float) -> list[Tensor]:
    x, y = (t.detach().requires_grad_() for t in (x, y))
    value = loss(x, y, torch.tensor(scale, device=x.device))
    return list(torch.autograd.grad(value * loss_scale(x), (x, y)))


def loss_scale(x: Tensor) -> float:
    return step.LOSS_SCALE.get(str(x.dtype).removeprefix("torch."), 1.0)


def product(a: Tensor, b: Tensor) -> Tensor:
    """The product in float32, by the device's own matrix product of the dtype."""
    return torch.mm(a, b, out_dtype=torch.float32) if a.is_cuda else a.float() @ b.float()


METHODS: dict[str, Method] = {
    "megabatch": megabatch_rows,
    "dense, careful": careful,
    "dense": ordinary,
}


def measure(device: str, dtype: str, b: int, d: int, kind: str, scale: float) -> list[Record]:
    x, y = features(b, d, getattr(torch, dtype), device, kind)
    losses, dx, dy, probabilities = exact(x, y, scale)
    made = []
    for name, method in METHODS.items():
        rows, *found = method(x, y, scale)
        pairs = zip(found, (dx, dy), strict=True)
        errors = torch.cat(
            [truth.row_errors(mine.double() / loss_scale(x), t) for mine, t in pairs]
        )
        of_loss = None if rows is None else (rows.double() - losses).abs() / losses.clamp_min(SMALL)
        place = (name, device, dtype, b, d, kind, scale, probabilities.median().item())
        made.append(Record(*place, *quantiles(of_loss, 0.5, 1), *quantiles(errors, 0.5, 0.99, 1)))
    return made


def quantiles(errors: Tensor | None, *at: float) -> list[float | None]:
    found = [math.nan if errors is None else errors.quantile(q).item() for q in at]
    return [number if math.isfinite(number) else None for number in found]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/exactness.json"))
    parser.add_argument("--batch-size", type=int, default=4096)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    options.output.parent.mkdir(parents=True, exist_ok=True)
    done: list[Record] = []
    print(
        f"{'features':10} {'scale':>5} {'p':>8}  {'':16} loss: median max, dx, dy: median 99% max"
    )
    for dtype in ("bfloat16", "float16"):
        for kind in FEATURES:
            for scale in (14.3, 100.0):
                place = (options.device, dtype, options.batch_size, options.width)
                for one in measure(*place, kind, scale):
                    done.append(one)
                    print(row(one), flush=True)
                records.write(options.output, records.command_line(options.output), done)


def row(one: Record) -> str:
    losses = (one.loss_median, one.loss_max)
    of = (*losses, one.gradient_median, one.gradient_p99, one.gradient_max)
    numbers = " ".join("-" * 7 if n is None else f"{n:.1e}" for n in of)
    case = f"{one.features:10} {one.scale:5g} {one.probability:8.1e} {one.dtype:8}"
    return f"{case} {one.contender:15} {numbers}"


if __name__ == "__main__":
    main()
