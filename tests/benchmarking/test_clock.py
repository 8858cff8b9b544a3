from __future__ import annotations

import pytest
import torch

from megabatch.benchmarking import clock
from megabatch.benchmarking.clock import product_rate, times


def test_at_least_the_repetitions_after_one_to_warm_up() -> None:
    calls: list[int] = []
    taken = times(lambda: calls.append(1), "cpu", seconds=0.0, repetitions=3)
    assert len(taken) == 3
    assert len(calls) == 4


def test_repeats_until_the_time_is_filled(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(clock.time, "perf_counter", lambda: now[0])
    takes = iter([0.25, *[0.125] * 20])  # the first call takes longer, and promises too few

    def call() -> None:
        now[0] += next(takes)

    assert times(call, "cpu", seconds=1.0, repetitions=1) == [125.0] * 8


def test_rate_is_operations_per_second(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megabatch.benchmarking.clock.times", lambda *_, **__: [500.0, 1500.0])
    assert product_rate("cpu", torch.float32, 10, 0.0) == pytest.approx(2 * 10**3 * 2 / 2.0)


@pytest.mark.gpu
def test_events_on_cuda() -> None:
    rate = product_rate("cuda", torch.bfloat16, 2048, 0.05)
    assert 1e12 < rate < 1e16
