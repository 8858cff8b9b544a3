"""metrics.jsonl and TensorBoard, fresh and continued."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from megabatch.training.log import MetricsLog, memory_bytes


def write(run: Path, resumed: int, steps: range, loss: float) -> None:
    log = MetricsLog(run, resumed)
    for step in steps:
        log.write({"step": step, "epoch": 0, "loss": loss})
    log.close()


def test_a_record_is_there_at_once(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path, 0)
    log.write({"step": 1, "loss": 2.5})
    assert json.loads((tmp_path / "metrics.jsonl").read_text()) == {"step": 1, "loss": 2.5}
    log.close()


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


def test_tensorboard_shows_the_continued_curve_alone(tmp_path: Path) -> None:
    write(tmp_path, 0, range(1, 6), 1.0)
    write(tmp_path, 3, range(4, 8), 2.0)
    board = EventAccumulator(str(tmp_path / "tensorboard"))
    board.Reload()
    assert board.Tags()["scalars"] == ["train/loss"]
    points = {(event.step, event.value) for event in board.Scalars("train/loss")}
    assert points == {*((s, 1.0) for s in (1, 2, 3)), *((s, 2.0) for s in (4, 5, 6, 7))}


def test_memory_counts_what_is_in_use() -> None:
    before = memory_bytes(torch.device("cpu"))
    held = torch.ones(50_000_000)  # 200 MB, written to
    assert memory_bytes(torch.device("cpu")) - before > 150e6
    del held
