"""CLIP's loss with distillation from a teacher: time, memory and error, and the dense expression's.

    python benchmarks/distillation.py --output benchmarks/results/distillation.json

The necessary work is 8 b²d + 4 b²d' operations for a student of width d and a teacher of width d';
`fraction` is the share of the sustained product rate that it takes place at, measured right before
and right after. "dense" and "dense-compiled" are OpenCLIP's DistillClipLoss written out (its own if
it is installed). `--smallest` runs on the CPU at sizes that only show that it runs.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import megabatch as mb
from megabatch.benchmarking import memory, records
from megabatch.benchmarking.clock import product_rate, times

Loss = Callable[..., Any]


@dataclass(frozen=True)
class Distillation:
    """One contender at one size."""

    contender: str
    device: str
    n_devices: int
    dtype: str
    b: int
    d: int
    teacher_d: int
    status: str
    ms: float | None
    fraction: float | None
    product_tflops: float | None
    extra_bytes: int | None
    max_row_error: float | None  #: of dx, relative to the row's norm in float64; of 4,096 pairs


def dense(x: Tensor, y: Tensor, scale: Tensor, u: Tensor, v: Tensor, factor: Tensor) -> Any:
    """Both losses, as OpenCLIP has them."""
    logits, targets = scale * x @ y.T, factor * u @ v.T
    labels = torch.arange(len(x), device=x.device)
    contrastive = (F.cross_entropy(logits, labels) + F.cross_entropy(logits.T, labels)) / 2
    distill = [
        -(t.softmax(1) * s.log_softmax(1)).sum(1).mean()
        for s, t in ((logits, targets), (logits.T, targets.T))
    ]
    return contrastive, (distill[0] + distill[1]) / 2


def contenders() -> dict[str, Loss]:
    """By name; each is called as OpenCLIP's."""
    return {
        "megabatch": mb.DistillClipLoss(),
        "megabatch, CLIP alone": lambda x, y, s, *_: (mb.ClipLoss()(x, y, s), 0.0),
        "dense": dense,
        "dense-compiled": torch.compile(dense),
    }


def main() -> None:
    options = arguments()
    device = "cpu" if options.smallest else "cuda"
    sizes = [(256, 16, 24)] if options.smallest else options.sizes
    found: list[Distillation] = []
    for b, d, teacher_d in sizes:
        for name, loss in contenders().items():
            if name in options.contenders:
                torch.manual_seed(0)
                one = measure(name, loss, (b, d, teacher_d), device, options.seconds)
                found.append(one)
                print(one, flush=True)
                records.write(options.output, records.command_line(options.output), found)


def measure(
    name: str, loss: Loss, sizes: tuple[int, int, int], device: str, seconds: float
) -> Distillation:
    """Time, memory and error of one contender."""
    b, d, teacher_d = sizes
    inputs = features(b, d, teacher_d, device)
    about = (name, device, 1, "bfloat16", b, d, teacher_d)
    call = forward_backward(loss, inputs, device)
    try:
        call()  # may compile; leaves gradients, whose memory the next call takes again
        extra = memory.extra_bytes(call, device)
        size = 8192 if device == "cuda" else 256
        rates = [product_rate(device, torch.bfloat16, size, seconds)]
        ms = statistics.median(times(call, device, seconds, 3))
        rates.append(product_rate(device, torch.bfloat16, size, seconds))
    except Exception as error:
        if memory.is_out_of_memory(error):
            return Distillation(*about, "out of memory", None, None, None, None, None)
        raise
    rate = statistics.fmean(rates)
    work = 8 * b * b * d + (0 if "alone" in name else 4 * b * b * teacher_d)
    worst = None if "alone" in name else row_error(loss, device, d, teacher_d)
    fraction = work / (ms / 1e3) / rate
    return Distillation(*about, "ok", ms, fraction, rate / 1e12, max(0, extra), worst)


def features(b: int, d: int, teacher_d: int, device: str) -> list[Tensor]:
    """Student and teacher with half-learnt pairs, and their scales."""
    sides = []
    for width in (d, teacher_d):
        x = F.normalize(torch.randn(b, width, device=device), dim=1)
        y = F.normalize(x + torch.randn(b, width, device=device) / width**0.5, dim=1)
        sides.append([x.bfloat16(), y.bfloat16()])
    student = [t.requires_grad_() for t in sides[0]]
    scales = [torch.tensor(s, device=device) for s in (50.0, 100.0)]
    return [*student, scales[0].requires_grad_(), *sides[1], scales[1]]


def forward_backward(loss: Loss, inputs: list[Tensor], device: str) -> Callable[[], None]:
    def call() -> None:
        for tensor in inputs[:3]:
            tensor.grad = None
        with torch.autocast(device, torch.bfloat16):
            contrastive, distill = loss(*inputs)
        (contrastive + distill).backward()

    return call


def row_error(loss: Loss, device: str, d: int, teacher_d: int) -> float:
    """Largest error of a row of dx against float64, relative to its norm."""
    inputs = features(256 if device == "cpu" else 4096, d, teacher_d, device)
    forward_backward(loss, inputs, device)()
    wide = [t.detach().double() for t in inputs]
    wide[0].requires_grad_()
    (exact,) = torch.autograd.grad(sum(dense(*wide)), wide[0])
    assert inputs[0].grad is not None
    return float(((inputs[0].grad.double() - exact).norm(dim=1) / exact.norm(dim=1)).max())


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/distillation.json"))
    parser.add_argument("--contenders", nargs="+", default=list(contenders()), metavar="NAME")
    parser.add_argument("--seconds", type=float, default=2.0, help="of each series")
    parser.add_argument("--smallest", action="store_true", help="tiny, on the CPU")
    parser.add_argument(
        "--sizes",
        type=lambda words: tuple(map(int, words.split(","))),
        nargs="+",
        default=[(65_536, 768, 768), (65_536, 512, 1024), (16_384, 768, 768)],
        metavar="B,D,D'",
    )
    options = parser.parse_args()
    if options.smallest:
        options.seconds = 0.0
    return options


if __name__ == "__main__":
    main()
