"""Worker processes that die or hang while a loader waits."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest

from megabatch.data import workers
from megabatch.data.workers import WorkerLoader


def slow(seconds: float) -> float:
    time.sleep(seconds)
    return seconds


def loader(timeout: float) -> WorkerLoader[float, float]:
    """Numbers come after as many seconds."""
    return WorkerLoader(slow, workers=1, prefetch=2, timeout=timeout)


@pytest.fixture(autouse=True)
def _checking_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "CHECK_INTERVAL", 0.2)


def test_a_process_that_died_while_nothing_came_is_noticed() -> None:
    numbers = loader(timeout=600)
    coming = numbers.run([100, 100])
    for process in numbers.loader._iterator._workers:  # type: ignore[union-attr]
        os.kill(process.pid, signal.SIGKILL)
        process.join()  # which takes the exit status that DataLoader would ask for
    start = time.monotonic()
    with pytest.raises(RuntimeError, match="exited unexpectedly"):
        next(coming)
    assert time.monotonic() - start < 30


def test_what_takes_longer_than_a_look_comes() -> None:
    for timeout in (0, 600):
        numbers = loader(timeout)
        for items in ([0.5, 0, 0.4], [0.1, 0]):
            assert list(numbers.run(items)) == items


@pytest.mark.usefixtures("short_wait")
def test_a_hanging_process_does_not_keep_whoever_stops() -> None:
    stop = threading.Event()
    coming = loader(timeout=600).run([0, 100], stop)
    assert next(coming) == 0
    threading.Timer(0.1, stop.set).start()
    start = time.monotonic()
    assert list(coming) == []
    assert time.monotonic() - start < 60
