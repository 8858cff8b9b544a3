"""benchmarks/million.py on a few icons, on the CPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.benchmarks.study_files import write_icons
from tests.benchmarks.test_icons import load
from tests.models.tiny import TINY

SMALL = f"--model={TINY}", "--batch-size=40", "--micro-batch-size=8", "--lr=1e-3", "--device=cpu"


def run(folder: Path) -> dict[str, Any]:
    output = folder / "million.json"
    load("million").main([*SMALL, f"--icons={folder / 'icons'}", f"--output={output}"])
    content: dict[str, Any] = json.loads(output.read_text())
    return content


def test_steps_are_whole_and_the_loss_falls(tmp_path: Path) -> None:
    write_icons(tmp_path / "icons", 24, 4)
    content = run(tmp_path)
    records, data = content["records"], content["data"]
    assert data["pairs"] == 24
    assert data["captions_on_a_rank"] == 12  # of 40 pairs
    assert [record["step"] for record in records] == [1, 2, 3]
    losses = [record["loss_before"] for record in records]
    assert max(losses[1:]) < losses[0]
    for record in records:
        assert (record["b"], record["micro_batch_size"], record["n_devices"]) == (40, 8, 1)
        assert record["lr"] == 1e-3
        assert sum(record["parts"].values()) == pytest.approx(record["seconds"], rel=0.2)
        assert {"images, first pass", "texts, second pass", "loss"} <= record["parts"].keys()
