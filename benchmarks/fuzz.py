"""Random calls of all losses and similarity functions against naive dense expressions.

    python benchmarks/fuzz.py --cases 20000 --seed 0 --output benchmarks/results/fuzz-cpu.json
    python benchmarks/fuzz.py --cases 4000 --ranks 6 --output benchmarks/results/fuzz-grids.json
    python benchmarks/fuzz.py --cases 1000 --device cuda --processes 16 \\
        --output benchmarks/results/fuzz-gpu.json
    python benchmarks/fuzz.py --only 4711      # that case again, with its configuration

Values and all gradients in float64, to 1e-9 of each tensor's largest number: shapes with 0 and 1,
ids, weights, labels, masks, margins, queues, further negatives, workspaces (another one in the
backward pass), normalisation, shards on up to six ranks (Gloo) and on grids of them, frozen,
expanded, strided and aliased inputs. On a GPU, where float64 does not reach the kernels, also
bfloat16, float16 and float32 (TF32), bounded by the error of the dense expression in the same
precision. Ends with status 1 if a case failed.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

from fuzzing.cases import draw
from fuzzing.groups import FINE, configure, run, run_in_processes
from megabatch.benchmarking import records

DTYPES = {"cpu": ("float64",), "cuda": ("float64", "bfloat16", "float16", "float32")}


def main() -> int:
    options = parse()
    configure(options.device)
    dtypes = tuple(options.dtypes or DTYPES[options.device])
    # Low precision is compared on one rank only; the tests cover several GPUs.
    largest = options.ranks if dtypes == ("float64",) and options.device == "cpu" else 1
    numbers = options.only or range(options.cases)
    cases = [draw(options.seed, number, dtypes, largest) for number in numbers]
    if options.only:
        print(json.dumps(cases, indent=1))
    began = time.monotonic()
    if options.processes == 1:
        outcomes = run(cases, options.device)
    else:
        outcomes = run_in_processes(cases, options.device, options.processes)
    counts: Counter[tuple[str, str, int, str]] = Counter()
    failures: list[dict[str, Any]] = []
    for done, (case, outcome) in enumerate(outcomes, start=1):
        status = (outcome or "ok") if outcome in FINE else "failed"
        counts[case["call"], case["dtype"], case["ranks"], status] += 1
        if status == "failed":
            failures.append({"case": case, "failure": outcome})
            print(f"case {case['index']} ({case['call']}): {outcome}", file=sys.stderr)
        if done % max(1, len(cases) // 50) == 0 or done == len(cases):
            shown = f"{done} of {len(cases)} cases, {len(failures)} failed"
            print(f"{shown}, {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
    failures.sort(key=lambda failure: failure["case"]["index"])
    seconds = round(time.monotonic() - began, 1)
    undecided = sum(n for key, n in counts.items() if key[3] == "undecided")
    print(f"{len(cases)} cases, {len(failures)} failed, {undecided} undecided, {seconds} s")
    if options.output:
        names = ("call", "dtype", "ranks", "status", "cases")
        made = [dict(zip(names, (*key, n), strict=True)) for key, n in sorted(counts.items())]
        sums = {"failed": len(failures), "undecided": undecided, "seconds": seconds}
        about = {"seed": options.seed, "cases": len(cases), **sums, "failures": failures}
        records.write(options.output, records.command_line(options.output), made, **about)
    return 1 if failures else 0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--cases", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, action="append", help="a case's number, repeatable")
    parser.add_argument("--device", choices=tuple(DTYPES), default="cpu")
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES["cuda"])
    parser.add_argument(
        "--ranks", type=int, default=3, help="of the largest group, up to 6 (CPU, float64)"
    )
    parser.add_argument(
        "--processes", type=int, default=1, help="that share the cases; on a GPU compiling is slow"
    )
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    if options.processes < 1:
        parser.error(f"--processes: expected a positive number, got {options.processes}")
    return options


if __name__ == "__main__":
    sys.exit(main())
