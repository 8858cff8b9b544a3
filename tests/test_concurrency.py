"""The marker of tests that could fail by chance, which tools/repeat_tests.py runs many times."""

from __future__ import annotations

import subprocess
import threading
import time
from collections.abc import Callable
from time import monotonic
from typing import Any

import pytest

from tests import programs
from tests.concurrency import uses_concurrency
from tests.training.test_run_signals import killable


class Waits:
    def wait(self) -> None:
        time.sleep(0)


def calls_a_class() -> Waits:
    return Waits()


def imports() -> None:
    import gc

    gc.collect()


def starts_in_a_function_inside() -> Callable[[], Any]:
    return lambda: threading.Thread(target=imports)


def has_workers(loader: Callable[..., None]) -> None:
    loader(batch_size=4, workers=2)


def takes_the_time() -> float:
    return monotonic()


def runs_programs() -> None:
    subprocess.run(["true"], check=True)
    programs.run(["-c", "pass"])


def starts_a_program() -> programs.Program:
    return programs.Program(["-c", "pass"])


def calls_itself() -> None:
    calls_itself()


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (calls_a_class, True),
        (imports, True),
        (starts_in_a_function_inside, True),
        (has_workers, True),
        (takes_the_time, True),
        (starts_a_program, True),
        (killable, False),
        (runs_programs, False),
        (calls_itself, False),
    ],
)
def test_functions_are_known_by_what_they_use(function: Callable[..., Any], expected: bool) -> None:
    assert uses_concurrency(function) is expected


@pytest.fixture
def clock() -> float:
    return time.monotonic()


def test_a_fixture_counts(clock: float, request: pytest.FixtureRequest) -> None:
    assert clock > 0
    assert request.node.get_closest_marker("concurrency") is not None


def test_others_carry_no_marker(request: pytest.FixtureRequest) -> None:
    assert request.node.get_closest_marker("concurrency") is None
