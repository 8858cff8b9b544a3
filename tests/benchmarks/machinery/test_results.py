from __future__ import annotations

from dataclasses import replace

import pytest

from machinery import results
from machinery.inputs import Case
from machinery.results import Result

CASE = Case("clip", "megabatch", "cpu", "float32", b=1000, d=100, scale=14.3)


def test_median_time_and_mean_rate() -> None:
    result = Result("ok", "", (10.0, 12.0, 90.0, 14.0), (1e12, 3e12), 100, 0.2, 0.3, 0.1)
    record = results.record(CASE, result, work=8)
    assert (record.ms, record.product_tflops, record.n_devices) == (13, 2, 1)
    # 8 * 1000² * 100 operations in 13 ms at 2e12 a second
    assert record.fraction == pytest.approx(8e8 / 0.013 / 2e12)
    assert (record.extra_bytes, record.max_row_error) == (100, 0.2)
    assert (record.loss_error, record.scale_gradient_error) == (0.3, 0.1)


def test_work_of_a_rectangle_and_of_the_forward_pass_alone() -> None:
    result = Result("ok", "", (10.0,), (1e12, 1e12), 100, 0.1, 0.1, 0.1)
    rectangle = results.record(replace(CASE, n=500), result, work=8)
    assert rectangle.fraction == pytest.approx(8 * 1000 * 500 * 100 / 0.01 / 1e12)
    forward = results.record(replace(CASE, backward=False), result, work=8)
    assert forward.fraction == pytest.approx(2 * 1000**2 * 100 / 0.01 / 1e12)


def test_many_repetitions_are_recorded_as_quantiles() -> None:
    times = tuple(float(t) for t in range(1000, 0, -1))
    record = results.record(CASE, Result("ok", "", times, (1e12, 1e12), 100, 0.1), work=8)
    assert (record.repetitions, record.ms) == (1000, 500.5)
    assert (record.times_ms[0], record.times_ms[-1], len(record.times_ms)) == (1, 1000, 21)


def test_only_right_and_wrong_results_have_figures() -> None:
    of = ("why", (10.0,), (1e12, 1e12), 100, 0.9, 0.1, 0.1)
    failed = results.record(CASE, Result("out of memory", *of), work=8)
    assert (failed.status, failed.note) == ("out of memory", "why")
    assert failed.ms is failed.fraction is failed.extra_bytes is None
    wrong = results.record(CASE, Result("wrong", *of), work=8)
    assert (wrong.status, wrong.ms, wrong.max_row_error) == ("wrong", 10.0, 0.9)
