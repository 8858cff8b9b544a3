"""Two processes and one run's folder."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from megabatch.errors import UsageError
from megabatch.training import TrainConfig, run_folder
from megabatch.training.run_folder import own_folder


def process_with_lock(config: TrainConfig) -> int:
    """Start a process that holds the lock until it is killed, beside a child of its own."""
    reading, writing = os.pipe()
    process = os.fork()
    if process == 0:
        with own_folder(config):
            os.fork()  # as a loader's worker, which outlives it for a while
            os.write(writing, b"x")
            time.sleep(10)
            os._exit(0)
    os.read(reading, 1)
    os.close(reading)
    os.close(writing)
    return process


def test_the_second_process_is_told_who_the_first_is(tmp_path: Path) -> None:
    config = TrainConfig(output=tmp_path / "run")
    process = process_with_lock(config)
    message = rf"run is being written by process {process} on .* since "
    with pytest.raises(UsageError, match=message), own_folder(config):
        raise AssertionError("two processes had the lock")
    os.kill(process, signal.SIGKILL)
    os.waitpid(process, 0)
    with own_folder(config):  # a killed one leaves none behind
        assert f"process {os.getpid()} on " in (config.output / "run.lock").read_text()


def test_it_can_be_taken_again(tmp_path: Path) -> None:
    for _ in range(2):
        with own_folder(TrainConfig(output=tmp_path)):
            pass


def test_a_file_system_without_locks_is_no_reason_to_stop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unsupported(*arguments: object) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(run_folder.fcntl, "lockf", unsupported)
    with own_folder(TrainConfig(output=tmp_path)):
        pass
