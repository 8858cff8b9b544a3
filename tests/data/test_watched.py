"""Processes that die or hang while a loader waits for them."""

from __future__ import annotations

import os
import signal
import time

import pytest

from megabatch.data import watched
from megabatch.data.watched import WatchedLoader


class Slow:
    """Number i comes after `seconds[i]`."""

    def __init__(self, *seconds: float) -> None:
        self.seconds = seconds

    def __len__(self) -> int:
        return len(self.seconds)

    def __getitem__(self, index: int) -> int:
        time.sleep(self.seconds[index])
        return index


def loader(*seconds: float, timeout: float, workers: int = 1) -> WatchedLoader[int]:
    return WatchedLoader(
        Slow(*seconds),
        batch_size=None,
        num_workers=workers,
        timeout=timeout,
        persistent_workers=workers > 0,
    )


@pytest.fixture(autouse=True)
def _looking_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watched, "LOOK", 0.2)


def test_a_process_that_died_while_nothing_came_is_noticed() -> None:
    numbers = loader(100, 100, timeout=600)
    coming = iter(numbers)
    for process in numbers._iterator._workers:  # type: ignore[union-attr]
        os.kill(process.pid, signal.SIGKILL)
        process.join()  # which takes the exit status that DataLoader would ask for
    start = time.monotonic()
    with pytest.raises(RuntimeError, match="exited unexpectedly"):
        next(coming)
    assert time.monotonic() - start < 30


def test_what_takes_longer_than_a_look_comes() -> None:
    numbers = loader(0.9, 0, 0.7, timeout=600)
    assert [list(numbers) for _ in range(2)] == [[0, 1, 2]] * 2


def test_patience_ends() -> None:
    start = time.monotonic()
    with pytest.raises(RuntimeError, match="timed out"):
        list(loader(0, 100, timeout=0.9))
    assert time.monotonic() - start >= 0.9


def test_without_processes_and_without_an_end_to_patience() -> None:
    assert list(loader(0, 0, timeout=0, workers=0)) == [0, 1]
    assert list(loader(0, 0.5, timeout=0)) == [0, 1]
