"""Ranks and top-k on one GPU: fused kernels, and blocks by cuBLAS and torch.topk.

    python benchmarks/ranking.py --output benchmarks/results/ranking.json

Features are bfloat16 unit vectors, `rows` queries against as many candidates; the target of a row
is its partner. The results of both ways are compared.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from megabatch import similarity
from megabatch.benchmarking import memory, records
from megabatch.benchmarking.clock import timed_calls
from megabatch.similarity import backends

Results = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Row:
    """One function at one size, by kernels and by blocks."""

    function: str
    rows: int
    d: int
    ms: float
    blocks_ms: float | None  #: by blocks; None: not measured, as it would take long
    extra_mib: int  #: memory besides features and results
    different: int | None  #: entries in which both ways differ
    largest_difference: float | None  #: of a score


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[65_536, 262_144])
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    found = []
    for rows in options.rows:
        for row in measured(rows, options.width, options.device):
            print(json.dumps(asdict(row)), flush=True)
            found.append(row)
    if options.output:
        records.write(options.output, records.command_line(options.output), found)


def measured(rows: int, d: int, device: str) -> Iterator[Row]:
    x, y = (F.normalize(torch.randn(rows, d, device=device), dim=1).bfloat16() for _ in range(2))
    target = torch.arange(rows, device=device)
    ids = (target // 2, target // 2)
    calls: dict[str, Callable[[], Results]] = {
        "ranks": lambda: similarity.ranks(x, y, target),
        "ranks, ids": lambda: similarity.ranks(x, y, target, ids=ids),
    }
    for k in (1, 10, 50, 200):
        if k <= rows:
            calls[f"topk {k}"] = lambda k=k: similarity.topk(x, y, k)
    calls["topk 10, ids"] = lambda: similarity.topk(x, y, min(10, rows), ids=ids)
    for name, call in calls.items():
        ours = call()  # compile
        nbytes = sum(t.nbytes for t in ours)
        extra = memory.extra_bytes(call, device) - nbytes
        times = timed_calls([call] * 5, device)
        blocks_ms = different = largest = None
        if rows <= 65_536:
            with by_blocks():
                blocks_ms = min(timed_calls([call] * 2, device))
                others = call()
            different = sum(int((a != b).sum()) for a, b in zip(ours, others, strict=True))
            if ours[0].is_floating_point():
                largest = float((ours[0] - others[0]).abs().max())
        mib = max(0, round(extra / 2**20))
        yield Row(name, rows, d, statistics.median(times), blocks_ms, mib, different, largest)


@contextmanager
def by_blocks() -> Iterator[None]:
    """Use torch operations, as on a GPU without Triton."""
    before = backends.uses_kernels
    backends.uses_kernels = lambda x: False
    try:
        yield
    finally:
        backends.uses_kernels = before


if __name__ == "__main__":
    main()
