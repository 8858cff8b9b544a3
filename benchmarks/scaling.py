"""One loss over several GPUs of one machine: strong and weak scaling, memory, peers, in one run.

    python benchmarks/scaling.py --output benchmarks/results/scaling.json --gpus 1,2,4

Starts a process per GPU; smaller numbers of GPUs are sub-groups of the largest. The most important
trials come first; peers that may crash come last, in processes of their own. A trial that does not
fit into --budget-seconds, is not installed, crashes or hangs is a record that says so. `--list`
prints the plan; `--smallest` runs it with Gloo on the CPU, at sizes that only show that it runs.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Collection, Iterator
from dataclasses import replace
from pathlib import Path
from subprocess import Popen
from typing import IO

import torch

from machinery import ranks, scaling, supervise
from machinery.group import warm_up
from machinery.inputs import Case
from machinery.scaling import ScalingRecord, ScalingResult, Trial
from megabatch.benchmarking import records

MIB = 2**20
VARIANTS = ("megabatch", "megabatch-no-overlap", "megabatch-no-transfers")
#: Rows of one GPU: weak scaling; the paper's 4M pairs on 8 GPUs.
WEAK_ROWS, MEMORY_ROWS = 65_536, 524_288
#: Seconds for which calls of 0.2 to 0.7 s are repeated, to average over the oscillation of a GPU at
#: its power limit (4 H200s: 179 to 191 ms from one call to the next).
LONG = 2.5


def case(b: int, contender: str = "megabatch", loss: str = "clip") -> Case:
    return Case(loss, contender, "cuda", "bfloat16", b, 768, scale=14.3)


def trials(sizes: list[int]) -> Iterator[Trial]:
    """The trials for these numbers of GPUs, the most important first."""
    most = sizes[-1]
    for b in (262_144, 65_536, 16_384):
        yield from strong(b, sizes)
    for b in (65_536, 262_144):
        yield from strong(b, sizes, "siglip")
    yield Trial(case(most * MEMORY_ROWS), most, once=True)
    for n in sizes:
        if n > 1:
            yield Trial(case(n * WEAK_ROWS), n, duration(n * WEAK_ROWS))
    for n in reversed(sizes):
        yield Trial(case(1_048_576), n, once=True)
    if most > 1:
        yield Trial(case(4_194_304), most, once=True)
        for b in (65_536, 16_384):
            yield Trial(case(b, "openclip"), most)
        yield Trial(case(65_536, "openclip", "siglip"), most)
        for peer, loss in (("memeff", "clip"), ("siglip-kernel", "siglip"), ("inf-cl", "clip")):
            for b in (65_536, 16_384):
                yield Trial(case(b, peer, loss), most)
        yield Trial(case(65_536, "disco-clip"), most)


def duration(b: int, loss: str = "clip") -> float:
    """Seconds for repetitions."""
    return LONG if loss == "clip" and b >= 4 * WEAK_ROWS else 1.0


def strong(b: int, sizes: list[int], loss: str = "clip") -> Iterator[Trial]:
    for n in sizes:
        largest = n > 1 and n == sizes[-1]
        in_full = largest or (n > 1 and loss == "clip")
        for name in VARIANTS if in_full else VARIANTS[:1]:
            yield Trial(case(b, name, loss), n, duration(b, loss))
        if largest and b >= 4 * WEAK_ROWS:
            yield Trial(case(b, "megabatch-rounds", loss), n)
        if b < WEAK_ROWS:  # launch overhead exceeds the GPUs' work
            yield Trial(case(b, "megabatch-captured", loss), n)


def plan(sizes: list[int], smallest: bool) -> list[Trial]:
    """The trials, each once."""
    return list(dict.fromkeys(small(t) if smallest else t for t in trials(sizes)))


def small(trial: Trial) -> Trial:
    one = trial.case
    shrunk = replace(one, device="cpu", b=max(48, one.b >> 11), d=16)
    return replace(trial, case=shrunk, seconds=0.0, product_size=32)


def by_process(plan: list[Trial]) -> Iterator[list[int]]:
    """Trials grouped by processes; a contender that may break its processes has its own."""
    yield [i for i, trial in enumerate(plan) if not trial.contender.own_processes]
    alone = [i for i, trial in enumerate(plan) if trial.contender.own_processes]
    for name in dict.fromkeys(plan[i].case.contender for i in alone):
        yield [i for i in alone if plan[i].case.contender == name]


def row(record: ScalingRecord) -> str:
    """A line for the terminal."""
    name = f"{record.loss:7} {record.contender:23} {record.b:>10,} on {record.n_devices}"
    if record.ms is None or record.fraction is None or record.extra_bytes is None:
        return f"{name}  {record.status}: {record.note}"
    host = "" if record.host_ms is None else f"host {record.host_ms:8.2f} ms"
    host += "" if record.queued_ms is None else f" queued {record.queued_ms:6.2f} ms"
    error = "-" if record.max_row_error is None else f"{record.max_row_error:.1e}"
    return (
        f"{name} {record.ms:11.3f} ms {record.fraction:6.1%} of {record.product_tflops:4.0f} "
        f"{record.extra_bytes / MIB:7.0f} MiB {host:34} row error {error} "
        f"{record.status} {record.note}"
    )


def main() -> None:
    options = arguments()
    sizes: list[int] = options.gpus
    todo = plan(sizes, options.smallest)
    if options.only:
        if not all(0 <= i < len(todo) for i in options.only):
            raise SystemExit(f"--only: expected 0 to {len(todo) - 1}")
        todo = [todo[i] for i in options.only]
    if options.list:
        for i, trial in enumerate(todo):
            print(i, trial.n, trial.case, "once" if trial.once else "", f"{trial.cost:.0f} s")
        return
    words = [sys.executable, __file__, f"--gpus={','.join(map(str, sizes))}"]
    words += [*(["--smallest"] if options.smallest else []), *(f"--only={i}" for i in options.only)]
    if options.skip is not None:
        work(options, todo, words)
        return
    output: Path = options.output
    output.parent.mkdir(parents=True, exist_ok=True)
    log = output.with_suffix(".log")
    log.write_text("")
    deadline = time.time() + options.budget_seconds
    command = records.command_line(output)
    done: list[ScalingRecord] = []

    def keep(trial: Trial, result: ScalingResult) -> None:
        done.append(scaling.record(trial, result))
        records.write(output, command, scaling.compare(done))
        print(row(done[-1]), flush=True)

    for numbers in by_process(todo):
        here = []
        for i in numbers:
            absent = todo[i].contender.absent(todo[i].case.device)
            if absent is None:
                here.append(i)
            else:
                keep(todo[i], ScalingResult(*absent))
        start = starter(words, here, len(todo), deadline)
        for trial, found in supervise.supervise_cases(
            [todo[i] for i in here], start, log, deadline, options.patience
        ):
            keep(trial, ScalingResult(**found))
    print(f"{len(done)} records: {output}; messages: {log}")


def starter(words: list[str], numbers: list[int], count: int, deadline: float) -> supervise.Start:
    """Start workers for the trials with these numbers, except those already done."""

    def start(done: Collection[int], messages: IO[bytes]) -> Popen[bytes]:
        if done:
            time.sleep(3)  # until the previous processes have ended and freed their memory
        left = [i for place, i in enumerate(numbers) if place not in done]
        skip = [i for i in range(count) if i not in left]
        same = [f"--deadline={deadline}", f"--numbers={json.dumps(numbers)}", "--skip"]
        return supervise.start_self([*words[1:], *same])(skip, messages)

    return start


def work(options: argparse.Namespace, todo: list[Trial], words: list[str]) -> None:
    """The program of every process; rank 0, the worker, starts the others."""
    numbers, skip = json.loads(options.numbers), json.loads(options.skip)
    device, size = todo[0].case.device, options.gpus[-1]
    if options.rank == 0:
        others = [f"--deadline={options.deadline}", f"--numbers={options.numbers}"]
        ranks.start_others(size, [*words, *others, f"--skip={options.skip}", "--rank=1"])
    say = scaling.speaker(options.rank)
    try:
        teams = ranks.join(device, options.gpus)
        warm_up(device)
        places = {number: place for place, number in enumerate(numbers)}

        def say_place(line: dict[str, object]) -> None:
            say({**line, "case": places[line["case"]]})

        scaling.work(todo, teams, skip, options.deadline, say_place)
    except Exception as error:
        ranks.give_up(error)
    ranks.leave()


def numbers_of(text: str) -> list[int]:
    sizes = sorted({int(part) for part in text.split(",")})
    if sizes[0] < 1 or any(262_144 % n for n in sizes):
        raise argparse.ArgumentTypeError("expected powers of two")
    return sizes


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/scaling.json"))
    parser.add_argument("--gpus", type=numbers_of, help="such as 1,2,4; default: up to all")
    parser.add_argument("--budget-seconds", type=float, default=560.0)
    parser.add_argument("--patience", type=float, default=150.0, help="seconds until a hang is one")
    parser.add_argument(
        "--only", type=int, action="append", default=[], help="this trial of --list; repeatable"
    )
    parser.add_argument("--list", action="store_true", help="print what would be measured")
    parser.add_argument("--smallest", action="store_true", help="tiny, with Gloo on the CPU")
    parser.add_argument("--skip", help=argparse.SUPPRESS)
    parser.add_argument("--numbers", help=argparse.SUPPRESS)
    parser.add_argument("--rank", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--deadline", type=float, help=argparse.SUPPRESS)
    options = parser.parse_args()
    count = torch.cuda.device_count()
    if options.gpus is None:
        largest = count if count and not options.smallest else 2
        options.gpus = [2**k for k in range(int(math.log2(largest)) + 1)]
    if not (options.smallest or options.list) and options.gpus[-1] > count:
        parser.error(f"--gpus: this machine has {count}; --smallest runs on the CPU")
    return options


if __name__ == "__main__":
    main()
