from __future__ import annotations

import json
from pathlib import Path

import pytest

from megabatch.benchmarking import records
from megabatch.benchmarking.inputs import Case
from megabatch.benchmarking.measure import Result

CASE = Case("clip", "megabatch", "cpu", "float32", b=1000, d=100, scale=14.3)


def test_median_time_mean_rate_largest_of_the_rest() -> None:
    record = records.combine(
        CASE,
        [
            Result("ok", "", (10.0, 12.0), (1e12, 2e12), 100, 0.1, 0.3, 0.2),
            Result("ok", "", (90.0, 14.0), (3e12, 2e12), 90, 0.2, 0.2, 0.1),
        ],
        work=8,
    )
    assert record.ms == 13
    assert record.product_tflops == 2
    # 8 * 1000² * 100 operations in 13 ms at 2e12 a second
    assert record.fraction == pytest.approx(8e8 / 0.013 / 2e12)
    assert (record.extra_bytes, record.max_row_error) == (100, 0.2)
    assert (record.loss_error, record.scale_gradient_error) == (0.3, 0.2)
    assert record.n_devices == 1


def test_out_of_memory_in_a_later_round_leaves_no_figures() -> None:
    ok = Result("ok", "", (10.0,), (1e12, 1e12), 100, 0.1, 0.1, 0.1)
    record = records.combine(CASE, [ok, Result("out of memory", "why")], work=8)
    assert (record.status, record.note) == ("out of memory", "why")
    assert record.ms is record.fraction is record.extra_bytes is None


def test_a_wrong_result_keeps_its_figures() -> None:
    record = records.combine(
        CASE, [Result("wrong", "off", (10.0,), (1e12, 1e12), 100, 0.9, 0.1, 0.1)], work=8
    )
    assert (record.status, record.ms, record.max_row_error) == ("wrong", 10.0, 0.9)


def test_file_says_what_is_needed_to_repeat(tmp_path: Path) -> None:
    record = records.combine(CASE, [Result("out of memory", "why")], work=8)
    records.write(tmp_path / "r.json", "megabatch bench loss", [record])
    assert [p.name for p in tmp_path.iterdir()] == ["r.json"]
    content = json.loads((tmp_path / "r.json").read_text())
    assert content["command"] == "megabatch bench loss"
    assert content["date"].endswith("+00:00")
    assert content["machine"]["memory_bytes"] > 1 << 28
    assert {"cpu", "cores", "threads", "gpus", "system"} <= set(content["machine"])
    assert {"python", "torch", "megabatch"} <= set(content["versions"])
    wanted = "contender device n_devices dtype b d ms fraction extra_bytes max_row_error"
    assert set(wanted.split()) <= set(content["records"][0])
