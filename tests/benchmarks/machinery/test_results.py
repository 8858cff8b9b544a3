from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from machinery import results
from machinery.inputs import Case
from machinery.results import Result
from megabatch.benchmarking import records

CASE = Case("clip", "megabatch", "cpu", "float32", b=1000, d=100, scale=14.3)


def test_median_time_mean_rate_largest_of_the_rest() -> None:
    record = results.combine(
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


def test_work_of_a_rectangle_and_of_the_forward_pass_alone() -> None:
    result = Result("ok", "", (10.0,), (1e12, 1e12), 100, 0.1, 0.1, 0.1)
    rectangle = results.combine(replace(CASE, n=500), [result], work=8)
    assert rectangle.fraction == pytest.approx(8 * 1000 * 500 * 100 / 0.01 / 1e12)
    forward = results.combine(replace(CASE, backward=False), [result], work=8)
    assert forward.fraction == pytest.approx(2 * 1000**2 * 100 / 0.01 / 1e12)


def test_many_repetitions_are_recorded_as_quantiles() -> None:
    times = tuple(float(t) for t in range(1000, 0, -1))
    record = results.combine(CASE, [Result("ok", "", times, (1e12, 1e12), 100, 0.1)], work=8)
    assert (record.repetitions, record.ms) == (1000, 500.5)
    assert (record.times_ms[0], record.times_ms[-1], len(record.times_ms)) == (1, 1000, 21)


def test_out_of_memory_in_a_later_round_leaves_no_figures() -> None:
    ok = Result("ok", "", (10.0,), (1e12, 1e12), 100, 0.1, 0.1, 0.1)
    record = results.combine(CASE, [ok, Result("out of memory", "why")], work=8)
    assert (record.status, record.note) == ("out of memory", "why")
    assert record.ms is record.fraction is record.extra_bytes is None


def test_a_wrong_result_keeps_its_figures() -> None:
    record = results.combine(
        CASE, [Result("wrong", "off", (10.0,), (1e12, 1e12), 100, 0.9, 0.1, 0.1)], work=8
    )
    assert (record.status, record.ms, record.max_row_error) == ("wrong", 10.0, 0.9)


def test_file_says_what_is_needed_to_repeat(tmp_path: Path) -> None:
    record = results.combine(CASE, [Result("out of memory", "why")], work=8)
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
