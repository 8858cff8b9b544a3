"""Do large batches help? Two data sets at 1,024 to 131,072 pairs a step, by samples and by time.

    python benchmarks/draw_icons.py iconify-json-2.2.535.tgz --output icons --size 32 --workers 16
    python benchmarks/batch_study.py --pack icons icons.npz
    python benchmarks/batch_study.py --list
    python benchmarks/batch_study.py --time 3
    python benchmarks/batch_study.py --gpus 4 --budget-seconds 540

machinery/study.py has the training loop and the losses, machinery/study_data.py the data and the
towers; benchmarks/draw_texts.py writes texts.npz. The runs:

- each size of `SIZES` with CLIP's loss and the same samples, three seeds;
- sizes below 65,536 that take more than `ALIKE` less or more time for the same samples, by the step
  times that `--time` measured before, for as long as 65,536 pairs a step take;
- the other losses and groups of `OTHERS`, one seed first: in a group only so many pairs of a large
  batch meet in the loss, all else equal. `sogclr` has runs of equal time alone.

Learning rate and warm-up by a rule: runs of a quarter of the samples, but of at least 512 steps or
all, with a seed of their own, a warm-up of 10% and the rates of `RATES`; the best has the highest
recall@10 (the mean of both directions) on the validation pairs at the end. While it is the lowest
or the highest one, half or twice of it is tried too. Then a warm-up of 30% is tried at that rate.
(3%, which was tried at 1,024 to 16,384 icons, was always worse.) Some losses take what another one
has at the same batch (`TUNED_AS`), 8,192 pairs what 4,096 have, and batches above 65,536 what
65,536 has. A run that diverged counts as the worst.

The output is written after each run and read at the beginning: the same command continues a study,
the most informative runs first. No run begins that would end after the budget by the time of those
before. Each GPU does one run at a time; without a GPU one does on the CPU. page.py has tables of
the output, and plots.py draws it.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import multiprocessing
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import (
    FIRST_COMPLETED,
    Executor,
    Future,
    ProcessPoolExecutor,
    ThreadPoolExecutor,
    wait,
)
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, NamedTuple

import torch

from machinery import study_data
from machinery.study import Record, Run, run_of, step_time, train_and_evaluate
from megabatch import files
from megabatch.benchmarking.records import command_line, environment

SAMPLES = 512 * 65_536
SIZES = {
    "icons": (1024, 4096, 16_384, 65_536, 131_072),
    "texts": (1024, 4096, 16_384, 65_536),
}
#: The size whose time for `SAMPLES` smaller ones get in the runs of equal time, unless they take as
#: much to this share. Larger ones take its learning rate.
CLOCK, ALIKE = 65_536, 0.07
#: Data, loss, batch and group of the further runs.
OTHERS = (
    *(("icons", "clip", CLOCK, group) for group in (1024, 8192)),
    *(("icons", f"sogclr-{rate}", 1024, 1024) for rate in ("0.3", "0.9", "0.3-50", "0.9-50")),
    *(("icons", f"fixed-{scale}", size, size) for size in (1024, CLOCK) for scale in (20, 50)),
    *(("texts", loss, size, size) for size in (1024, CLOCK, 8192) for loss in ("query", "hard-16")),
    ("texts", "hard-128", 1024, 1024),
    *(("icons", "siglip", size, size) for size in (1024, CLOCK)),
)
#: Losses that take the learning rate and warm-up of another one at the same batch.
TUNED_AS = {"fixed": "clip", "sogclr": "clip", "query": "clip", "hard": "clip"}
#: Of a run that chooses them.
LEAST_STEPS = 512
RATES, WARMUPS = (1e-3, 2e-3, 4e-3), (0.1, 0.3)
LOWEST_RATE, HIGHEST_RATE = 5e-4 / 2**4, 5e-4 * 2**6
#: Seed of the runs that choose learning rates; the study's own seeds are 0, 1, ...
TUNING_SEED = 100

Found = Mapping[Run, Record]


class Point(NamedTuple):
    """What is compared: a data set, a loss, the pairs of a step and those that meet."""

    data: str
    loss: str
    batch: int
    group: int


def main(arguments: Sequence[str] | None = None) -> None:
    options = _options(arguments)
    if options.pack:
        return study_data.pack(*options.pack)
    content: dict[str, Any] = {"study": "batch size", "tests": {}, "times": [], "records": []}
    if options.output.exists():
        content = json.loads(options.output.read_text())
    content |= {"command": command_line(options.output), **environment()}
    if options.time:
        content["times"] = measured_times(options)
        return write(options, content)
    found = {run_of(record): record for record in content["records"]}
    if options.list:
        for run in pending(options, found, content["times"]):
            print(line(run))
        return print(f"{len(found)} runs done; further ones follow when learning rates are known")
    for run, record in work(options, found, content["times"]):
        content["tests"] |= record.pop("about")
        content["records"].append(record)
        write(options, content)
        print(f"{record['seconds']:6.1f} s  {line(run)}: {shown(record)}", flush=True)
    left = len(pending(options, found, content["times"]))
    print(f"{len(found)} runs done, {left} can begin", flush=True)


# --- which runs, and in which order ---------------------------------------------------------------


def sizes(options: argparse.Namespace) -> list[Point]:
    """The points whose batch sizes are compared."""
    return [Point(data, "clip", b, b) for data in options.data for b in SIZES[data]]


def others(options: argparse.Namespace) -> list[Point]:
    """The further points, the most informative first."""
    wanted = () if options.sizes_only else OTHERS
    return [Point(*one) for one in wanted if one[0] in options.data]


def tuned(point: Point, samples: int, found: Found) -> tuple[float, float, list[Run]]:
    """The learning rate and warm-up of a point, and the runs that are needed to know them."""
    kind = point.loss.partition("-")[0]
    batch = max(size for size in SIZES[point.data] if size <= min(point.batch, CLOCK))
    own = Point(point.data, TUNED_AS.get(kind, point.loss), batch, batch)
    whole = max(1, samples // own.batch)
    steps = min(whole, max(whole // 4, LEAST_STEPS))

    def trials(rates: Sequence[float], warmups: Sequence[float]) -> list[Run]:
        pairs = itertools.product(rates, warmups)
        return [Run(*own, steps, rate, warmup, TUNING_SEED) for rate, warmup in pairs]

    rates = list(RATES)
    while True:
        first = trials(rates, WARMUPS[:1])
        if missing := [run for run in first if run not in found]:
            return math.nan, math.nan, missing
        best = rates.index(max(first, key=lambda run: _score(found[run])).lr)
        if best == 0 and rates[0] > LOWEST_RATE:
            rates.insert(0, rates[0] / 2)
        elif best == len(rates) - 1 and rates[-1] < HIGHEST_RATE:
            rates.append(rates[-1] * 2)
        else:
            break
    second = trials(rates[best : best + 1], WARMUPS)
    if missing := [run for run in second if run not in found]:
        return math.nan, math.nan, missing
    chosen = max(second, key=lambda run: _score(found[run]))
    return chosen.lr, chosen.warmup, []


def pending(options: argparse.Namespace, found: Found, times: list[Record]) -> list[Run]:
    """The runs that can begin, most informative first; others follow when rates are known."""
    every: list[Run] = []

    def add(point: Point, samples: int, seeds: range) -> None:
        lr, warmup, missing = tuned(point, options.samples, found)
        every.extend(missing)
        for seed in seeds if samples and not missing else ():
            every.append(Run(*point, samples // point.batch, lr, warmup, seed))

    seeds = range(options.seeds)
    for point in sizes(options):
        add(point, options.samples, seeds)
    for point in sizes(options):
        if point.batch < CLOCK:
            add(point, samples_by_time(point, options.samples, times), seeds)
    for some in (seeds[:1], seeds[1:]):
        for point in others(options):
            equal_time = point.loss.startswith("sogclr")
            by_time = samples_by_time(point, options.samples, times)
            add(point, by_time if equal_time else options.samples, some)
    return [run for run in dict.fromkeys(every) if run not in found]


def samples_by_time(point: Point, samples: int, times: list[Record]) -> int:
    """Those that fit into the time that `samples` take in batches of `CLOCK`; 0 for no run.

    There is none if that is unknown, or would be a run of nearly as many samples. A constant scale,
    after a second hyphen, takes as long as a learnt one.
    """
    ms = {Point(*(t[name] for name in Point._fields)): t["ms"] for t in times}
    point = point._replace(loss="-".join(point.loss.split("-")[:2]))
    clock = Point(point.data, "clip", CLOCK, CLOCK)
    if not {point, clock} <= ms.keys():
        return 0
    share = point.batch / CLOCK * ms[clock] / ms[point]
    return 0 if abs(share - 1) < ALIKE else int(samples * share / point.batch) * point.batch


def _score(record: Record) -> float:
    """The score by which the best learning rate is chosen; -1 for a run that stopped early."""
    return float(record["final"]["validation"]["recall@10"]) if "final" in record else -1.0


# --- doing them -----------------------------------------------------------------------------------


def work(
    options: argparse.Namespace, found: dict[Run, Record], times: list[Record]
) -> Iterator[tuple[Run, Record]]:
    """Do runs until all are done or time is over; adds each to `found` and yields it."""
    devices = [f"cuda:{i}" for i in range(options.gpus)] or ["cpu"]
    running: dict[Future[Record], Run] = {}
    ends = time.perf_counter() + options.budget_seconds
    with executor(devices, {name: getattr(options, name) for name in options.data}) as pool:
        while True:
            for run in pending(options, found, times):
                fits = time.perf_counter() + expected_seconds(run, found) < ends
                if fits and len(running) < len(devices) and run not in running.values():
                    running[pool.submit(do, run)] = run
            if not running:
                return
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                run, record = running.pop(future), future.result()
                found[run] = record
                yield run, record


def expected_seconds(run: Run, found: Found) -> float:
    """The seconds of a run, by those of the same batch, or else of the longest so far."""
    same = [
        record["seconds"] / done.steps * run.steps
        for done, record in found.items()
        if (done.data, done.batch) == (run.data, run.batch)
    ]
    return max(same or [record["seconds"] for record in found.values()], default=0.0)


#: Set by `prepare` in the process or thread that does runs.
_data: dict[str, study_data.StudyData] = {}


def executor(devices: list[str], data: dict[str, Path]) -> Executor:
    """One that does a run at a time for each name of a device: in a thread, or in processes."""
    spawn = multiprocessing.get_context("spawn")
    queue = spawn.SimpleQueue()
    for device in devices:
        queue.put(device)
    if len(devices) == 1:
        return ThreadPoolExecutor(1, initializer=prepare, initargs=(queue, data))
    return ProcessPoolExecutor(len(devices), spawn, initializer=prepare, initargs=(queue, data))


def prepare(devices: Any, data: dict[str, Path]) -> None:
    """Take a device of a queue and load the data sets."""
    load(devices.get(), data)


def load(name: str, data: dict[str, Path]) -> None:
    """Load the data sets onto the device of that name, which this process uses from now on."""
    device = torch.device(name)
    torch._dynamo.config.recompile_limit = 64  # one for each shape of a batch
    if device.type == "cuda":
        torch.cuda.set_device(device)
    _data.update({name: study_data.load(name, file, device) for name, file in data.items()})


def do(run: Run) -> Record:
    """A run's record, with facts about the data set that are the same for all of its runs."""
    data = _data[run.data]
    record = train_and_evaluate(run, data)
    about = {
        "train_pairs": len(data.train.ids),
        **{name: {"pairs": len(t.ids), "documents": len(t.ids.unique())}
           for name, t in data.tests.items()},
    }  # fmt: skip
    date = datetime.now(timezone.utc).isoformat(timespec="seconds")
    return {**record, "date": date, "about": {run.data: about}}


def measured_times(options: argparse.Namespace) -> list[Record]:
    """The time of a step of each point, one after the other on an idle GPU."""
    load(
        "cuda:0" if options.gpus else "cpu", {name: getattr(options, name) for name in options.data}
    )
    times = []
    for point in sizes(options) + others(options):
        whole = point.group == point.batch <= 2 * CLOCK
        if not whole or not point.loss.startswith(("clip", "sogclr")):
            continue  # no run of equal time needs it
        run = Run(*point, options.samples // point.batch, RATES[0], WARMUPS[0], 0)
        times.append(step_time(run, _data[point.data], options.time))
        print(times[-1], flush=True)
    return times


def write(options: argparse.Namespace, content: dict[str, Any]) -> None:
    files.write_text(options.output, json.dumps(content, indent=1) + "\n")


def line(run: Run) -> str:
    """A run in words."""
    kind = "tuning" if run.seed == TUNING_SEED else f"seed {run.seed}"
    groups = "" if run.group == run.batch else f" in groups of {run.group:,}"
    size = f"{run.steps:,} steps of {run.batch:,}{groups}"
    return f"{run.data} {run.loss}, {size}, rate {run.lr:g}, warm-up {run.warmup:.0%}, {kind}"


def shown(record: Record) -> str:
    """A record in one line."""
    if record["status"] != "ok":
        return str(record["status"])
    last = record["final"]
    recalls = [f"{name} {last[name]['recall@10']:.2%}" for name in ("in_domain", "unseen", "seen")]
    return f"loss {last['training_loss']:.3f}, recall@10 {', '.join(recalls)}"


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--icons", type=Path, default=Path("icons.npz"))
    parser.add_argument("--texts", type=Path, default=Path("texts.npz"))
    parser.add_argument("--pack", type=Path, nargs=2, metavar=("FOLDER", "FILE"),
                        help="write drawn icons into a file, and nothing else")  # fmt: skip
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/batch-study.json"))
    parser.add_argument("--data", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--sizes-only", action="store_true", help="without OTHERS")
    parser.add_argument("--samples", type=int, default=SAMPLES, help="of a run")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--time", type=float, default=0.0, metavar="SECONDS",
                        help="measure each point's step for so long, and nothing else")  # fmt: skip
    parser.add_argument("--gpus", type=int, default=int(torch.cuda.is_available()))
    parser.add_argument("--budget-seconds", type=float, default=math.inf)
    parser.add_argument("--list", action="store_true", help="print the runs that can begin")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
