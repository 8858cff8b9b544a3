"""Does the batch matter? Small towers at batch sizes from 1,024 to a tenth of the data, five seeds.

    python benchmarks/draw_icons.py --output icons --size 32 --workers 16
    python benchmarks/batch_study.py --list
    python benchmarks/batch_study.py --icons icons --gpus 2 --budget-seconds 540

The arms (machinery/study_plan.py): the same batch with negatives in groups of each size, in a short
run of large batches and in a longer one of smaller batches; batches of each size with equal
samples; and with equal steps. Images with captions (icons, glyph-small's
towers) and texts with texts (WordNet's words and glosses, of Debian's wordnet-base); CLIP's loss at
all sizes, SigLIP's and DCL's at three. Learning rates are chosen on a validation split by the rule
in study_plan.py, warm-up is a tenth of each run. All else is equal: a seed gives the initial
weights and one sequence of samples, which the batch size cuts into steps.

The output is written after each run and read at the beginning: the same command continues a study,
with the most informative runs first. No run begins that would probably end after the budget. Each
GPU of --gpus does one run at a time; without a GPU one does on the CPU. With --runs-per-device more
do side by side, each in a longer time: with small batches a GPU waits for the host most of the
time. --show prints the means and deviations of an output, plots.py draws them.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import time
from collections.abc import Sequence
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

from machinery import study_data, study_plan
from machinery.study_plan import Found, Record, Series
from machinery.study_runs import Run, chance, train_and_evaluate
from machinery.study_summary import table
from megabatch import files
from megabatch.benchmarking.records import command_line, environment

SIZES = {
    "icons": (1024, 2048, 4096, 8192, 16384, 32768),
    "wordnet": (1024, 2048, 4096, 8192, 16384),
}
SAMPLES = {"icons": 128 * 32768, "wordnet": 64 * 16384}
LOSSES = ("clip", "siglip", "dcl")
FEW = 3  # sizes of the losses other than the first


def main(arguments: Sequence[str] | None = None) -> None:
    options = _options(arguments)
    plan = make_plan(options)
    content = _earlier(options.output)
    if options.show:
        print(table(content))
        return
    found = {study_plan.run_of(record): record for record in content["records"]}
    if options.list:
        show_plan(plan, options.seeds, found)
        return
    content |= {
        "command": command_line(options.output),
        **environment(),
        "series": _merged(content["series"], plan),
    }
    Study(options, plan, content, found).work()


def make_plan(options: argparse.Namespace) -> list[Series]:
    """The series, the most informative first: the first loss on each data set, then the others."""
    plan = []
    for loss in options.losses:
        for data in options.data:
            sizes = tuple(options.sizes or SIZES[data])
            if loss != options.losses[0]:
                sizes = _few(sizes)
            plan.append(Series(data, loss, sizes, options.samples or SAMPLES[data]))
    return plan


def _few(sizes: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(sorted({sizes[0], study_plan.middle(sizes), sizes[-1]}))


class Study:
    """A study in progress.

    Args:
        options: of the command line.
        plan: the series.
        content: of the output, with the earlier records.
        found: the records by run.
    """

    def __init__(
        self,
        options: argparse.Namespace,
        plan: list[Series],
        content: dict[str, Any],
        found: dict[Run, Record],
    ) -> None:
        self.options, self.plan, self.content, self.found = options, plan, content, found
        self.running: dict[Future[Record], Run] = {}
        self.began = time.perf_counter()

    def work(self) -> None:
        """Do runs until all are done or time is over, writing the output after each."""
        devices = [f"cuda:{i}" for i in range(self.options.gpus)] or ["cpu"]
        devices *= self.options.runs_per_device
        folders = {"icons": self.options.icons, "wordnet": self.options.wordnet}
        with executor(devices, {name: folders[name] for name in self.options.data}) as pool:
            while True:
                self._begin(pool, len(devices))
                if not self.running:
                    break
                done, _ = wait(self.running, return_when=FIRST_COMPLETED)
                for future in done:
                    self._end(self.running.pop(future), future.result())
        left = len([*study_plan.pending(self.plan, self.options.seeds, self.found)])
        later = len(study_plan.waiting(self.plan, self.options.seeds, self.found))
        print(f"{len(self.found)} runs done, {left + later} left", flush=True)

    def _begin(self, pool: Executor, devices: int) -> None:
        busy = set(self.running.values())
        for run in study_plan.pending(self.plan, self.options.seeds, self.found):
            if len(self.running) == devices or not self._in_time(run):
                return
            if run not in busy:
                self.running[pool.submit(do, run, self.options.precision)] = run

    def _in_time(self, run: Run) -> bool:
        budget = self.options.budget_seconds
        ends = time.perf_counter() - self.began + study_plan.estimate(run, self.found)
        return budget is None or ends < budget

    def _end(self, run: Run, record: Record) -> None:
        self.found[run] = record
        self.content["tests"] |= record.pop("about")
        self.content["records"].append(record)
        files.write_text(self.options.output, json.dumps(self.content, indent=1) + "\n")
        print(f"{record['seconds']:6.1f} s  {_line(run)}: {_shown(record)}", flush=True)


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


def show_plan(plan: list[Series], seeds: int, found: Found) -> None:
    """Print what is left to do in order, with estimated times."""
    total = 0.0
    later = study_plan.waiting(plan, seeds, found)
    for run in [*study_plan.pending(plan, seeds, found), *later]:
        seconds = study_plan.estimate(run, found)
        total += seconds
        print(f"{seconds:6.1f} s  {_line(run)}")
    print(f"{len(found)} runs done; left: {total / 60:.0f} min of one device, and further rates")


def _line(run: Run) -> str:
    """A run in words."""
    kind = "tuning" if run.seed == study_plan.TUNING_SEED else f"seed {run.seed}"
    groups = "" if run.group == run.batch else f" in groups of {run.group:,}"
    rate = f"rate {run.lr:g}" if run.lr else "rate to be tuned"
    return f"{run.data} {run.loss}, {run.steps:,} steps of {run.batch:,}{groups}, {rate}, {kind}"


def _shown(record: Record) -> str:
    if "tests" not in record:
        return str(record["status"])
    recalls = [f"{name} {test['recall@10']:.2%}" for name, test in record["tests"].items()]
    return f"loss {record['losses'][-1]:.3f}, recall@10 {', '.join(recalls)}"


def _earlier(output: Path) -> dict[str, Any]:
    if output.exists():
        content: dict[str, Any] = json.loads(output.read_text())
        return content
    return {"series": [], "tests": {}, "records": []}


def _merged(series: list[dict[str, Any]], plan: list[Series]) -> list[dict[str, Any]]:
    """The series of an output and those of this plan, each once."""
    mine = [json.loads(json.dumps(asdict(one))) for one in plan]
    return [one for one in series if one not in mine] + mine


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
    parser.add_argument("--sizes", type=int, nargs="+", help="default: those of the data set")
    parser.add_argument("--samples", type=int, help="of a run; default: those of the data set")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--precision", choices=("bf16", "fp32"), default="bf16")
    parser.add_argument("--gpus", type=int, default=int(torch.cuda.is_available()))
    parser.add_argument("--runs-per-device", type=int, default=1, help="runs side by side")
    parser.add_argument("--budget-seconds", type=float)
    parser.add_argument("--list", action="store_true", help="print the runs to do, and their times")
    parser.add_argument("--show", action="store_true", help="print the results of the output")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
