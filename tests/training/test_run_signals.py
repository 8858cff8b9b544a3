"""Runs that are interrupted or killed: continued, they are the uninterrupted one."""

from __future__ import annotations

import os
import random
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megabatch.training import TrainConfig, train
from megabatch.training.trainer import Trainer
from tests.training.conftest import MakeConfig
from tests.training.runs import (
    checkpoints,
    is_there,
    logged,
    logged_lines,
    losses,
    signal_after,
    start,
    wait_for_steps,
    weights,
)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 75)])
def test_after_a_signal_it_saves_and_continues_bit_for_bit(
    straight: TrainConfig,
    make_config: MakeConfig,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    number: signal.Signals,
    code: int,
) -> None:
    config = make_config(tmp_path / "run")
    handlers = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    with monkeypatch.context() as patch:
        signal_after(patch, 7, number)  # in the middle of an epoch
        assert train(config) == code
    out, err = capfd.readouterr()
    assert "after step 8 of 12; the same command with --resume continues" in out
    assert f"{number.name}: finishing this step and saving a checkpoint" in err
    assert ("Ctrl-C again" in err) == (number == signal.SIGINT)
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == handlers
    assert checkpoints(config.output)[-1] == "step-00000008"
    assert not (config.output / "model.safetensors").exists()
    assert train(replace(config, resume=True)) == 0
    assert "continuing after step 8" in capfd.readouterr().out
    assert weights(config.output) == weights(straight.output)
    keys = ("step", "epoch", "loss", "lr", "logit_scale", "grad_norm")
    assert [[r[k] for k in keys] for r in logged(config.output)] == [
        [r[k] for k in keys] for r in logged(straight.output)
    ]


def test_a_signal_in_the_last_step_leaves_the_rest_to_the_next_run(
    make_config: MakeConfig,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    config = make_config(tmp_path / "run", steps=3)
    with monkeypatch.context() as patch:
        signal_after(patch, 2, signal.SIGUSR1)
        assert train(config) == 75
    assert "after step 3 of 3; the same command" in capsys.readouterr().out
    assert not (config.output / "model.safetensors").exists()
    assert train(replace(config, resume=True)) == 0
    assert (config.output / "model.safetensors").exists()


@pytest.mark.parametrize(
    ("decode", "numbers", "code"),
    [
        ("early", [signal.SIGINT], 130),  # Ctrl-C
        ("late", [signal.SIGUSR1, signal.SIGTERM], 75),  # as timeout and schedulers do
    ],
)
def test_a_signal_to_all_its_processes_leaves_the_workers_until_it_has_saved(
    make_config: MakeConfig, tmp_path: Path, decode: str, numbers: list[int], code: int
) -> None:
    config = make_config(tmp_path / "run", steps=400, workers=2, decode=decode)
    process = start(config)
    wait_for_steps(process, config.output, 3)
    for number in numbers:
        os.killpg(process.pid, number)
    out, err = process.communicate(timeout=200)
    assert process.returncode == code, err
    assert "Traceback" not in err
    done = len(logged(config.output))
    assert f"interrupted after step {done} of 400" in out
    assert checkpoints(config.output)[-1] == f"step-{done:08d}"
    deadline = time.monotonic() + 60
    while is_there(process.pid):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_second_ctrl_c_ends_at_once(
    make_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = Trainer.train_step

    def twice(self: Trainer, batch: object) -> dict[str, float]:
        if self.step == 4:
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)
        return original(self, batch)  # type: ignore[arg-type]

    monkeypatch.setattr(Trainer, "train_step", twice)
    with pytest.raises(KeyboardInterrupt):
        train(make_config(tmp_path / "run"))
    assert checkpoints(tmp_path / "run") == ["step-00000003"]


def test_after_kills_at_random_points_it_is_the_run_that_was_never_stopped(
    make_config: MakeConfig, tmp_path: Path
) -> None:
    changes: dict[str, Any] = {"model": "glyph-small", "steps": 200, "checkpoint_every": 2}
    changes["lr_scheduler"] = "const"
    config = make_config(tmp_path / "run", **changes)
    moments, last = random.Random(0), 0
    for _ in range(3):
        process = start(replace(config, resume=True))
        wait_for_steps(process, config.output, last + 1)
        time.sleep(moments.uniform(0, 0.4))
        process.send_signal(signal.SIGKILL)
        process.communicate()
        last = len(logged_lines(config.output))
    assert 3 <= last < 200
    changes["steps"] = last + 3
    assert train(make_config(config.output, resume=True, **changes)) == 0
    assert train(make_config(tmp_path / "whole", **changes)) == 0
    assert weights(config.output) == weights(tmp_path / "whole")
    assert [r["step"] for r in logged(config.output)] == list(range(1, last + 4))
    assert losses(config.output) == losses(tmp_path / "whole")
