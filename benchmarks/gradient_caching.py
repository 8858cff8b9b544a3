"""Time and peak memory of a step of gradient caching: first pass, loss, second pass.

    python benchmarks/gradient_caching.py --device cuda --output benchmarks/results/FILE.json

Two transformers of PyTorch's own layers. With `--accumulate` gradients exist before each step, as
in the second step of an accumulation. The peak is that of PyTorch's allocator during a step, above
the memory in use before it: weights, inputs, and gradients with `--accumulate`. To measure another
version of megabatch, put its `src` first on PYTHONPATH.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

import megabatch as mb
from megabatch.benchmarking import records


class Tower(nn.Module):
    """A transformer over a sequence of features; the mean of its outputs."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(width, width // 32, 4 * width, 0.1, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.normalize(self.layers(x).mean(1), dim=-1)


def measured(step: Callable[[], None], device: torch.device) -> int:
    """The peak of a step in the allocator, above the memory in use before."""
    if device.type == "cuda":
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        step()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step()
    events = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    live = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    return peak


def timed(
    step: Callable[[], None], prepare: Callable[[], None], device: torch.device, repeat: int
) -> tuple[list[float], list[float]]:
    """Seconds of each step, and seconds of the host's CPU in it; `prepare` runs before each."""
    seconds, of_host = [], []
    for _ in range(repeat):
        prepare()
        if device.type == "cuda":
            torch.cuda.synchronize()
        begun, begun_host = time.perf_counter(), time.process_time()
        step()
        of_host.append(time.process_time() - begun_host)
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begun)
    return seconds, of_host


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--pairs", type=int, default=256)
    parser.add_argument("--micro-batch-size", type=int, default=32)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--depth", type=int, default=4)
    parser.add_argument("--length", type=int, default=16)
    parser.add_argument("--accumulate", action="store_true")
    parser.add_argument("--repeat", type=int, default=7)
    parser.add_argument("--output", type=Path)
    return parser.parse_args()


def main() -> None:
    options = arguments()
    torch.manual_seed(0)
    device = torch.device(options.device)
    towers = [Tower(options.width, options.depth).to(device) for _ in range(2)]
    shape = options.pairs, options.length, options.width
    batches = [torch.randn(shape, device=device) for _ in range(2)]
    loss = mb.ClipLoss()
    cached = mb.GradientCache(
        tuple(towers), lambda x, y: loss(x, y, 14.3), options.micro_batch_size
    )

    def step() -> None:
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            value = cached(*batches)
        value.backward()

    def prepare() -> None:
        for tower in towers:
            for parameter in tower.parameters():
                parameter.grad = torch.zeros_like(parameter) if options.accumulate else None

    prepare()
    step()
    seconds, of_host = timed(step, prepare, device, options.repeat)
    prepare()
    peak = measured(step, device)
    record = {
        "contender": "megabatch",
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "n_devices": 1,
        "dtype": "bfloat16" if device.type == "cuda" else "float32",
        "b": options.pairs,
        "d": options.width,
        "micro_batch_size": options.micro_batch_size,
        "parameters": sum(p.numel() for tower in towers for p in tower.parameters()),
        "accumulate": options.accumulate,
        "ms": 1e3 * statistics.median(seconds),
        "ms_least": 1e3 * min(seconds),
        "ms_of_the_host": 1e3 * statistics.median(of_host),  # not slowed by other programs
        "extra_bytes": peak,
    }
    print(json.dumps(record))
    if options.output:
        records.write(options.output, records.command_line(options.output), [record])


if __name__ == "__main__":
    main()
