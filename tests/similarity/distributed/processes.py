"""Checks that several Gloo processes run together, as pytest tests.

    @on_processes(2, 3)
    def test_something(world):  # runs on each process of a group of two, then of three
        assert ...

One start of the processes runs the checks of all files for that number of processes. A check that
fails on one process ends them all: what comes after it fails too, and says so.
"""

from __future__ import annotations

import functools
import importlib
import json
import multiprocessing
import os
import socket
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megabatch.training.world import leave

Check = Callable[["World"], None]

#: by number of processes, the checks of all files that were imported
REGISTERED: dict[int, list[Check]] = {}


@dataclass(frozen=True)
class World:
    """What a check knows of its process."""

    rank: int
    size: int
    folder: Path

    def shard(self, tensor: torch.Tensor, sizes: list[int]) -> torch.Tensor:
        """This process's rows of what all processes hold together."""
        return tensor.split(sizes)[self.rank]


def on_processes(*sizes: int) -> Callable[[Check], Callable[..., None]]:
    """Make a check a test that runs on groups of these sizes."""

    def decorate(check: Check) -> Callable[..., None]:
        for size in sizes:
            REGISTERED.setdefault(size, []).append(check)

        @pytest.mark.parametrize("processes", sizes)
        def test(processes: int, outcomes: Callable[[int], list[dict[str, str]]]) -> None:
            for rank, outcome in enumerate(outcomes(processes)):
                failure = outcome.get(_name(check), "not run: a check before it failed")
                assert not failure, f"rank {rank}: {failure}"

        test.__name__ = test.__qualname__ = check.__name__
        test.__module__ = check.__module__
        test.check = check  # type: ignore[attr-defined]
        return test

    return decorate


def shard_sizes(n: int) -> Iterator[list[int]]:
    """Equal, unequal and empty shards."""
    yield [3] * n
    yield [2 + 3 * (i % 2) + i for i in range(n)]
    yield [5, 0, 4, 1][:n]


def run(size: int, checks: list[Check], folder: Path) -> list[dict[str, str]]:
    """What came of each check on each process: "" or a traceback."""
    names = [(check.__module__, check.__name__) for check in checks]
    processes = start(size, _run_checks, names, folder)
    for process in processes:
        process.join(200)
        if process.is_alive():
            process.kill()
    found = [folder / f"{rank}.json" for rank in range(size)]
    return [json.loads(path.read_text()) if path.exists() else {} for path in found]


def start(size: int, target: Callable[..., None], *arguments: Any) -> list[Any]:
    """Start `target(rank, size, port, *arguments)` on `size` processes."""
    # From a server that has imported torch once, but used no thread of it.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch.distributed.fsdp", "torch._dynamo", "megabatch"])
    port = free_port()
    processes = [
        context.Process(target=target, args=(rank, size, port, *arguments)) for rank in range(size)
    ]
    for process in processes:
        process.start()
    return processes


def join(rank: int, size: int, port: int, seconds: float = 60) -> None:
    """Make this process one of the group."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://127.0.0.1:{port}",
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=seconds),
    )


def _run_checks(
    rank: int, size: int, port: int, names: list[tuple[str, str]], folder: Path
) -> None:
    join(rank, size, port)
    outcome = {}
    for module, name in names:
        check = getattr(importlib.import_module(module), name).check
        try:
            torch.manual_seed(0)
            check(World(rank, size, folder))
            outcome[_name(check)] = ""
        except Exception:
            outcome[_name(check)] = traceback.format_exc()
        (folder / f"{rank}.json").write_text(json.dumps(outcome))
        if outcome[_name(check)]:
            os._exit(1)
    leave()


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def _name(check: Check) -> str:
    return f"{check.__module__}.{check.__name__}"


@functools.cache
def _outcomes(size: int, folder: Path) -> list[dict[str, str]]:
    return run(size, REGISTERED[size], folder)


@pytest.fixture(scope="session")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], list[dict[str, str]]]:
    """Runs the checks for that many processes, once."""
    folder = tmp_path_factory.mktemp("processes")

    def get(size: int) -> list[dict[str, str]]:
        (folder / str(size)).mkdir(exist_ok=True)
        return _outcomes(size, folder / str(size))

    return get
