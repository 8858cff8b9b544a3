"""Many cases: in this process or in several, and in groups of ranks started once."""

from __future__ import annotations

import contextlib
import multiprocessing
import tempfile
import traceback
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from datetime import timedelta
from multiprocessing.connection import Connection
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
    """Cases of groups of one size, which start anew after a case on which ranks lost each other."""
    context = multiprocessing.get_context("forkserver")
    left = deque(cases)
    while left:
        with tempfile.TemporaryDirectory() as folder:
            pipes = [context.Pipe() for _ in range(cases[0]["ranks"])]
            processes = [
                context.Process(target=_work, args=(rank, len(pipes), folder, device, theirs))
                for rank, (_, theirs) in enumerate(pipes)
            ]
            for process, (_, theirs) in zip(processes, pipes, strict=True):
                process.start()
                theirs.close()  # so that its end is noticed
            well = True
            while left and well:
                case = left.popleft()
                outcome, well = ask([ours for ours, _ in pipes], case)
                yield case, outcome
            for process in processes:
                process.kill()
                process.join()


def ask(ranks: list[Connection], case: Case) -> tuple[str, bool]:
    """A case's outcome on all ranks, and whether these can go on together."""
    for rank in ranks:
        with contextlib.suppress(OSError):  # if it died
            rank.send(case)
    told: list[tuple[str, bool]] = []
    for rank in ranks:
        try:
            told.append(rank.recv() if rank.poll(2 * PATIENCE) else ("no answer", False))
        except (EOFError, OSError):
            told.append(("it died", False))
    wrong = [f"rank {n}: {outcome}" for n, (outcome, _) in enumerate(told) if outcome not in FINE]
    return "; ".join(wrong) or told[0][0], all(well for _, well in told)


def _work(rank: int, world: int, folder: str, device: str, connection: Connection) -> None:
    """A rank: one case after another, until it is killed."""
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", world)
    patience = timedelta(seconds=PATIENCE)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=patience)
    while True:
        connection.send(attempt(connection.recv(), rank, device))
