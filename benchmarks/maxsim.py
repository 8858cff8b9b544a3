"""Late interaction: time, memory and share of the matrix unit's rate, beside others.

    python benchmarks/maxsim.py --output benchmarks/results/maxsim.json
    python benchmarks/maxsim.py --device cpu --shape 128 32 128 128 --shape 256 32 256 128 \
        --output benchmarks/results/maxsim-cpu.json

A step is `MaxSimLoss` of random unit tokens, in bfloat16 (on the CPU float32), with gradients. Work
is counted as 4 b² l k d: the products of both passes, without those of the gradients. The others
are late-interaction-kernels' `maxsim` with PyTorch's cross-entropy, and the dense expression.
"""

from __future__ import annotations

import argparse
import importlib.util
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import megabatch as mb
from megabatch.benchmarking import records

#: Queries and documents, tokens of each, width.
HEADLINE = (16_384, 32, 256, 128)
#: Those of late-interaction-kernels' own benchmark, and one of which few blocks are saved.
SHAPES = [(b, l, k, 128) for b in (128, 256, 512, 1024) for l in (32, 128) for k in (256, 1024)]  # noqa: E741
SHAPES += [(4096, 32, 256, 128), (128, 32, 8192, 128), (256, 128, 8192, 128), (1024, 32, 2048, 128)]
SCALE = 20.0
LOSS = mb.MaxSimLoss(1 / SCALE)


def megabatch(queries: Tensor, documents: Tensor) -> Tensor:
    loss: Tensor = LOSS(queries, documents)
    return loss


def dense(queries: Tensor, documents: Tensor) -> Tensor:
    products = (queries.flatten(0, 1) @ documents.flatten(0, 1).T).float()
    b = len(queries)
    scores = products.view(b, -1, b, documents.shape[1]).amax(3).sum(1)
    return F.cross_entropy(SCALE * scores, torch.arange(b, device=scores.device))


def late_interaction_kernels(queries: Tensor, documents: Tensor) -> Tensor:
    from late_interaction_kernels import maxsim

    scores = maxsim(queries, documents)
    return F.cross_entropy(SCALE * scores, torch.arange(len(queries), device=scores.device))


def seconds(step: Callable[[], Any], device: str, at_least: float) -> float:
    """Median time of a step, of those that fit into `at_least` seconds, three at least."""
    wait = torch.cuda.synchronize if device == "cuda" else int
    step()
    wait()
    times: list[float] = []
    while len(times) < 3 or sum(times) < at_least:
        start = time.perf_counter()
        step()
        wait()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def measure(name: str, shape: Sequence[int], device: str, at_least: float = 0.5) -> dict[str, Any]:
    """One contender at one shape."""
    b, l, k, d = shape  # noqa: E741
    found: dict[str, Any] = {"contender": name, "b": b, "l": l, "k": k, "d": d}
    if name == "late-interaction-kernels" and not importlib.util.find_spec(name.replace("-", "_")):
        return found | {"status": "not installed"}
    loss = {"megabatch": megabatch, "dense": dense}.get(name, late_interaction_kernels)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    tokens = [F.normalize(torch.randn(b, n, d, device=device), dim=2) for n in (l, k)]
    leaves = [t.to(dtype).requires_grad_() for t in tokens]
    before = torch.cuda.memory_allocated() if device == "cuda" else 0
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    try:
        taken = seconds(lambda: loss(*leaves).backward(), device, at_least)
    except torch.OutOfMemoryError:
        return found | {"status": "out of memory"}
    found |= {"status": "measured", "ms": taken * 1e3}
    found["tflops"] = 4 * b * b * l * k * d / taken / 1e12
    if device == "cuda":
        found["extra_bytes"] = torch.cuda.max_memory_allocated() - before
    return found


def product_tflops(device: str, dtype: torch.dtype) -> float:
    """The rate of a large product, after 2 seconds of them."""
    size = 8192 if device == "cuda" else 1024
    x = torch.randn(size, size, device=device, dtype=dtype)
    return 2 * size**3 / seconds(lambda: x @ x, device, 2.0) / 1e12


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/maxsim.json"))
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--shape", type=int, nargs=4, action="append", help="instead of all")
    options = parser.parse_args()
    rate = product_tflops(
        options.device, torch.bfloat16 if options.device == "cuda" else torch.float32
    )
    rows = [] if options.shape else [measure("megabatch", HEADLINE, options.device, 8.0)]
    for shape in options.shape or SHAPES:
        for name in ("megabatch", "late-interaction-kernels", "dense"):
            if name != "late-interaction-kernels" or options.device == "cuda":
                rows.append(measure(name, shape, options.device))
    command = records.command_line(options.output)
    records.write(options.output, command, rows, product_tflops=rate)
    for row in rows:
        size = "{b:6,} x {l:4} x {k:5} x {d:4}".format(**row)
        share = f"{row['ms']:9.2f} ms {row['tflops'] / rate:6.1%}" if "ms" in row else row["status"]
        print(f"{row['contender']:25} {size} {share}")


if __name__ == "__main__":
    main()
