"""Checks on two processes, forked from one that has imported a library, which takes seconds."""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import multiprocessing
import os
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from megabatch.training.world import leave
from tests.server import forked
from tests.similarity.distributed.processes import join, new_store, torchrun_environment

SIZE = 2
SECONDS = 120  # that all checks may take


def failures(
    checks: Sequence[Callable[[], None]], libraries: Sequence[str], folder: Path
) -> list[str]:
    """Failures of checks on two processes, which have the environment that torchrun sets.

    They run one after the other, up to the first that fails; `libraries` are imported beforehand.
    """
    store = new_store()
    names = [(check.__module__, check.__name__) for check in checks]
    process = forked(_import_and_fork, names, libraries, store.port, folder)
    process.join(2 * SECONDS)
    process.kill()
    found = [folder / f"rank-{rank}" for rank in range(SIZE)]
    said = [path.read_text() if path.exists() else "did not end" for path in found]
    return [f"rank {rank}: {failure}" for rank, failure in enumerate(said) if failure]


def _import_and_fork(
    names: list[tuple[str, str]], libraries: Sequence[str], port: int, folder: Path
) -> None:
    for name in (*libraries, *dict.fromkeys(module for module, _ in names)):
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    context: Any = multiprocessing.get_context("fork")
    started = [
        context.Process(target=_run, args=(rank, names, port, folder)) for rank in range(SIZE)
    ]
    for process in started:
        process.start()
    for process in started:
        process.join()


def _run(rank: int, names: list[tuple[str, str]], port: int, folder: Path) -> None:
    faulthandler.dump_traceback_later(SECONDS, exit=True)
    os.environ |= torchrun_environment(rank, SIZE, port)
    failure = ""
    try:
        join(rank, SIZE, port)
        for module, name in names:
            getattr(importlib.import_module(module), name)()
    except BaseException:  # also pytest's outcomes
        failure = traceback.format_exc()
    (folder / f"rank-{rank}").write_text(failure)
    if not failure:
        leave()
    os._exit(bool(failure))  # closes the connections that the other rank may wait for
