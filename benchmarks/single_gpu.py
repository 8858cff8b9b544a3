"""megabatch and its peers side by side on one GPU: time, memory, share of the product, error.

    python benchmarks/single_gpu.py --output benchmarks/results/single-gpu.json

The most important groups come first; peers that are not installed, and cases that do not fit into
--budget-seconds, are rows that say so. `--list` prints the groups, `--device cpu --smallest` runs
all of them at sizes that only show that it runs.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import torch

from machinery import results, supervise
from machinery.family import LOSSES
from machinery.group import Group
from machinery.inputs import Case
from machinery.results import Result
from megabatch.benchmarking import records

MIB = 2**20
HEADLINE_SECONDS, SECONDS = 2.0, 1.0

CLIP_PEERS = (
    *("megabatch", "megabatch-compiled", "dense", "dense-compiled", "openclip"),
    *("liger", "liger-cute", "memeff", "cut-cross-entropy", "inf-cl"),
)
#: Batch sizes at which launch overhead exceeds the GPU's work.
CAPTURED = ("megabatch-captured", "dense-captured")
SIGLIP_PEERS = ("megabatch", "dense", "dense-compiled", "siglip-kernel")


def case(b: int, d: int = 768, **changes: object) -> Case:
    made = Case("clip", "megabatch", "cuda", "bfloat16", b, d, scale=14.3)
    return replace(made, **changes)  # type: ignore[arg-type]


def beside(one: Case, contenders: tuple[str, ...], seconds: float = SECONDS) -> Group:
    return Group(tuple(replace(one, contender=name) for name in contenders), seconds)


def alone(one: Case, seconds: float = SECONDS) -> Group:
    return Group((one,), seconds)


def groups() -> Iterator[Group]:
    """The groups to measure, the most important first."""
    for d in (768, 512, 1024):
        yield alone(case(65_536, d), HEADLINE_SECONDS)
    yield beside(case(8192), (*CLIP_PEERS, *CAPTURED))
    yield beside(case(16_384), (*CLIP_PEERS, *CAPTURED))
    yield alone(case(262_144))
    yield alone(case(65_536, scale=100.0, features="trained"), HEADLINE_SECONDS)
    yield alone(case(65_536, dtype="float16"), HEADLINE_SECONDS)
    yield Group((case(1_048_576),), SECONDS, once=True, cost=20)
    yield beside(case(32_768), CLIP_PEERS)
    yield beside(case(16_384, loss="siglip"), SIGLIP_PEERS)
    yield beside(case(65_536, loss="siglip"), SIGLIP_PEERS)
    yield alone(case(65_536, 256))
    yield alone(case(65_536, 2048))
    yield alone(case(65_536, 700))
    yield alone(case(65_601))
    tf32 = case(16_384, dtype="float32", tf32=True)  # the precision of Inf-CL's paper
    yield beside(tf32, ("megabatch", "dense", "dense-compiled", "openclip", "memeff", "inf-cl"))
    yield alone(case(16_384, dtype="float32"))
    rectangular = case(65_536, loss="logsumexp", n=20_000)
    yield beside(rectangular, ("megabatch", "dense"))
    yield beside(case(65_536), CLIP_PEERS[1:])
    yield beside(case(8192, loss="siglip"), SIGLIP_PEERS)
    yield beside(case(32_768, loss="siglip"), SIGLIP_PEERS)
    yield Group((case(4_194_304, 512, backward=False),), SECONDS, once=True, cost=45)
    yield Group((case(4_194_304, 512),), SECONDS, once=True, cost=150)
    yield Group((case(16_777_216, 512, backward=False),), SECONDS, once=True, cost=560)


def smallest(one: Group, device: str) -> Group:
    """The same at a size that only shows that it runs."""

    def shrink(c: Case) -> Case:
        sizes = {65_601: 129, 1_048_576: 1024, 4_194_304: 2048, 16_777_216: 4096}
        b = sizes.get(c.b, max(64, c.b >> 9))
        n = None if c.n is None else 40
        return replace(c, device=device, b=b, d=c.d // 8, n=n)

    cases = tuple(shrink(c) for c in one.cases)
    return Group(cases, seconds=0.01, product_size=64, once=one.once)


def row(record: results.Record) -> str:
    """A line for the terminal."""
    size = f"{record.b:,}" + (f" x {record.n:,}" if record.n else "")
    kind = record.dtype + (" tf32" if record.tf32 else "")
    kind += "" if record.features == "pairs" else f" {record.features} {record.scale:g}"
    kind += "" if record.backward else " forward"
    text = f"{record.loss:14} {record.contender:18} {size:>16} {record.d:5} {kind:20} "
    if record.ms is None or record.fraction is None or record.extra_bytes is None:
        return f"{text}{record.status}: {record.note}"
    bound = 4 * record.b * record.d + 640 * MIB
    over = " OVER" if record.contender == "megabatch" and record.extra_bytes > bound else ""
    queued = "" if record.queued_ms is None else f" queued {record.queued_ms:.3f} ms"
    error = "-" if record.max_row_error is None else f"{record.max_row_error:.1e}"
    return (
        f"{text}{record.ms:10.3f} ms {record.fraction:6.1%} of {record.product_tflops:4.0f} "
        f"{record.extra_bytes / MIB:9.0f} MiB{over}{queued} row error {error} "
        f"{record.status} {record.note}"
    )


def record_of(one: Case, result: Result) -> results.Record:
    return results.record(one, result, LOSSES[one.loss].work)


def absent(one: Case) -> Result | None:
    contender = LOSSES[one.loss].contenders[one.contender]
    if not contender.installed():
        assert contender.needs is not None
        return Result("not installed", f"pip install {contender.needs[1]}")
    return None if contender.runs_on(one.device) else Result("skipped", "needs CUDA")


def main(
    wanted: Callable[[], Iterator[Group]] = groups,
    script: str = __file__,
    doc: str = __doc__ or "",
    output: str = "benchmarks/results/single-gpu.json",
) -> Path | None:
    """Measure groups as the command line says; returns the records' path, if there is one."""
    options = arguments(doc, output)
    plan = list(wanted())
    if options.smallest:
        plan = [smallest(one, options.device) for one in plan]
    if options.only:
        plan = [plan[i] for i in options.only]
    if options.contenders:
        of = [[c for c in one.cases if c.contender in options.contenders] for one in plan]
        plan = [replace(one, cases=tuple(cases)) for one, cases in zip(plan, of, strict=True)]
    missing = [(c, absent(c)) for one in plan for c in one.cases]
    here = [replace(one, cases=tuple(c for c in one.cases if not absent(c))) for one in plan]
    here = [one for one in here if one.cases]
    if options.list:
        for i, one in enumerate(plan):
            print(i, one.case, *(c.contender for c in one.cases))
        return None
    if options.worker is not None:
        supervise.work(here, json.loads(options.worker), options.deadline)
        return None
    path: Path = options.output
    path.parent.mkdir(parents=True, exist_ok=True)
    log = path.with_suffix(".log")
    log.write_text("")
    deadline = time.time() + options.budget_seconds
    command = records.command_line(path)
    done = [record_of(c, result) for c, result in missing if result is not None]
    for record in done:
        print(row(record))
    same = [f"--device={options.device}", *(f"--only={i}" for i in options.only)]
    same += ["--smallest"] if options.smallest else []
    same += ["--contenders", *options.contenders] if options.contenders else []
    start = supervise.start_self([script, *same, f"--deadline={deadline}", "--worker"])
    for case, result in supervise.supervise(here, start, log, deadline, options.patience):
        done.append(record_of(case, result))
        records.write(path, command, done)
        print(row(done[-1]), flush=True)
    print(f"{len(done)} records: {path}; messages: {log}")
    return path


def arguments(doc: str, output: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=doc.split("\n")[0])
    parser.add_argument("--output", type=Path, default=Path(output))
    parser.add_argument("--budget-seconds", type=float, default=330.0)
    parser.add_argument("--patience", type=float, default=75.0, help="seconds until a hang is one")
    parser.add_argument(
        "--only", type=int, action="append", default=[], help="this group of --list; repeatable"
    )
    parser.add_argument("--contenders", nargs="+", default=[], help="default: all of a group")
    parser.add_argument("--list", action="store_true", help="print what would be measured")
    parser.add_argument("--smallest", action="store_true", help="tiny, on the CPU by default")
    parser.add_argument("--device", choices=("cuda", "cpu"), help="the CPU with --smallest only")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--deadline", type=float, help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.device = options.device or ("cpu" if options.smallest else "cuda")
    if options.device == "cpu" and not options.smallest:
        parser.error("--device cpu: expected with --smallest")
    if options.device == "cuda" and not (options.list or torch.cuda.is_available()):
        parser.error("no CUDA device; --smallest runs on the CPU")
    return options


if __name__ == "__main__":
    main()
