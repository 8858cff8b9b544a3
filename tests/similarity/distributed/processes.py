"""Tests that several processes run together.

    @on_processes(2, 3)
    def test_something(world):  # runs on each process of a group of two, then of three
        assert ...

`on_processes` uses Gloo on the CPU. `on_devices` does too, and with `-m gpu` runs the check once
more over NCCL with a GPU for each rank, where new tensors are on the GPU by default.

Starting processes takes seconds, so one group of each size runs all checks of a session in turn. If
a check fails, hangs or kills a process, its group ends and the next check gets a new one.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import importlib
import math
import multiprocessing
import os
import signal
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from megabatch.training.world import leave
from tests.server import ENVIRONMENT, forked

Check = Callable[["World"], None]

#: Seconds that a check may take; on GPUs it compiles kernels first. (pytest's limit is 300.)
LIMITS = {"cpu": 120.0, "cuda": 250.0}
#: Seconds that starting a group may take.
START = 150.0
#: Seconds after its limit until a check is given up whose process did not end itself.
SPARE = 30.0
#: Seconds that other ranks have to report after a check has failed on one.
GRACE = 10.0


@dataclass(frozen=True)
class World:
    """The process that a check runs in."""

    rank: int
    size: int
    folder: Path  #: of this check, common to all ranks
    device: str = "cpu"

    def shard(self, tensor: torch.Tensor, sizes: list[int]) -> torch.Tensor:
        """This rank's rows of a tensor of all ranks' rows."""
        return tensor.split(sizes)[self.rank]


def on_processes(*sizes: int) -> Callable[[Check], Callable[..., None]]:
    """Make a check a test over Gloo, for each of these numbers of processes."""
    return functools.partial(_as_test, [(size, "cpu") for size in sizes])


def on_gpus(*sizes: int) -> Callable[[Check], Callable[..., None]]:
    """Make a check a test over NCCL, for each of these numbers of GPUs."""
    return functools.partial(_as_test, [(size, "cuda") for size in sizes])


def on_devices(*sizes: int) -> Callable[[Check], Callable[..., None]]:
    """As `on_processes`, and as `on_gpus` for the sizes above 1."""
    worlds = [(size, "cpu") for size in sizes] + [(size, "cuda") for size in sizes if size > 1]
    return functools.partial(_as_test, worlds)


def _as_test(worlds: list[tuple[int, str]], check: Check) -> Callable[..., None]:
    cases = [
        pytest.param(size, "cpu", id=str(size))
        if device == "cpu"
        else pytest.param(size, "cuda", id=f"{size} GPUs", marks=pytest.mark.gpu)
        for size, device in worlds
    ]

    @pytest.mark.concurrency
    @pytest.mark.parametrize(("processes", "device"), cases)
    def test(processes: int, device: str, process_groups: Groups, tmp_path: Path) -> None:
        if device == "cuda" and torch.cuda.device_count() < processes:
            pytest.skip(f"needs {processes} CUDA devices")
        failures = process_groups.failures(check, processes, device, tmp_path)
        assert not failures, "\n".join(failures)

    test.__name__ = test.__qualname__ = check.__name__
    test.__module__ = check.__module__
    test.check = check  # type: ignore[attr-defined]
    return test


def shard_sizes(n: int) -> Iterator[list[int]]:
    """Equal, unequal and empty shards."""
    yield [3] * n
    yield [2 + 3 * (i % 2) + i for i in range(n)]
    yield [5, 0, 4, 1][:n]


class Groups:
    """One group for each size and kind of device, started when a check first needs it."""

    def __init__(self, new_folder: Callable[[], Path]) -> None:
        """`new_folder`: gives one for the stack traces of processes that end."""
        self._new_folder = new_folder
        self._groups: dict[tuple[int, str], Group] = {}

    def failures(self, check: Check, size: int, device: str, folder: Path) -> list[str]:
        """Run a check on a group; return its failures, the first one first."""
        group = self._groups.pop((size, device), None) or Group(size, device, self._new_folder())
        failures = group.failures(check, folder)
        if not failures:
            self._groups[size, device] = group
        return failures

    def end(self) -> None:
        """End all groups."""
        for group in self._groups.values():
            group.end()
        self._groups.clear()


class Group:
    """Processes that run checks in turn, until one fails."""

    def __init__(self, size: int, device: str, folder: Path, limit: float | None = None) -> None:
        """`limit`: seconds that a check may take; by default from `LIMITS`."""
        self._limit = LIMITS[device] if limit is None else limit
        self._traces = [folder / f"rank-{rank}.txt" for rank in range(size)]
        pipes = [multiprocessing.Pipe() for _ in range(size)]
        self._connections = [ours for ours, _ in pipes]
        theirs = [end for _, end in pipes]
        arguments = theirs, device, self._limit, self._traces
        self.processes = start(size, _run_checks, *arguments, device=device)
        for end in theirs:
            end.close()
        self._last, self._ready = "its start", False

    def failures(self, check: Check, folder: Path) -> list[str]:
        """Run a check; return its failures, the first one first. A failure ends the group."""
        name = f"{check.__module__}.{check.__name__}"
        try:
            failures = [] if self._ready else self._answers("its start", START)
            self._ready = True
            if not failures:
                self._send((check.__module__, check.__name__, folder))
                failures = self._answers(name, self._limit + SPARE)
        except BaseException:
            self._kill()
            raise
        self._last = name
        if failures:
            self._kill()
        return failures

    def end(self) -> None:
        """Ask the processes to end; kill those that do not."""
        self._send(None)
        for process in self.processes:
            process.join(10)
        self._kill()

    def _send(self, request: Any) -> None:
        for connection in self._connections:
            with contextlib.suppress(OSError):  # the process has ended, which is found later
                connection.send(request)

    def _answers(self, name: str, seconds: float) -> list[str]:
        """All processes' failures by time, but first those that ended, for which others wait."""
        failures: list[tuple[float, str]] = []
        waiting = dict(enumerate(self._connections))
        deadline = time.monotonic() + seconds
        while waiting:
            ends = {rank: self.processes[rank].sentinel for rank in waiting}
            left = max(0.0, deadline - time.monotonic())
            ready = wait([*waiting.values(), *ends.values()], left)
            for rank, connection in list(waiting.items()):
                if not ready:  # in time
                    with contextlib.suppress(ProcessLookupError):  # it writes its stack trace
                        os.kill(self.processes[rank].pid, signal.SIGABRT)
                    when, failure = math.inf, self._ended(rank, name)
                elif connection in ready or ends[rank] in ready:
                    when, failure = self._answer(rank, name)
                else:
                    continue
                del waiting[rank]
                if failure:
                    failures.append((when, f"rank {rank}: {failure}"))
                    deadline = min(deadline, time.monotonic() + GRACE)
        return [failure for _, failure in sorted(failures)]

    def _answer(self, rank: int, name: str) -> tuple[float, str]:
        """Time and text of a rank's failure, "" for none; its answer counts though it has ended."""
        with contextlib.suppress(EOFError, OSError):
            if self._connections[rank].poll():
                answer: tuple[float, str] = self._connections[rank].recv()
                return answer
        return -math.inf, self._ended(rank, name)

    def _ended(self, rank: int, name: str) -> str:
        self.processes[rank].join(GRACE)
        code, trace = self.processes[rank].exitcode, self._traces[rank]
        where = trace.read_text() if trace.exists() else ""
        return f"ended with exit code {code} in {name} (before: {self._last})\n{where}"

    def _kill(self) -> None:
        for process, connection in zip(self.processes, self._connections, strict=True):
            process.kill()
            process.join()
            connection.close()


def start(
    size: int, target: Callable[..., None], *arguments: Any, device: str = "cpu"
) -> list[Any]:
    """Start `target(rank, size, port, *arguments)` on `size` processes.

    This process holds the store at that port, to which `join` connects.
    """
    store = new_store()
    ranks = [(rank, size, store.port, *arguments) for rank in range(size)]
    if device == "cpu":
        processes = [forked(target, *each) for each in ranks]
    else:
        context = multiprocessing.get_context("spawn")
        processes = [context.Process(target=target, args=each) for each in ranks]
        with mock.patch.dict(os.environ, ENVIRONMENT, clear=True):
            for process in processes:
                process.start()
    for process in processes:
        process.store = store
    return processes


def new_store() -> dist.TCPStore:
    """A store at a free port, which it occupies as long as it is referenced."""
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def torchrun_environment(rank: int, size: int, port: int) -> dict[str, str]:
    """The variables that torchrun sets for a process, with a store at this port (`new_store`)."""
    variables = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1"}
    variables |= {"MASTER_PORT": port}
    variables |= {"TORCHELASTIC_USE_AGENT_STORE": True, "TORCHELASTIC_RESTART_COUNT": 0}
    return {name: str(value) for name, value in variables.items()}


def join(rank: int, size: int, port: int, seconds: float = 60, device: str = "cpu") -> None:
    """Initialise the default process group in this process."""
    torch.set_num_threads(1)
    if device == "cuda":
        torch.cuda.set_device(rank)
    timeout = timedelta(seconds=seconds)
    dist.init_process_group(
        "nccl" if device == "cuda" else "gloo",
        store=dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timeout),
        rank=rank,
        world_size=size,
        timeout=timeout,
    )


def _run_checks(
    rank: int,
    size: int,
    port: int,
    connections: Sequence[Connection],
    device: str,
    limit: float,
    traces: Sequence[Path],
) -> None:
    """Answer each request with the time and text of a failure, "" for none, until there is none."""
    connection = connections[rank]

    def report(function: Callable[..., None], *arguments: Any) -> None:
        failure = ""
        try:
            function(*arguments)
        except BaseException:  # also pytest's outcomes and SystemExit
            failure = traceback.format_exc()
        faulthandler.cancel_dump_traceback_later()
        connection.send((time.monotonic(), failure))
        if failure:
            os._exit(1)  # closes its connections, for which other ranks may be waiting

    with open(traces[rank], "w") as trace:
        faulthandler.enable(trace)
        report(functools.partial(join, device=device), rank, size, port)
        if device != "cpu":
            torch.set_default_device(device)
        with contextlib.suppress(EOFError):  # the tests' program has ended
            for module, name, folder in iter(connection.recv, None):
                test = getattr(importlib.import_module(module), name)
                # A check that hangs ends its process, which writes its stack trace.
                faulthandler.dump_traceback_later(limit, exit=True, file=trace)
                torch.manual_seed(0)
                report(getattr(test, "check", test), World(rank, size, folder, device))
        faulthandler.dump_traceback_later(GRACE, exit=True, file=trace)
        leave()
        os._exit(0)  # no library's clean-up can hang
