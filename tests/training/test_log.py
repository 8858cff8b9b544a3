"""A run reports to metrics.jsonl, to TensorBoard and in lines on the terminal."""

from __future__ import annotations

import io
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.summary.writer import event_file_writer

from megabatch.training import TrainConfig
from megabatch.training import log as log_module
from megabatch.training.log import Meter, Progress
from megabatch.training.trackers import Trackers
from tests.training.runs import logged


def write(run: Path, resumed: int, steps: range, loss: float) -> None:
    with Trackers() as trackers:
        trackers.start(TrainConfig(output=run), resumed, print)
        for step in steps:
            trackers.step({"step": step, "epoch": 0, "loss": loss})
            # It is there at once.
            assert logged(run)[-1] == {"step": step, "epoch": 0, "loss": loss}


def test_a_resumed_run_replaces_the_steps_that_it_repeats(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, 0, range(1, 6), 1.0)
    path = tmp_path / "metrics.jsonl"
    path.write_text(path.read_text() + '{"step": 6, "lo')  # a half-written line
    # TensorBoard reads files in the order of their names, the time in seconds and then a counter:
    # within a second "10" comes before "9". A run that continues begins seconds later.
    later = SimpleNamespace(time=lambda: time.time() + 1)
    monkeypatch.setattr(event_file_writer, "time", later)
    write(tmp_path, 3, range(4, 8), 2.0)
    expected = [(step, 1.0 if step <= 3 else 2.0) for step in range(1, 8)]
    assert [(record["step"], record["loss"]) for record in logged(tmp_path)] == expected
    assert not list(tmp_path.glob("*.partial"))
    board = EventAccumulator(str(tmp_path / "tensorboard"))
    board.Reload()
    assert board.Tags()["scalars"] == ["train/loss"]
    assert {(e.step, e.value) for e in board.Scalars("train/loss")} == {*expected}


def test_the_share_of_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(log_module.time, "perf_counter", lambda: now[0])
    meter = Meter(seconds=10.0, waited=5.0)
    for wait, work in ((1, 2), (0, 3), (2, 2)):
        now[0] += wait
        meter.mark(waited=True)
        now[0] += work
        meter.mark()
    assert meter.lap(30) == {"pairs_per_second": 3.0, "data_wait": 0.3}
    assert (meter.seconds, meter.waited) == (20.0, 8.0)
    now[0] += 4
    meter.mark()
    assert meter.lap(2) == {"pairs_per_second": 0.5, "data_wait": 0.0}


def test_a_line_every_ten_seconds_and_one_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    now, file = [1000.0], io.StringIO()
    monkeypatch.setattr(log_module.time, "monotonic", lambda: now[0])
    shown = Progress(Console(file=file, width=100), total_steps=105, done=5)
    record = {"loss": 2.5, "pairs_per_second": 1234.4, "memory_bytes": 3 * 2**30}
    for step in range(6, 106):
        now[0] += 1
        shown.update(step, record)
    lines = file.getvalue().splitlines()
    assert len(lines) == 10
    assert lines[0] == "step 15/105  loss 2.500  1,234 pairs/s  3.0 GiB  0:01:30 left"
    assert lines[-1].startswith("step 105/105")
    shown.update(105, {"pairs_per_second": 1.0, "memory_bytes": 0})
    assert "loss not finite" in file.getvalue()
