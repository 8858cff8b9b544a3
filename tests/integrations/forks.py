"""Processes that fork from one which has imported the libraries: importing them takes seconds."""

from __future__ import annotations

import contextlib
import importlib
import multiprocessing
import os
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.server import forked

Call = tuple[Callable[..., None], tuple[Any, ...]]


def run_in_forks(modules: Sequence[str], calls: Sequence[Call], folder: Path, limit: float) -> None:
    """Make each call in a process of its own; assert that all return within so many seconds."""
    process = forked(_import_and_fork, modules, calls, folder)
    process.join(limit)
    process.kill()
    for number, (function, _) in enumerate(calls):
        ended = folder / f"ended-{number}"
        assert ended.exists(), f"{function.__name__}, process {number}: did not end"
        assert not ended.read_text(), f"{function.__name__}, process {number}: {ended.read_text()}"


def _import_and_fork(modules: Sequence[str], calls: Sequence[Call], folder: Path) -> None:
    for name in modules:
        with contextlib.suppress(pytest.skip.Exception):  # without the library
            importlib.import_module(name)
    fork: Any = multiprocessing.get_context("fork").Process
    started = [fork(target=_call, args=(folder / f"ended-{i}", *c)) for i, c in enumerate(calls)]
    for process in started:
        process.start()
    for process in started:
        process.join()


def _call(ended: Path, function: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    failure = ""
    try:
        function(*arguments)
    except BaseException:  # also pytest's outcomes
        failure = traceback.format_exc()
    ended.write_text(failure)
    os._exit(bool(failure))  # closes the connections that another process may wait for
