"""Communication schedules between the GPUs of one machine, measured in turns.

    python benchmarks/turns.py --output benchmarks/results/turns.json

GPUs at their power limit fluctuate by 2% over a second or more, and are faster after a pause: in
successive series (benchmarks/results/scaling-repeated.json) the same contender differs by 1%. Here
each contender runs for some seconds, directly after the previous one, and all of them several
times: turns differ by 0.1 to 0.2% (benchmarks/results/hiding-4gpu.json). "alone" is the whole batch
on each GPU, all at the same time: the time of one GPU, at their mean rate.

Starts a process per GPU. `--smallest` runs it with Gloo on the CPU.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from machinery import ranks, scaling, step
from machinery.inputs import Case
from machinery.parallel import PARALLEL, SCHEDULES
from machinery.ranks import Team
from megabatch.benchmarking import records
from megabatch.benchmarking.clock import timed_calls

ALONE = "alone"
CONTENDERS = (ALONE, "megabatch", "megabatch-no-overlap", "megabatch-no-transfers")


@dataclass(frozen=True)
class Turns:
    """One contender at one size."""

    contender: str
    loss: str
    b: int
    d: int
    dtype: str
    n_devices: int
    ms: float  #: of a call: the median over turns, without the first one if there are more
    turns_ms: tuple[float, ...]  #: mean of each turn's calls on the slowest rank
    of_ideal: float | None  #: time alone / (n_devices * this time)


def main() -> None:
    options = arguments()
    if options.rank == 0:
        ranks.start_others(options.gpus, [sys.executable, __file__, *sys.argv[1:], "--rank=1"])
    say = scaling.speaker(options.rank)
    found: list[Turns] = []
    try:
        teams = ranks.join("cpu" if options.smallest else "cuda", [1, options.gpus])
        for b in options.batch_sizes:
            for one in compare(options, b, teams):
                say({"contender": one.contender, "b": b, "ms": one.ms, "of_ideal": one.of_ideal})
                found.append(one)
            if options.rank == 0:
                command = records.command_line(options.output)
                records.write(options.output, command, found)
    except Exception as error:
        ranks.give_up(error)
    ranks.leave()


def compare(options: argparse.Namespace, b: int, teams: dict[int, Team]) -> list[Turns]:
    """All contenders at one global batch, in the order of the options."""
    everyone = teams[options.gpus]
    device, d = ("cpu", 16) if options.smallest else ("cuda", 768)
    ready = {}
    for name in options.contenders:
        team = teams[1] if name == ALONE else everyone
        known = PARALLEL[options.loss] | SCHEDULES[options.loss]
        contender = known["megabatch" if name == ALONE else name]
        case = Case(options.loss, name, device, "bfloat16", b, d, scale=14.3)
        inputs = scaling.shard_inputs(case, team)
        ready[name] = contender, step.forward_backward(contender.load(team), case, inputs)
    taken: dict[str, list[float]] = {name: [] for name in ready}
    for _ in range(options.turns):
        for name, (contender, call) in ready.items():
            everyone.barrier()
            with contender.around():
                each = everyone.all_gather(timed(call, everyone, device, options.seconds))
            taken[name].append(statistics.harmonic_mean(each) if name == ALONE else max(each))
    # The first turn warms up the GPUs.
    found = {name: statistics.median(ms[1:] or ms) for name, ms in taken.items()}

    def record(name: str) -> Turns:
        n = 1 if name == ALONE else options.gpus
        of_ideal = found[ALONE] / n / found[name] if ALONE in found and name != ALONE else None
        every = tuple(taken[name])
        return Turns(name, options.loss, b, d, "bfloat16", n, found[name], every, of_ideal)

    return [record(name) for name in ready]


def timed(call: Callable[[], Tensor], team: Team, device: str, seconds: float) -> float:
    """Milliseconds of a call: the mean of `seconds` of them, after a third as many more."""
    call()  # may compile
    once = max(team.all_gather(timed_calls([call], device)[0]))
    count = max(2, math.ceil(1e3 * seconds / once))
    first = math.ceil(count / 3)
    return statistics.fmean(timed_calls([call] * (first + count), device)[first:])


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/turns.json"))
    parser.add_argument("--gpus", type=int, help="default: all")
    parser.add_argument("--loss", choices=tuple(PARALLEL), default="clip")
    parser.add_argument("--contenders", nargs="+", default=list(CONTENDERS), metavar="NAME")
    parser.add_argument("--batch-sizes", type=int, nargs="+", metavar="B")
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=3.0, help="of a contender's turn")
    parser.add_argument("--smallest", action="store_true", help="tiny, with Gloo on the CPU")
    parser.add_argument("--rank", type=int, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    count = 2 if options.smallest else torch.cuda.device_count()
    if not count:
        parser.error("no GPU here; --smallest runs on the CPU")
    options.gpus = count if options.gpus is None else options.gpus
    if not 1 <= options.gpus <= count:
        parser.error(f"--gpus: expected 1 to {count}, got {options.gpus}")
    if options.turns < 1 or options.seconds <= 0:
        parser.error("--turns, --seconds: expected positive numbers")
    if options.smallest:
        options.seconds = 0.0
    options.batch_sizes = options.batch_sizes or ([96] if options.smallest else [262_144, 65_536])
    known = {ALONE, *PARALLEL[options.loss], *SCHEDULES[options.loss]}
    if unknown := [name for name in options.contenders if name not in known]:
        parser.error(f"--contenders: expected some of {', '.join(sorted(known))}, got {unknown[0]}")
    if rest := [b for b in options.batch_sizes if b < 1 or b % options.gpus]:
        parser.error(f"--batch-sizes: expected multiples of {options.gpus}, got {rest[0]}")
    return options


if __name__ == "__main__":
    main()
