"""Trainings on two processes, in one pair of them: it imports the libraries once, for seconds."""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import multiprocessing
import os
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megabatch.training.world import leave
from tests.server import forked
from tests.similarity.distributed.processes import World, join, new_store, torchrun_environment

SIZE = 2
SECONDS = 240  # that all checks may take

#: Modules whose functions `on_two_...` run one after another; FSDP2 and Lightning at the end.
MODULES = [
    "test_lightly",
    "test_pytorch_metric_learning",
    "test_sentence_transformers_training",
    "test_transformers",
    "test_lightning",
]


@pytest.mark.concurrency
def test_on_two_processes(tmp_path: Path) -> None:
    store = new_store()
    process = forked(_import_and_fork, store.port, tmp_path)
    process.join(SECONDS + 60)
    process.kill()
    for rank in range(SIZE):
        found = tmp_path / f"rank-{rank}"
        assert found.exists(), f"rank {rank} did not end"
        assert not found.read_text(), f"rank {rank}: {found.read_text()}"


def _import_and_fork(port: int, folder: Path) -> None:
    checks: list[Callable[[World], None]] = []
    for name in MODULES:
        with contextlib.suppress(pytest.skip.Exception):  # without the library
            module = vars(importlib.import_module(f"{__package__}.{name}"))
            checks += [module[name] for name in module if name.startswith("on_two_")]
    context: Any = multiprocessing.get_context("fork")
    started = [
        context.Process(target=_run, args=(rank, checks, port, folder)) for rank in range(SIZE)
    ]
    for process in started:
        process.start()
    for process in started:
        process.join()


def _run(rank: int, checks: list[Callable[[World], None]], port: int, folder: Path) -> None:
    faulthandler.dump_traceback_later(SECONDS, exit=True)
    os.environ |= torchrun_environment(rank, SIZE, port)
    failure = ""
    try:
        join(rank, SIZE, port)
        for check in checks:
            check(World(rank, SIZE, folder))
    except BaseException:  # also pytest's outcomes
        failure = traceback.format_exc()
    (folder / f"rank-{rank}").write_text(failure)
    if not failure:
        leave()
    os._exit(bool(failure))  # closes the connections that the other rank may wait for
