"""The learning rate against OpenCLIP's formula, written out."""

from __future__ import annotations

import math

import pytest

from megabatch.training import TrainConfig
from megabatch.training.schedule import learning_rate


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
