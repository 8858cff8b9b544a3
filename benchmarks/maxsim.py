"""Late interaction: time, memory and share of the matrix unit's rate, beside others.

    python benchmarks/maxsim.py --output benchmarks/results/maxsim.json
    python benchmarks/maxsim.py --device cpu --shape 128 32 128 128 --shape 256 32 256 128 \
        --output benchmarks/results/maxsim-cpu.json
    python benchmarks/maxsim.py --contender megabatch --contender sentence-transformers \
        --contender pylate --shape 4096 32 256 128 --shape 16384 32 256 128 \
        --output benchmarks/results/maxsim-cached.json
    torchrun --nproc-per-node 4 benchmarks/maxsim.py --shape 65536 8 512 128 \
        --shape 16384 32 256 128 --output benchmarks/results/maxsim-4gpu.json

A step is `MaxSimLoss` of random unit tokens, in bfloat16 (on the CPU float32), with gradients. Work
is counted as 4 b² l k d: the products of both passes, without those of the gradients. The others
are late-interaction-kernels' `maxsim` with PyTorch's cross-entropy, the dense expression, and what
sentence-transformers' and PyLate's cached losses do with the embeddings, 32 queries at a time. Over
several processes, each with its part of the batch, memory is the largest of all; the other one
there gathers the documents of all processes, as other trainers do, for the same tiles.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed._functional_collectives import all_gather_tensor_autograd

import megabatch as mb
from megabatch.benchmarking import records
from megabatch.benchmarking.memory import extra_bytes

#: Queries and documents, tokens of each, width.
HEADLINE = (16_384, 32, 256, 128)
#: Those of late-interaction-kernels' own benchmark, and one of which few blocks are saved.
SHAPES = [(b, l, k, 128) for b in (128, 256, 512, 1024) for l in (32, 128) for k in (256, 1024)]  # noqa: E741
SHAPES += [(4096, 32, 256, 128), (128, 32, 8192, 128), (256, 128, 8192, 128), (1024, 32, 2048, 128)]
SCALE = 20.0
#: Contenders that need no library besides this one.
INSIDE = ("megabatch", "dense", "gathering")
#: Processes, as torchrun says.
RANKS = int(os.environ.get("WORLD_SIZE", "1"))
LOSS = mb.MaxSimLoss(1 / SCALE)


def megabatch(queries: Tensor, documents: Tensor) -> Tensor:
    loss: Tensor = LOSS(queries, documents)
    return loss


def dense(queries: Tensor, documents: Tensor) -> Tensor:
    products = (queries.flatten(0, 1) @ documents.flatten(0, 1).T).float()
    b = len(queries)
    scores = products.view(b, -1, b, documents.shape[1]).amax(3).sum(1)
    return F.cross_entropy(SCALE * scores, torch.arange(b, device=scores.device))


def gathering(queries: Tensor, documents: Tensor) -> Tensor:
    every = all_gather_tensor_autograd(documents, 0, dist.group.WORLD)
    ids = torch.arange(len(every), device=every.device)
    own = ids[dist.get_rank() * len(queries) :][: len(queries)]
    options: dict[str, Any] = {"ids": (own, ids), "sides": "rows", "group": "local"}
    rows, _ = mb.similarity.split_logsumexp(queries, every, SCALE, **options)
    return F.softplus(rows.negative - rows.positive_sum).mean()


def late_interaction_kernels(queries: Tensor, documents: Tensor) -> Tensor:
    from late_interaction_kernels import maxsim

    scores = maxsim(queries, documents)
    return F.cross_entropy(SCALE * scores, torch.arange(len(queries), device=scores.device))


def sentence_transformers(queries: Tensor, documents: Tensor) -> Tensor:
    from sentence_transformers.multi_vector_encoder import losses, scoring

    settings = SimpleNamespace(
        similarity_fct=scoring.colbert_scores, scale=SCALE, gather_across_devices=False,
        score_mini_batch_size=32, show_progress_bar=False,
    )  # fmt: skip
    loss = losses.CachedMultiVectorMultipleNegativesRankingLoss
    return cached_loss(loss, settings, queries, documents)


def pylate(queries: Tensor, documents: Tensor) -> Tensor:
    from pylate.losses.cached_contrastive import CachedContrastive
    from pylate.scores import ColBERTScores

    settings = SimpleNamespace(
        score_metric=ColBERTScores(), temperature=1 / SCALE, gather_across_devices=False,
        score_mini_batch_size=32, show_progress_bar=False, size_average=True,
        model=SimpleNamespace(do_query_expansion=False),
    )  # fmt: skip
    return cached_loss(CachedContrastive, settings, queries, documents)


def cached_loss(loss: Any, settings: Any, queries: Tensor, documents: Tensor) -> Tensor:
    """A library's loss of embeddings that are kept, for 32 queries at a time, with gradients."""
    masks = [torch.ones(t.shape[:2], device=t.device) for t in (queries, documents)]
    masks = masks if loss.__name__ == "CachedContrastive" else [[mask] for mask in masks]
    value: Tensor = loss.calculate_loss(
        settings, [[queries], [documents]], masks, with_backward=True
    )
    return value


CONTENDERS = {
    "megabatch": megabatch,
    "late-interaction-kernels": late_interaction_kernels,
    "dense": dense,
    "gathering": gathering,
    "sentence-transformers": sentence_transformers,
    "pylate": pylate,
}


def seconds(step: Callable[[], Any], device: str, at_least: float) -> float:
    """Median time of a step after the first, three at least, or of one that takes 5 seconds."""
    wait = torch.cuda.synchronize if device == "cuda" else int
    step()
    wait()
    times: list[float] = []
    while (len(times) < 3 and sum(times) < 5) or sum(times) < at_least:
        start = time.perf_counter()
        step()
        wait()
        times.append(time.perf_counter() - start)
        if dist.is_initialized():  # as many steps on all ranks
            times[-1] = largest(times[-1], device)
    return statistics.median(times)


def largest(number: float, device: str) -> float:
    """Of all processes."""
    found = torch.tensor(number, dtype=torch.float64, device=device)
    if dist.is_initialized():
        dist.all_reduce(found, dist.ReduceOp.MAX)
    return found.item()


def measure(name: str, shape: Sequence[int], device: str, at_least: float = 0.5) -> dict[str, Any]:
    """One contender at one shape."""
    b, l, k, d = shape  # noqa: E741
    found: dict[str, Any] = {"contender": name, "n_devices": RANKS, "b": b, "l": l, "k": k, "d": d}
    if name not in INSIDE and not importlib.util.find_spec(name.replace("-", "_")):
        return found | {"status": "not installed"}
    loss = CONTENDERS[name]
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    tokens = [torch.randn(b // RANKS, n, d, dtype=dtype, device=device) for n in (l, k)]
    leaves = [F.normalize(t, dim=2).requires_grad_() for t in tokens]
    del tokens

    def step() -> None:
        for leaf in leaves:
            leaf.grad = None
        value = loss(*leaves)
        if value.requires_grad:
            value.backward()

    try:
        extra = largest(extra_bytes(step, device), device)
        taken = seconds(step, device, at_least)
    except torch.OutOfMemoryError:
        return found | {"status": "out of memory"}
    found |= {"status": "ok", "ms": taken * 1e3, "extra_bytes": int(extra)}
    found["tflops"] = 4 * b * b * l * k * d / taken / 1e12 / RANKS
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
    parser.add_argument("--contender", choices=list(CONTENDERS), action="append")
    options = parser.parse_args()
    names = ["megabatch", "dense"]
    if options.device == "cuda":
        names.insert(1, "late-interaction-kernels")
    if RANKS > 1:
        names = ["megabatch", "gathering"]
        if options.device == "cuda":
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("nccl" if options.device == "cuda" else "gloo")
    rate = product_tflops(
        options.device, torch.bfloat16 if options.device == "cuda" else torch.float32
    )
    rows = [] if options.shape else [measure("megabatch", HEADLINE, options.device, 8.0)]
    for shape in options.shape or SHAPES:
        for name in options.contender or names:
            rows.append(measure(name, shape, options.device))
            print(shown(rows[-1], rate), flush=True)
    if os.environ.get("RANK", "0") != "0":
        return
    command = records.command_line(options.output)
    if RANKS > 1:
        command = command.replace("python", f"torchrun --nproc-per-node {RANKS}", 1)
    records.write(options.output, command, rows, product_tflops=rate)


def shown(row: dict[str, Any], rate: float) -> str:
    size = "{b:6,} x {l:4} x {k:5} x {d:4}".format(**row)
    if "ms" not in row:
        return f"{row['contender']:25} {size} {row['status']}"
    share, memory = row["tflops"] / rate, row["extra_bytes"] / 1e9
    return f"{row['contender']:25} {size} {row['ms']:9.2f} ms {share:6.1%} {memory:6.2f} GB"


if __name__ == "__main__":
    main()
