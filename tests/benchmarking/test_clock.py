from __future__ import annotations

import time

import pytest
import torch

from megabatch.benchmarking.clock import product_rate, times


def test_at_least_the_repetitions_after_one_to_warm_up() -> None:
    calls: list[int] = []
    taken = times(lambda: calls.append(1), "cpu", seconds=0.0, repetitions=3)
    assert len(taken) == 3
    assert len(calls) == 4


def test_repeats_until_the_time_is_filled() -> None:
    taken = times(lambda: time.sleep(0.01), "cpu", seconds=0.06, repetitions=1)
    assert 2 <= len(taken) <= 6
    assert all(t >= 10 for t in taken)


def test_rate_is_operations_per_second(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megabatch.benchmarking.clock.times", lambda *_, **__: [500.0, 1500.0])
    assert product_rate("cpu", torch.float32, 10, 0.0) == pytest.approx(2 * 10**3 * 2 / 2.0)


@pytest.mark.gpu
def test_events_on_cuda() -> None:
    rate = product_rate("cuda", torch.bfloat16, 2048, 0.05)
    assert 1e12 < rate < 1e16
