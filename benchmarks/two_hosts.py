"""Losses and training on two hosts: speeds of the link between them, failures of link and hosts.

    python benchmarks/two_hosts.py --output benchmarks/results/two-hosts.json  # as root

The hosts are namespaces of this Linux machine (`machinery/hosts.py`), with two ranks on each, Gloo
over TCP and a switch in between. Without the rights or tools for that, the command says so and ends
with exit code 77. Nothing of it is left afterwards, and nothing leaves the namespaces.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from machinery import host_training
from machinery.host_ranks import Ranks, serve
from machinery.host_schedules import GRIDS, LOSSES, SCHEDULES, shard
from machinery.hosts import Network, Unavailable
from machinery.inputs import features
from megabatch.benchmarking import records
from megabatch.similarity.distributed import comm, control
from megabatch.similarity.distributed.schedule import grid_groups

#: Exit code if two hosts cannot be made here.
UNAVAILABLE = 77
SCALE = 14.3
#: Mbit/s of the link while something fails: a step takes seconds.
SLOW = 50


# --- on the ranks ---------------------------------------------------------------------------------


def step(
    schedule: str, rows: int, width: int, truth: str = "", together: bool = True
) -> dict[str, Any]:
    """A loss, forward and backward, with this rank's rows.

    Args:
        schedule: a key of `SCHEDULES`.
        rows, width: of this rank's features.
        truth: a file of the gradients of all ranks' rows, if this rank's are to be compared.
        together: whether the ranks wait for each other first.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    mine = shard(schedule, rank, rows)
    whole = features(size * rows, width, torch.float32, "cpu")
    x, y = (side[mine].clone().requires_grad_() for side in whole)
    scale = torch.tensor(SCALE, requires_grad=True)
    function = LOSSES[SCHEDULES[schedule].loss][0](None)
    if together:
        dist.barrier()
    began = time.perf_counter()
    with SCHEDULES[schedule].around(sum(side.nbytes for side in whole) // 2):
        function(x, y, scale).backward()
    result: dict[str, Any] = {"ms": 1e3 * (time.perf_counter() - began)}
    assert x.grad is not None
    assert y.grad is not None
    found = torch.stack([x.grad, y.grad]).numpy()
    result["digest"] = hashlib.sha256(found.tobytes()).hexdigest()
    if truth:
        exact = np.load(truth, mmap_mode="r")[:, mine]
        norms = [np.linalg.norm(t, axis=-1) for t in (found / size - exact, exact)]
        result["row_error"] = float((norms[0] / norms[1]).max())
    return result


def shape(schedule: str) -> list[int]:
    """The grid of a loss's group, (rows, columns); both 1 if it is none."""
    with SCHEDULES[schedule].around(1 << 20):
        name, sizes = comm.group_name(None), [[1] * dist.get_world_size()] * 2
        found = grid_groups(name, sizes, 1, torch.device("cpu"))
    return [1, 1] if found is None else [found.cols.size(), found.rows.size()]


def handshake(calls: int) -> dict[str, Any]:
    """Microseconds of an exchange between the ranks' hosts, as each loss makes one."""
    assert dist.group.WORLD is not None
    channel = control.channel(dist.group.WORLD, torch.device("cpu"))
    taken = []
    for _ in range(calls):
        dist.barrier()
        began = time.perf_counter()
        channel.gather(bytes(1088))
        taken.append(1e6 * (time.perf_counter() - began))
    return {"kind": type(channel).__name__, "microseconds": taken}


def send(size: int, to: int) -> float:
    """Seconds of sending bytes from rank 0 to another one, with a small answer, on rank 0."""
    rank, began = dist.get_rank(), time.perf_counter()
    whole, answer = torch.empty(size, dtype=torch.uint8), torch.empty(1)
    if rank == 0:
        dist.send(whole, to)
        dist.recv(answer, to)
    elif rank == to:
        dist.recv(whole, 0)
        dist.send(answer, 0)
    return time.perf_counter() - began


# --- on this side ---------------------------------------------------------------------------------


class Run:
    """A cluster of its own: hosts, the ranks on them and steps of one size."""

    def __init__(
        self, network: Network, options: argparse.Namespace, timeout: float, late: float = 0.0
    ) -> None:
        self.network, self.options = network, options
        self.ranks = Ranks(network, sys.argv[0], options.ranks_per_host, timeout, late)
        self.first_of_host_1 = options.ranks_per_host

    def arguments(self, schedule: str) -> dict[str, Any]:
        return {"schedule": schedule, "rows": self.options.rows, "width": self.options.width}

    def step(self, schedule: str, **arguments: Any) -> tuple[list[dict[str, Any]], int]:
        """Every rank's result, and bytes that the first host received."""
        before = self.network.bytes_to(0)
        found = self.ranks.call("step", **self.arguments(schedule), **arguments)
        return found, self.network.bytes_to(0) - before

    def begin_step(self, schedule: str, share: float, expected: int) -> float:
        """Begin a step; returns at the time at which this share of the expected bytes has come."""
        before = self.network.bytes_to(0)
        self.ranks.ask("step", **self.arguments(schedule))
        until = time.monotonic() + self.ranks.timeout
        while self.network.bytes_to(0) - before < share * expected and time.monotonic() < until:
            time.sleep(0.005)
        return time.monotonic()


def speeds(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Steps by schedule and handshakes at each speed of the link; the last rank starts late."""
    with Network() as network, tempfile.TemporaryDirectory() as folder:
        truth = Path(folder, "truth.npy")
        run = Run(network, options, timeout=600, late=options.late)
        yield {"joined_s": run.ranks.joined, "late_s": options.late}
        errors = {}
        for schedule in options.schedules:  # which opens all connections
            np.save(truth, _gradients(schedule, run.ranks.size, options.rows, options.width))
            found, _ = run.step(schedule, truth=str(truth))
            if SCHEDULES[schedule].right:
                errors[schedule] = max(rank["row_error"] for rank in found)
        yield {"row_error": errors}
        yield {
            "grids": {schedule: run.ranks.call("shape", schedule=schedule)[0] for schedule in GRIDS}
        }
        for mbit in (*options.speeds, None):
            network.set_speed(mbit)
            yield {"mbit": mbit, **_link(run, mbit)}
            times: dict[str, list[float]] = {schedule: [] for schedule in options.schedules}
            moved = dict.fromkeys(options.schedules, 0)
            for schedule in [*options.schedules] * options.repetitions:  # in turns
                found, received = run.step(schedule)
                times[schedule].append(max(rank["ms"] for rank in found))
                moved[schedule] += received
            for schedule in options.schedules:
                yield {
                    "mbit": mbit,
                    "schedule": schedule,
                    "ms": statistics.median(times[schedule]),
                    "times_ms": times[schedule],
                    "received_bytes": moved[schedule] // options.repetitions,
                }


def _link(run: Run, mbit: float | None) -> dict[str, Any]:
    """A link's speed as Gloo has it, the time of a handshake, and how busy the machine is."""
    size = int(min(mbit or 1000, 1000) * 1e6 / 8)
    (seconds, *_) = run.ranks.call("send", size=size, to=run.first_of_host_1)
    shown = run.ranks.call("handshake", calls=20)
    return {
        "measured_mbit": size * 8e-6 / seconds,
        "channel": shown[0]["kind"],
        "handshake_us": statistics.median(shown[0]["microseconds"]),
        "load": os.getloadavg()[0],
    }


def late(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """The last rank comes to a step late, then too late."""
    with Network() as network:
        run = Run(network, options, options.timeout)
        *others, last = range(run.ranks.size)
        call = {**run.arguments("default"), "together": False}
        run.ranks.call("step", **call)
        run.ranks.ask("step", others, **call)
        time.sleep(options.late)
        run.ranks.ask("step", [last], **call)
        waited = [one["value"]["ms"] / 1e3 for one in run.ranks.answers()]
        yield {"late_s": options.late, "step_s": waited}
        since = time.monotonic()
        run.ranks.ask("step", others, **call)
        yield {"never_comes": last, **_ends(run, others, since)}


def stall(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """The switch drops everything for a while in the middle of a step, then forwards again."""
    for schedule in options.failing:
        with Network() as network:
            run = Run(network, options, options.stall + 150)
            network.set_speed(SLOW)
            run.step(schedule)
            usual, moved = run.step(schedule)
            since = run.begin_step(schedule, options.share, moved)
            network.cut()
            time.sleep(options.stall)
            network.restore()
            found = run.ranks.answers()
            after = max(one["at"] for one in found) - since - options.stall
            digests = [one.get("value", {}).get("digest") for one in found]
            yield {
                "schedule": schedule,
                "at_share": options.share,
                "stall_s": options.stall,
                "usual_ms": max(rank["ms"] for rank in usual),
                "ended_s_after_stall": after,
                "same_gradients": digests == [rank["digest"] for rank in usual],
                "errors": [one["error"] for one in found if "error" in one],
            }


def failure(kind: str, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """The link or the second host fails for good in the middle of a step."""
    for schedule in options.failing:
        with Network() as network:
            run = Run(network, options, options.timeout)
            network.set_speed(SLOW)
            run.step(schedule)
            _, moved = run.step(schedule)
            since = run.begin_step(schedule, options.share, moved)
            if kind != "host dies":
                network.cut()
            if kind != "link dies":
                network.hosts[1].kill()
            left = range(run.ranks.size if kind == "link dies" else run.first_of_host_1)
            yield {"schedule": schedule, "at_share": options.share, **_ends(run, left, since)}


def _ends(run: Run, ranks: Any, since: float) -> dict[str, Any]:
    """How ranks end that cannot go on: seconds until each has raised, messages, exit codes."""
    found = run.ranks.answers(ranks)
    return {
        "timeout_s": run.ranks.timeout,
        "seconds": [one["at"] - since if "at" in one else None for one in found],
        "errors": {rank: one.get("error", "none") for rank, one in zip(ranks, found, strict=True)},
        "exit_codes": run.ranks.exit_codes(ranks),
        "ended_s": time.monotonic() - since,
    }


def _gradients(schedule: str, ranks: int, rows: int, d: int) -> np.ndarray[Any, Any]:
    """The gradients (2, b, d) of the dense expression in float64; 0 for rows that no rank has."""
    every = features(ranks * rows, d, torch.float32, "cpu")
    x, y = (side.double().requires_grad_() for side in every)
    used = torch.cat([torch.arange(ranks * rows)[shard(schedule, r, rows)] for r in range(ranks)])
    LOSSES[SCHEDULES[schedule].loss][1](x[used], y[used], SCALE).backward()
    assert x.grad is not None
    assert y.grad is not None
    return torch.stack([x.grad, y.grad]).numpy()


SCENARIOS: dict[str, Callable[[argparse.Namespace], Iterator[dict[str, Any]]]] = {
    "speeds": speeds,
    "late": late,
    "host dies": functools.partial(failure, "host dies"),
    "host vanishes": functools.partial(failure, "host vanishes"),
    "link dies": functools.partial(failure, "link dies"),
    "stall": stall,
    "training": host_training.training,
}


def parse(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").split("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--only", action="append", choices=SCENARIOS, help="repeatable")
    parser.add_argument("--speeds", type=float, nargs="*", default=[50, 200, 1000, 5000],
                        help="of the link, Mbit/s; then without a limit")  # fmt: skip
    parser.add_argument("--schedules", nargs="+", choices=SCHEDULES, default=[*SCHEDULES],
                        help="whose steps are timed")  # fmt: skip
    parser.add_argument("--rows", type=int, default=512, help="of a rank")
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--repetitions", type=int, default=3, help="of a step")
    parser.add_argument("--ranks-per-host", type=int, default=2)
    parser.add_argument("--timeout", type=int, default=20,
                        help="of the group, in seconds, where something fails")  # fmt: skip
    parser.add_argument("--late", type=float, default=5, help="seconds that a rank is late")
    parser.add_argument("--stall", type=float, default=30, help="seconds")
    parser.add_argument("--failing", nargs="*", choices=SCHEDULES, default=["default", "gathered"],
                        help="schedules of the steps in which something fails")  # fmt: skip
    parser.add_argument("--share", type=float, default=0.25,
                        help="of a step's bytes, after which something fails")  # fmt: skip
    parser.add_argument("--steps", type=int, default=8, help="of training")
    parser.add_argument("--output", type=Path)
    return parser.parse_args(words)


def main() -> int:
    if "RANK" in os.environ:
        serve({"step": step, "shape": shape, "handshake": handshake, "send": send})
        return 0
    options = parse()
    torch.set_num_threads(1)
    found = []
    try:
        with Network():
            pass  # refused here if at all
        for name in options.only or SCENARIOS:
            for one in SCENARIOS[name](options):
                found.append({"scenario": name, **one})
                print(json.dumps(found[-1]), flush=True)
    except Unavailable as why:
        print(f"two_hosts.py: no two hosts can be made here: {why}", file=sys.stderr)
        return UNAVAILABLE
    except KeyboardInterrupt:
        return 130
    if options.output:
        records.write(options.output, records.command_line(options.output), found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
