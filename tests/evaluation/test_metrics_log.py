from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from megabatch.evaluation.metrics_log import read_metrics, series


def write(path: Path, *lines: object) -> Path:
    path.write_text("".join(x if isinstance(x, str) else json.dumps(x) + "\n" for x in lines))
    return path


def test_a_resumed_run_keeps_the_later_record_of_a_step(tmp_path: Path) -> None:
    path = write(
        tmp_path / "metrics.jsonl",
        {"step": 1, "loss": 9.0},
        {"step": 2, "loss": 8.0},
        {"step": 3, "loss": 7.0},
        {"step": 2, "loss": 8.5},
        {"step": 3, "loss": 7.5},
    )
    got = series(read_metrics(path), "loss")
    assert got is not None
    assert got.steps.tolist() == [1, 2, 3]
    assert got.values.tolist() == [9.0, 8.5, 7.5]


def test_what_is_no_record_is_left_out(tmp_path: Path) -> None:
    path = write(
        tmp_path / "m.jsonl", {"step": 1}, "[3]\n", "\n", '{"step": "x"}\n', '{"step": 2, "l'
    )
    assert read_metrics(path) == [{"step": 1}]


def test_a_missing_file_has_no_records(tmp_path: Path) -> None:
    assert read_metrics(tmp_path / "metrics.jsonl") == []


def test_values_that_are_no_finite_number_leave_a_gap(tmp_path: Path) -> None:
    path = write(
        tmp_path / "m.jsonl",
        {"step": 1, "loss": float("nan")},
        {"step": 2, "loss": None},
        {"step": 3, "loss": 5},
    )
    got = series(read_metrics(path), "loss")
    assert got is not None
    assert got.steps.tolist() == [3]
    assert series(read_metrics(path), "lr") is None


def test_a_long_curve_is_averaged_within_its_bounds() -> None:
    records = [{"step": i, "loss": float(i % 7)} for i in range(1, 50_001)]
    got = series(records, "loss")
    assert got is not None
    assert got.low is not None
    assert got.high is not None
    assert len(got.steps) == len(got.values) == 600
    assert np.all(np.diff(got.steps) > 0)
    assert got.low.min() == 0
    assert got.high.max() == 6
    assert np.all((got.low <= got.values) & (got.values <= got.high))
