"""What a run reports: metrics.jsonl, TensorBoard, the progress bar."""

from __future__ import annotations

import io
import json
import mmap
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.summary.writer import event_file_writer

from megabatch.training import TrainConfig
from megabatch.training import log as log_module
from megabatch.training.log import (
    Meter,
    Progress,
    duration,
    memory_bytes,
)
from megabatch.training.trackers import Trackers


def write(run: Path, resumed: int, steps: range, loss: float) -> None:
    with Trackers() as trackers:
        trackers.start(TrainConfig(output=run), resumed, print)
        for step in steps:
            trackers.step({"step": step, "epoch": 0, "loss": loss})
            last = (run / "metrics.jsonl").read_text().splitlines()[-1]  # it is there at once
            assert json.loads(last) == {"step": step, "epoch": 0, "loss": loss}


def test_steps_done_again_are_cut_off_and_so_is_a_half_written_line(tmp_path: Path) -> None:
    write(tmp_path, 0, range(1, 6), 1.0)
    path = tmp_path / "metrics.jsonl"
    path.write_text(path.read_text() + '{"step": 6, "lo')
    write(tmp_path, 3, range(4, 8), 2.0)
    records = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(r["step"], r["loss"]) for r in records] == [
        *((step, 1.0) for step in (1, 2, 3)),
        *((step, 2.0) for step in (4, 5, 6, 7)),
    ]
    assert not list(tmp_path.glob("*.partial"))


def test_tensorboard_shows_the_continued_curve_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, 0, range(1, 6), 1.0)
    # TensorBoard reads files in the order of their names, the time in seconds and then a counter:
    # within a second "10" comes before "9". A run that continues begins seconds later.
    later = SimpleNamespace(time=lambda: time.time() + 1)
    monkeypatch.setattr(event_file_writer, "time", later)
    write(tmp_path, 3, range(4, 8), 2.0)
    board = EventAccumulator(str(tmp_path / "tensorboard"))
    board.Reload()
    assert board.Tags()["scalars"] == ["train/loss"]
    points = {(event.step, event.value) for event in board.Scalars("train/loss")}
    assert points == {*((s, 1.0) for s in (1, 2, 3)), *((s, 2.0) for s in (4, 5, 6, 7))}


def test_the_share_of_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(log_module.time, "perf_counter", lambda: now[0])
    meter = Meter(seconds=10.0, waited=5.0)
    for wait, work in ((1, 2), (0, 3), (2, 2)):
        now[0] += wait
        meter.data_came()
        now[0] += work
        meter.mark()
    assert meter.lap(30) == {"pairs_per_second": 3.0, "data_wait": 0.3}
    assert (meter.seconds, meter.waited) == (20.0, 8.0)
    now[0] += 4
    meter.mark()
    assert meter.lap(2) == {"pairs_per_second": 0.5, "data_wait": 0.0}


def test_memory_counts_what_is_in_use() -> None:
    before = memory_bytes(torch.device("cpu"))
    with mmap.mmap(-1, 200 << 20) as held:  # a tensor might take what the process freed before
        for page in range(0, len(held), mmap.PAGESIZE):
            held[page] = 1
        assert memory_bytes(torch.device("cpu")) - before > 150e6


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [1000.0]
    monkeypatch.setattr(log_module.time, "monotonic", lambda: now[0])
    return now


def record(loss: float, speed: float, gib: int) -> dict[str, float]:
    return {"loss": loss, "pairs_per_second": speed, "memory_bytes": gib * 2**30}


def test_a_line_every_ten_seconds_and_one_at_the_end(clock: list[float]) -> None:
    file = io.StringIO()
    shown = Progress(Console(file=file, width=100), total_steps=105, done=5)
    for step in range(6, 106):
        clock[0] += 1
        shown.update(step, record(2.5, 1234.4, 3))
    lines = file.getvalue().splitlines()
    assert len(lines) == 10
    assert lines[0] == "step 15/105  loss 2.500  1,234 pairs/s  3.0 GiB  1m 30s left"
    assert lines[-1].startswith("step 105/105")
    shown.update(105, {"pairs_per_second": 1.0, "memory_bytes": 0})
    assert "loss not finite" in file.getvalue()


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(0, "0s"), (59.4, "59s"), (59.6, "1m 00s"), (125, "2m 05s"), (11_220, "3h 07m")],
)
def test_durations_in_words(seconds: float, words: str) -> None:
    assert duration(seconds) == words
