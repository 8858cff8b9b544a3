"""Does the batch matter? Small towers at batch sizes from 1,024 to a tenth of the data, five seeds.

    python benchmarks/draw_icons.py iconify-json-2.2.535.tgz --output icons --size 32 --workers 16
    python benchmarks/batch_study.py --list
    python benchmarks/batch_study.py --icons icons --gpus 2 --budget-seconds 540

The arms (machinery/study.py): the same batch with negatives in groups of each size, in a short run
of large batches and in a longer one of smaller batches; batches of each size with equal samples;
and with equal steps. Images with captions (icons, glyph-small's towers) and texts with texts
(WordNet's words and glosses, of Debian's wordnet-base); CLIP's loss at all sizes, SigLIP's and
DCL's at three. Learning rates are chosen on a validation split by the rule in machinery/study.py,
warm-up is a tenth of each run. All else is equal: a seed gives the initial weights and one sequence
of samples, which the batch size cuts into steps.

The output is written after each run and read at the beginning: the same command continues a study,
with the most informative runs first. No run begins that would end after the budget if it took as
long as the longest so far. Each GPU of --gpus does one run at a time; without a GPU one does on the
CPU. With --runs-per-device more do side by side, each in a longer time: with small batches a GPU
waits for the host most of the time. page.py has tables of the output, and plots.py draws it.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import (
    FIRST_COMPLETED,
    Executor,
    Future,
    ProcessPoolExecutor,
    ThreadPoolExecutor,
    wait,
)
from dataclasses import asdict
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

from machinery import study_data
from machinery.study import (
    TUNING_SEED,
    Record,
    Run,
    Series,
    chance,
    middle,
    pending,
    run_of,
    train_and_evaluate,
)
from megabatch import files
from megabatch.benchmarking.records import command_line, environment

SIZES = {
    "icons": (1024, 2048, 4096, 8192, 16384, 32768),
    "wordnet": (1024, 2048, 4096, 8192, 16384),
}
SAMPLES = {"icons": 128 * 32768, "wordnet": 64 * 16384}
LOSSES = ("clip", "siglip", "dcl")


def main(arguments: Sequence[str] | None = None) -> None:
    options = _options(arguments)
    plan = make_plan(options)
    content: dict[str, Any] = {"series": [], "tests": {}, "records": []}
    if options.output.exists():
        content = json.loads(options.output.read_text())
    found = {run_of(record): record for record in content["records"]}
    if options.list:
        for run in pending(plan, options.seeds, found):
            print(line(run))
        print(f"{len(found)} runs done; further ones follow when learning rates are known")
        return
    mine = [json.loads(json.dumps(asdict(one))) for one in plan]
    content |= {
        "command": command_line(options.output),
        **environment(),
        "series": [one for one in content["series"] if one not in mine] + mine,
    }
    for run, record in work(options, plan, found):
        content["tests"] |= record.pop("about")
        content["records"].append(record)
        files.write_text(options.output, json.dumps(content, indent=1) + "\n")
        print(f"{record['seconds']:6.1f} s  {line(run)}: {shown(record)}", flush=True)
    left = len(pending(plan, options.seeds, found))
    print(f"{len(found)} runs done, {left} can begin", flush=True)


def make_plan(options: argparse.Namespace) -> list[Series]:
    """The series, the most informative first: the first loss on each data set, then the others."""
    plan = []
    for loss in options.losses:
        for data in options.data:
            sizes = tuple(options.sizes or SIZES[data])
            if loss != options.losses[0]:
                sizes = tuple(sorted({sizes[0], middle(sizes), sizes[-1]}))
            plan.append(Series(data, loss, sizes, options.samples or SAMPLES[data]))
    return plan


def work(
    options: argparse.Namespace, plan: list[Series], found: dict[Run, Record]
) -> Iterator[tuple[Run, Record]]:
    """Do runs until all are done or time is over; adds each to `found` and yields it."""
    devices = [f"cuda:{i}" for i in range(options.gpus)] or ["cpu"]
    devices *= options.runs_per_device
    running: dict[Future[Record], Run] = {}
    began, longest = time.perf_counter(), 0.0
    with executor(devices, {name: getattr(options, name) for name in options.data}) as pool:
        while True:
            late = time.perf_counter() - began + longest >= options.budget_seconds
            for run in [] if late else pending(plan, options.seeds, found):
                if len(running) < len(devices) and run not in running.values():
                    running[pool.submit(do, run, options.precision)] = run
            if not running:
                return
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                run, record = running.pop(future), future.result()
                longest = max(longest, record["seconds"])
                found[run] = record
                yield run, record


#: Set by `prepare` in the process or thread that does runs.
_data: dict[str, study_data.StudyData] = {}


def executor(devices: list[str], folders: dict[str, Path]) -> Executor:
    """One that does a run at a time for each name of a device: in a thread, or in processes."""
    spawn = multiprocessing.get_context("spawn")
    queue = spawn.SimpleQueue()
    for device in devices:
        queue.put(device)
    if len(devices) == 1:
        return ThreadPoolExecutor(1, initializer=prepare, initargs=(queue, folders))
    return ProcessPoolExecutor(len(devices), spawn, initializer=prepare, initargs=(queue, folders))


def prepare(devices: Any, folders: dict[str, Path]) -> None:
    """Take a device and load the data sets."""
    device = torch.device(devices.get())
    if device.type == "cuda":
        torch.cuda.set_device(device)
    _data.update({name: study_data.load(name, folder, device) for name, folder in folders.items()})


def do(run: Run, precision: str) -> Record:
    """A run's record, with facts about the data set that are the same for all of its runs."""
    data = _data[run.data]
    record = train_and_evaluate(run, data, precision)
    about = {
        "train_pairs": len(data.train.ids),
        **{name: {"pairs": len(t.ids), "texts": len(t.ids.unique()), "chance": chance(t)}
           for name, t in data.tests.items()},
    }  # fmt: skip
    date = datetime.now(timezone.utc).isoformat(timespec="seconds")
    return {**record, "date": date, "about": {run.data: about}}


def line(run: Run) -> str:
    """A run in words."""
    kind = "tuning" if run.seed == TUNING_SEED else f"seed {run.seed}"
    groups = "" if run.group == run.batch else f" in groups of {run.group:,}"
    size = f"{run.steps:,} steps of {run.batch:,}{groups}"
    return f"{run.data} {run.loss}, {size}, rate {run.lr:g}, {kind}"


def shown(record: Record) -> str:
    """A record in one line."""
    if "tests" not in record:
        return str(record["status"])
    recalls = [f"{name} {test['recall@10']:.2%}" for name, test in record["tests"].items()]
    return f"loss {record['losses'][-1]:.3f}, recall@10 {', '.join(recalls)}"


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--icons", type=Path, default=Path("icons"),
                        help="folder of grey icons of 32 pixels")  # fmt: skip
    parser.add_argument("--wordnet", type=Path, default=Path("/usr/share/wordnet"),
                        help="folder of WordNet's data files")  # fmt: skip
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/batch-study.json"))
    parser.add_argument("--data", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--losses", nargs="+", choices=LOSSES, default=list(LOSSES),
                        help="the first one at all sizes")  # fmt: skip
    parser.add_argument("--sizes", type=int, nargs="+",
                        help="ascending divisors of the last; default: of the data")  # fmt: skip
    parser.add_argument("--samples", type=int, help="of a run; default: those of the data set")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--precision", choices=("bf16", "fp32"), default="bf16")
    parser.add_argument("--gpus", type=int, default=int(torch.cuda.is_available()))
    parser.add_argument("--runs-per-device", type=int, default=1, help="runs side by side")
    parser.add_argument("--budget-seconds", type=float, default=math.inf)
    parser.add_argument("--list", action="store_true", help="print the runs that can begin")
    options = parser.parse_args(arguments)
    for one in make_plan(options):
        if one.samples % one.sizes[-1] or any(one.sizes[-1] % size for size in one.sizes):
            parser.error(
                f"--sizes, --samples: expected divisors of the last size and a multiple of it, "
                f"got {one.sizes} and {one.samples}"
            )
    return options


if __name__ == "__main__":
    main()
