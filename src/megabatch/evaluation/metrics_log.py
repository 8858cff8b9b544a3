"""Reading a run's `metrics.jsonl`: resumed, cut short or very long."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

_MOST_POINTS = 600  # about two for each pixel of a curve's width


@dataclass(frozen=True)
class Series:
    """A curve over steps; `low` and `high` bound what was averaged where points were joined."""

    steps: np.ndarray
    values: np.ndarray
    low: np.ndarray | None = None
    high: np.ndarray | None = None


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The logged steps in order, one record each; a missing file has none.

    A run that was killed and resumed logs some steps twice: the later record is the one that led to
    the weights. Lines that are no record (the last one of a killed run may be half written) are
    left out.
    """
    if not path.is_file():
        return []
    by_step: dict[int, dict[str, Any]] = {}
    with path.open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            try:
                record = json.loads(line)
            except json.JSONDecodeError:
                continue
            if isinstance(record, dict) and isinstance(record.get("step"), int):
                by_step[record["step"]] = record
    return [by_step[step] for step in sorted(by_step)]


def series(records: list[dict[str, Any]], key: str) -> Series | None:
    """The curve of one quantity; None if fewer than one finite value was logged."""
    points = [(r["step"], r[key]) for r in records if isinstance(r.get(key), int | float)]
    points = [(step, value) for step, value in points if np.isfinite(value)]
    if not points:
        return None
    steps, values = (np.array(column, dtype=np.float64) for column in zip(*points, strict=True))
    if len(steps) <= _MOST_POINTS:
        return Series(steps, values)
    parts = np.array_split(values, _MOST_POINTS)
    return Series(
        steps=np.array([p.mean() for p in np.array_split(steps, _MOST_POINTS)]),
        values=np.array([p.mean() for p in parts]),
        low=np.array([p.min() for p in parts]),
        high=np.array([p.max() for p in parts]),
    )
