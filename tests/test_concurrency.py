"""The marker of tests that could fail by chance, which tools/repeat_tests.py runs many times."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.concurrency import uses_concurrency


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("import time\n", True),
        ("from time import monotonic\n", True),
        ("def f():\n    import gc\n", True),
        ("loader(batch_size=4, workers=2)\n", True),
        ("Program(['-c', 'pass'])\n", True),
        ("from tests.training.runs import started\n", True),  # which starts programs
        ("from tests.similarity.distributed.processes import on_processes\n", False),
        ("import timeit\nx = 'time'\n", False),
    ],
)
def test_files_are_known_by_what_they_use(
    source: str, expected: bool, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    path = tmp_path / "test_something.py"
    path.write_text(source)
    assert uses_concurrency(path) is expected
    assert request.node.get_closest_marker("concurrency") is not None  # by the words above
