from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

import tune
from megabatch.similarity.triton.configs import Config
from tests.process_state import changed

OPTIONS = {field: tune.VALUES["forward"][field] for field in ("rows", "group", "stages")}
GOAL = Config(rows=8, group=2, stages=4)


def distance(config: Config) -> float:
    """Milliseconds of a GPU to which one launch is best."""
    ms = 1.0
    for field in OPTIONS:
        values = OPTIONS[field]
        ms += abs(values.index(getattr(config, field)) - values.index(getattr(GOAL, field)))
    return ms


def found(measure: Callable[[Config], float], seconds: float = 60) -> list[Any]:
    return list(tune.search(Config(), OPTIONS, measure, time.time() + seconds))


def fastest(tried: list[Any]) -> Config:
    return min((t for t in tried if t.ms is not None), key=lambda t: t.ms).config  # type: ignore[no-any-return]


def test_the_best_of_each_field_is_found_and_nothing_measured_twice() -> None:
    tried = found(distance)
    assert fastest(tried) == GOAL
    assert tried[0].config == Config()
    assert len({t.config for t in tried}) == len(tried) < 30


def test_what_does_not_run_is_left_out() -> None:
    def measure(config: Config) -> float:
        if config.stages == 4:
            raise RuntimeError("out of shared memory\nand more")
        return distance(config)

    tried = found(measure)
    best = fastest(tried)
    assert best == replace(GOAL, stages=3) or best == replace(GOAL, stages=5)
    notes = {t.note for t in tried if t.ms is None}
    assert notes == {"RuntimeError: out of shared memory"}
    assert all(t.config.stages == 4 for t in tried if t.ms is None)


def test_a_first_launch_that_does_not_run_is_an_error() -> None:
    def measure(config: Config) -> float:
        raise RuntimeError("no such device")

    with pytest.raises(RuntimeError, match="no such device"):
        found(measure)


def test_at_the_deadline_the_best_so_far_counts() -> None:
    assert [t.config for t in found(distance, seconds=-1)] == [Config()]


def test_the_check_refuses_a_wrong_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    x, y = (
        torch.nn.functional.normalize(torch.randn(50, 12), dim=1).requires_grad_() for _ in range(2)
    )
    exact = tune.exact_results(x, y)
    tune.check(x, y, exact)
    for place, words in ((0, "loss is"), (2, "gradients")):
        wrong = list(exact)
        wrong[place] = wrong[place] * 1.5
        with pytest.raises(ValueError, match=words):
            tune.check(x, y, wrong)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_without_a_gpu_there_is_nothing_to_tune() -> None:
    with pytest.raises(SystemExit, match="no CUDA device"):
        tune.main([])


@pytest.mark.gpu
def test_a_few_launches_on_this_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    with changed("precision", torch.get_float32_matmul_precision()):
        tune.main(["--width=256", "--rows=4096", "--budget-seconds=5"])
    assert capsys.readouterr().out.count("times as fast as before") == 2
