from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megabatch import cli
from megabatch.benchmarking import tune
from megabatch.benchmarking.tune import Candidate
from megabatch.similarity.triton import configs
from megabatch.similarity.triton.configs import VALUES, Config, Key

OPTIONS = {field: VALUES[field] for field in ("rows", "group", "stages")}
GOAL = Config(rows=8, group=2, stages=4)


def distance(config: Config) -> float:
    """Milliseconds of a GPU to which one launch is best."""
    ms = 1.0
    for field in OPTIONS:
        values = VALUES[field]
        ms += abs(values.index(getattr(config, field)) - values.index(getattr(GOAL, field)))
    return ms


def found(measure: tune.Measure, seconds: float = 60) -> list[Candidate]:
    return list(tune.search(Config(), OPTIONS, measure, time.time() + seconds))


def test_the_best_of_each_field_is_found_and_nothing_measured_twice() -> None:
    tried = found(distance)
    assert tune.best(tried).config == GOAL
    assert tried[0].config == Config()
    assert len({t.config for t in tried}) == len(tried) < 30


def test_what_does_not_run_is_left_out() -> None:
    def measure(config: Config) -> float:
        if config.stages == 4:
            raise RuntimeError("out of shared memory\nand more")
        return distance(config)

    tried = found(measure)
    best = tune.best(tried).config
    assert best == replace(GOAL, stages=3) or best == replace(GOAL, stages=5)
    notes = {t.note for t in tried if t.ms is None}
    assert notes == {"RuntimeError: out of shared memory"}
    assert all(t.config.stages == 4 for t in tried if t.ms is None)


def test_a_first_launch_that_does_not_run_is_an_error() -> None:
    def measure(config: Config) -> float:
        raise RuntimeError("no such device")

    with pytest.raises(RuntimeError, match="no such device"):
        found(measure)


def test_noise_changes_nothing() -> None:
    tried = found(lambda config: 1.0 - 0.001 * config.rows / 16)
    assert tune.best(tried) is tried[0]


def test_at_the_deadline_the_best_so_far_counts() -> None:
    assert [t.config for t in found(distance, seconds=-1)] == [Config()]


def test_the_check_refuses_a_wrong_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    x, y = (
        torch.nn.functional.normalize(torch.randn(50, 12), dim=1).requires_grad_() for _ in range(2)
    )
    exact = tune._exact(x, y)
    tune._check(x, y, exact, torch.float32)
    for place, words in ((0, "log-sum-exps"), (3, "gradients")):
        wrong = list(exact)
        wrong[place] = wrong[place].clone()
        wrong[place][7] *= 1.5
        with pytest.raises(ValueError, match=words):
            tune._check(x, y, wrong, torch.float32)


class FakeTarget:
    """A GPU on which `distance` is the time."""

    dtype, width, few = torch.bfloat16, 768, False

    def __init__(self, kernel: str) -> None:
        self.kernel = kernel

    def key(self) -> Key:
        return Key(self.kernel, "Some GPU", "3.6.0", "bfloat16", 768, False)

    packaged = staticmethod(lambda: Config())
    options = staticmethod(lambda: OPTIONS)
    measurer = staticmethod(lambda: distance)


def test_the_command_keeps_what_it_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MEGABATCH_CACHE", str(tmp_path))
    targets = [FakeTarget("forward"), FakeTarget("backward")]
    monkeypatch.setattr(tune, "_targets", lambda *_: targets)
    assert cli.main(["tune"]) == 0
    assert configs.read(tmp_path / "kernels.json") == {t.key(): GOAL for t in targets}
    shown = capsys.readouterr().out
    assert "backward, bfloat16, width 768, many rows" in shown
    assert "times as fast" in shown


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--width", "0"], "--width 0: expected at least 1"),
        (["--budget-seconds", "0"], "--budget-seconds 0: expected a number above 0"),
        ([], "no CUDA device"),
    ],
)
def test_bad_options_are_one_line(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if torch.cuda.is_available() and not words:
        pytest.skip("needs a machine without a GPU")
    assert cli.main(["tune", *words]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.gpu
def test_a_few_launches_on_this_gpu() -> None:
    target = tune.Target("forward", torch.bfloat16, 256, few=True)
    tried = list(
        tune.search(target.packaged(), {"rows": (1, 2)}, target.measurer(), time.time() + 60)
    )
    assert tune.best(tried).ms
