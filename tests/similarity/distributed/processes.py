"""Checks that several processes run together, as pytest tests.

    @on_processes(2, 3)
    def test_something(world):  # runs on each process of a group of two, then of three
        assert ...

They meet by Gloo, on the CPU. Those `on_devices` run there as well, and with `-m gpu` once more on
as many GPUs by NCCL, where new tensors are made on the GPU by default.

One start of the processes runs the checks of all files for that number of processes. A check that
fails on one process ends them all: what comes after it fails too, and says so.
"""

from __future__ import annotations

import functools
import importlib
import json
import multiprocessing
import os
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeAlias
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from filelock import FileLock

from megabatch.benchmarking.ranks import free_port
from megabatch.training.world import leave

Check = Callable[["World"], None]
#: of a number of processes and a kind of device: by rank, each check's failure or ""
Outcomes: TypeAlias = Callable[[int, str], list[dict[str, str]]]

#: by number of processes and kind of device, the checks of all files that were imported
REGISTERED: dict[tuple[int, str], list[Check]] = {}


@dataclass(frozen=True)
class World:
    """What a check knows of its process."""

    rank: int
    size: int
    folder: Path
    device: str = "cpu"

    def shard(self, tensor: torch.Tensor, sizes: list[int]) -> torch.Tensor:
        """This process's rows of what all processes hold together."""
        return tensor.split(sizes)[self.rank]


def on_processes(*sizes: int) -> Callable[[Check], Callable[..., None]]:
    """Make a check a test that runs on groups of these sizes."""
    return functools.partial(_as_test, [(size, "cpu") for size in sizes])


def on_gpus(*sizes: int) -> Callable[[Check], Callable[..., None]]:
    """Make a check a test that runs on so many GPUs."""
    return functools.partial(_as_test, [(size, "cuda") for size in sizes])


def on_devices(*sizes: int) -> Callable[[Check], Callable[..., None]]:
    """As `on_processes`, and on as many GPUs where these are several."""
    worlds = [(size, "cpu") for size in sizes] + [(size, "cuda") for size in sizes if size > 1]
    return functools.partial(_as_test, worlds)


def _as_test(worlds: list[tuple[int, str]], check: Check) -> Callable[..., None]:
    for world in worlds:
        REGISTERED.setdefault(world, []).append(check)

    @pytest.mark.parametrize(("processes", "device"), list(map(_parameters, worlds)))
    def test(processes: int, device: str, outcomes: Outcomes) -> None:
        if device == "cuda" and torch.cuda.device_count() < processes:
            pytest.skip(f"needs {processes} CUDA devices")
        for rank, outcome in enumerate(outcomes(processes, device)):
            failure = outcome.get(_name(check), "not run: a check before it failed")
            assert not failure, f"rank {rank}: {failure}"

    test.__name__ = test.__qualname__ = check.__name__
    test.__module__ = check.__module__
    test.check = check  # type: ignore[attr-defined]
    return test


def _parameters(world: tuple[int, str]) -> Any:
    size, device = world
    name = str(size) if device == "cpu" else f"{size} GPUs"
    return pytest.param(size, device, id=name, marks=[pytest.mark.gpu] * (device == "cuda"))


def shard_sizes(n: int) -> Iterator[list[int]]:
    """Equal, unequal and empty shards."""
    yield [3] * n
    yield [2 + 3 * (i % 2) + i for i in range(n)]
    yield [5, 0, 4, 1][:n]


def run(size: int, checks: list[Check], folder: Path, device: str = "cpu") -> list[dict[str, str]]:
    """What came of each check on each process: "" or a traceback."""
    names = [(check.__module__, check.__name__) for check in checks]
    processes = start(size, _run_checks, names, folder, device, device=device)
    for process in processes:
        process.join(200 if device == "cpu" else 600)  # GPUs' kernels are compiled first
        if process.is_alive():
            process.kill()
    found = [folder / f"{rank}.json" for rank in range(size)]
    return [json.loads(path.read_text()) if path.exists() else {} for path in found]


def start(
    size: int, target: Callable[..., None], *arguments: Any, device: str = "cpu"
) -> list[Any]:
    """Start `target(rank, size, port, *arguments)` on `size` processes."""
    context: Any = multiprocessing.get_context("spawn")
    environment = {}
    if device == "cpu":
        # From a server that has imported torch once, but used no thread of it; and with Triton's
        # interpreter, also where there are GPUs.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch.distributed.fsdp", "torch._dynamo", "megabatch"])
        environment["TRITON_INTERPRET"] = "1"
    port = free_port()
    processes = [
        context.Process(target=target, args=(rank, size, port, *arguments)) for rank in range(size)
    ]
    with mock.patch.dict(os.environ, environment):
        for process in processes:
            process.start()
    return processes


def join(rank: int, size: int, port: int, seconds: float = 60, device: str = "cpu") -> None:
    """Make this process one of the group."""
    torch.set_num_threads(1)
    if device == "cuda":
        torch.cuda.set_device(rank)
    dist.init_process_group(
        "nccl" if device == "cuda" else "gloo",
        init_method=f"tcp://127.0.0.1:{port}",
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=seconds),
    )


def _run_checks(
    rank: int, size: int, port: int, names: list[tuple[str, str]], folder: Path, device: str
) -> None:
    join(rank, size, port, device=device)
    if device != "cpu":
        torch.set_default_device(device)
    outcome = {}
    for module, name in names:
        check = getattr(importlib.import_module(module), name).check
        try:
            torch.manual_seed(0)
            check(World(rank, size, folder, device))
            outcome[_name(check)] = ""
        except (Exception, pytest.fail.Exception):
            outcome[_name(check)] = traceback.format_exc()
        (folder / f"{rank}.json").write_text(json.dumps(outcome))
        if outcome[_name(check)]:
            os._exit(1)
    leave()


def _name(check: Check) -> str:
    return f"{check.__module__}.{check.__name__}"


@pytest.fixture(scope="session")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    """Runs the checks for that many processes: once, for all of xdist's workers and all modules."""
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent

    def get(size: int, device: str) -> list[dict[str, str]]:
        mine = folder / f"processes-{size}-{device}"
        found = mine / "outcomes.json"
        with FileLock(f"{mine}.lock"):
            if not found.exists():
                mine.mkdir(exist_ok=True)
                found.write_text(json.dumps(run(size, REGISTERED[size, device], mine, device)))
        outcomes: list[dict[str, str]] = json.loads(found.read_text())
        return outcomes

    return get
