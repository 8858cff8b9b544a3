"""The marker of tests that could fail by chance, which tools/repeat_tests.py runs many times."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.concurrency import is_concurrent

HERE = Path(__file__).parent


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("import time\n", True),
        ("def test():\n    import threading\n", True),
        ("from multiprocessing.connection import wait\n", True),
        ("from tests.training.runs import start\n", True),  # which starts a process
        ("from tests.training.test_run_parallel import launch\n", True),
        ("loader = PairLoader(pairs, workers=2)\n", True),
        ("assert extra_bytes(call) < 10\n", True),
        ("import timeit_of_its_own\n# at that time\n", False),
        ("from tests.models import tiny\n", False),
        ("import torch\n", False),
    ],
)
def test_files_are_known_by_what_they_use(tmp_path: Path, text: str, expected: bool) -> None:
    file = tmp_path / "test_file.py"
    file.write_text(text)
    assert is_concurrent(file) is expected


@pytest.mark.parametrize(
    "name",
    [
        "training/test_run_signals.py",
        "similarity/distributed/test_gathered.py",
        "similarity/distributed/test_comm.py",
        "data/test_workers.py",
        "planning/test_plan.py",
        "test_ahead.py",
    ],
)
def test_files_of_such_tests(name: str) -> None:
    assert is_concurrent(HERE / name)


def test_most_files_are_of_others() -> None:
    files = list(HERE.rglob("test_*.py"))
    assert len(files) / 4 < sum(map(is_concurrent, files)) < len(files) * 0.75


def test_tests_carry_the_marker(request: pytest.FixtureRequest) -> None:
    for item in request.session.items:
        if is_concurrent(item.path):
            assert item.get_closest_marker("concurrency") is not None, item.nodeid
