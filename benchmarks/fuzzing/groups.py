"""Many cases: in this process or in several, and in groups of ranks started once."""

from __future__ import annotations

import multiprocessing
import os
import queue
import tempfile
import traceback
from collections.abc import Generator, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from fuzzing.cases import Case
from fuzzing.check import WrongError, check
from megabatch import similarity

#: Seconds after which a rank that does not come counts as lost.
PATIENCE = 120

FINE = ("", "undecided")


def run(cases: list[Case], device: str) -> Iterator[tuple[Case, str]]:
    """Each case's outcome: "", "undecided" or what went wrong; those of one rank first."""
    for world in sorted({case["ranks"] for case in cases}):
        mine = [case for case in cases if case["ranks"] == world]
        if world > 1:
            yield from _together(mine, device)
            continue
        for case in mine:
            yield case, attempt(case, 0, device)[0]


def run_in_processes(cases: list[Case], device: str, processes: int) -> Iterator[tuple[Case, str]]:
    """`run` with the cases of one rank in several processes at once, which compile in parallel.

    Outcomes come in the order in which they are known. If a process dies, the cases that have none
    yet are told so.
    """
    context = multiprocessing.get_context("forkserver")  # a CUDA context survives no fork
    with ProcessPoolExecutor(processes, context, configure, (device,)) as pool:
        alone = [case for case in cases if case["ranks"] == 1]
        waiting = {pool.submit(attempt, case, 0, device): case for case in alone}
        for future in as_completed(waiting):
            error = future.exception()
            yield waiting[future], str(error) if error else future.result()[0]
    yield from run([case for case in cases if case["ranks"] > 1], device)


def configure(device: str) -> None:
    """Set this process's threads and precision: many at once, TF32 where kernels use it."""
    torch.set_num_threads(1)
    torch.backends.cuda.matmul.allow_tf32 = device == "cuda"


def attempt(case: Case, rank: int, device: str) -> tuple[str, bool]:
    """A case's outcome on this rank, and whether the ranks can go on together."""
    changes: tuple[tuple[Any, str], ...] = (
        (similarity.set_workspace, "workspace"),
        (similarity.set_gather, "gather"),
        (similarity.set_grid, "grid"),
    )
    for change, name in changes:
        change(case[name])
    try:
        return check(case, rank, device), True
    except WrongError as error:
        return str(error), True
    except Exception:
        return traceback.format_exc(), case["ranks"] == 1
    finally:
        for change, _ in changes:
            change(None)


def _together(cases: list[Case], device: str) -> Iterator[tuple[Case, str]]:
    """Groups are started anew after a case on which the ranks lost each other."""
    context = multiprocessing.get_context("spawn")
    while cases:
        outcomes = context.Queue()
        with tempfile.TemporaryDirectory() as folder:
            processes = [
                context.Process(target=_work, args=(rank, cases, folder, device, outcomes))
                for rank in range(cases[0]["ranks"])
            ]
            for process in processes:
                process.start()
            done = yield from _collect(cases, outcomes, processes)
            for process in processes:
                process.kill()
                process.join()
        cases = cases[done:]


def _collect(
    cases: list[Case], outcomes: Any, processes: list[Any]
) -> Generator[tuple[Case, str], None, int]:
    """Outcomes as the ranks tell them; returns how many cases are done."""
    heard: dict[int, dict[int, str]] = {case["index"]: {} for case in cases}
    silent, parted = 0, False
    for done, case in enumerate(cases):
        told = heard[case["index"]]
        while len(told) < len(processes):
            try:
                rank, index, outcome, well = outcomes.get(timeout=1)
            except queue.Empty:
                silent += 1
                if silent <= 2 * PATIENCE and any(p.is_alive() for p in processes):
                    continue
                yield case, f"the ranks lost each other; {_said(told)}"
                return done + 1
            heard[index][rank] = outcome
            parted |= not well
            silent = 0
        wrong = {rank: outcome for rank, outcome in told.items() if outcome not in FINE}
        yield case, _said(wrong) if wrong else told[0]
        if parted:
            return done + 1
    return len(cases)


def _said(told: dict[int, str]) -> str:
    return "; ".join(f"rank {rank}: {outcome}" for rank, outcome in sorted(told.items()))


def _work(rank: int, cases: list[Case], folder: str, device: str, outcomes: Any) -> None:
    """A rank: all cases, one after another, until one parts the ranks."""
    torch.set_num_threads(1)
    world = cases[0]["ranks"]
    store = dist.FileStore(f"{folder}/store", world)
    patience = timedelta(seconds=PATIENCE)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=patience)
    for case in cases:
        outcome, well = attempt(case, rank, device)
        outcomes.put((rank, case["index"], outcome, well))
        if not well:
            break
    outcomes.close()
    outcomes.join_thread()
    os._exit(0)  # without waiting for ranks that are gone
