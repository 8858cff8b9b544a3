"""The learning rate against OpenCLIP's formula, written out."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from megabatch.training import TrainConfig
from megabatch.training.schedule import cooldown_steps, learning_rate, peak_learning_rate


def test_warm_up_is_linear_and_reaches_the_peak() -> None:
    config = TrainConfig(lr=8.0, warmup=4)
    assert [learning_rate(config, step, 100) for step in range(4)] == [2, 4, 6, 8]


def test_half_a_cosine_from_the_peak_towards_zero() -> None:
    config = TrainConfig(lr=2.0, warmup=10)
    values = [learning_rate(config, step, 110) for step in range(10, 110)]
    assert values == pytest.approx([1 + math.cos(math.pi * i / 100) for i in range(100)])
    assert values[0] == 2
    assert values[50] == pytest.approx(1)
    assert 0 < values[-1] < 0.001


def test_const_stays() -> None:
    config = TrainConfig(lr=2.0, warmup=2, lr_scheduler="const")
    assert [learning_rate(config, step, 5) for step in range(5)] == [1, 2, 2, 2, 2]


def test_no_warm_up_starts_at_the_peak() -> None:
    assert learning_rate(TrainConfig(lr=3.0, warmup=0), 0, 10) == 3


def test_a_run_that_is_all_warm_up() -> None:
    config = TrainConfig(lr=3.0, warmup=3)
    assert [learning_rate(config, step, 3) for step in range(3)] == [1, 2, 3]


@pytest.mark.parametrize("name", ["const-cooldown", "wsd"])
def test_stay_and_fall_at_the_end(name: str) -> None:
    changes = {"lr_scheduler": name, "lr_cooldown": 4, "lr_cooldown_end": 1.0}
    config = TrainConfig(lr=5.0, warmup=2, **changes)  # type: ignore[arg-type]
    rates = [learning_rate(config, step, 10) for step in range(10)]
    assert rates == [
        2.5,
        5,
        5,
        5,
        5,
        5,
        5,
        4,
        3,
        2,
    ]  # OpenCLIP: the step after the last has the end


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"lr_cooldown_power": 2.0}, [1, 9 / 16, 1 / 4, 1 / 16]),
        ({"lr_cooldown_shape": "1-sqrt"}, [1, 0.5, 1 - 0.5**0.5, 1 - 0.75**0.5]),
        ({"lr_cooldown_shape": "cosine"}, [1, (1 + 0.5**0.5) / 2, 0.5, (1 - 0.5**0.5) / 2]),
    ],
)
def test_shapes_of_the_fall(changes: dict[str, Any], expected: list[float]) -> None:
    config = TrainConfig(lr=1.0, warmup=0, lr_scheduler="wsd", lr_cooldown=4, **changes)
    assert [learning_rate(config, step, 6) for step in range(2, 6)] == pytest.approx(expected)
    assert [learning_rate(config, step, 6) for step in range(2)] == [1, 1]


def test_a_fifth_of_the_run_is_the_fall_unless_said() -> None:
    config = TrainConfig(lr_scheduler="wsd", warmup=10)
    assert cooldown_steps(config, 100) == 20
    assert cooldown_steps(config, 11) == 1  # never into the warm-up
    assert cooldown_steps(config, 10) == 1
    assert learning_rate(config, 9, 10) == config.lr


@pytest.mark.parametrize(("scaling", "factor"), [("none", 1), ("sqrt", 2), ("linear", 4)])
def test_the_peak_grows_with_the_batch(scaling: Any, factor: int) -> None:
    config = TrainConfig(
        lr=0.5, lr_scaling=scaling, lr_base_batch_size=1024, global_batch_size=4096, warmup=1
    )
    assert peak_learning_rate(config) == pytest.approx(0.5 * factor)
    assert learning_rate(config, 0, 10) == pytest.approx(0.5 * factor)
    smaller = replace(config, global_batch_size=256)
    assert peak_learning_rate(smaller) == pytest.approx(0.5 / factor)
