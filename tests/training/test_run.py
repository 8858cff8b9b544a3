"""Whole short runs: what they leave behind, and that a resumed one is the uninterrupted one."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import open_clip
import pytest
import torch
from safetensors.torch import load_file

from megabatch.cli import main
from megabatch.data import Batch, PairLoader
from megabatch.errors import UsageError
from megabatch.training import TrainConfig, checkpoint, load_config, save_config, train
from megabatch.training.log import MetricsLog
from megabatch.training.trainer import Trainer, TrainingStopped
from tests.models.tiny import TINY
from tests.similarity.distributed.processes import start as start_processes
from tests.training.conftest import MakeConfig

# As the program, with the tests' own architecture and one thread.
PROGRAM = """
import sys, torch, tests.models.tiny
from megabatch.cli import main
torch.set_num_threads(1)
sys.exit(main(sys.argv[1:]))
"""


def weights(run: Path) -> bytes:
    return (run / "model.safetensors").read_bytes()


def logged(run: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def checkpoints(run: Path) -> list[str]:
    return sorted(path.name for path in (run / "checkpoints").iterdir())


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory, pictures: Path) -> TrainConfig:
    """A run of 12 steps that nothing disturbed."""
    torch.set_num_threads(1)
    config = TrainConfig(
        model=TINY,
        train_data=str(pictures),
        output=tmp_path_factory.mktemp("runs") / "straight",
        global_batch_size=8,
        micro_batch_size=4,
        steps=12,
        warmup=2,
        precision="fp32",
        device="cpu",
        checkpoint_every=3,
    )
    assert train(config) == 0
    return config


def signal_after(patch: pytest.MonkeyPatch, step: int, number: signal.Signals) -> None:
    """Send this process a signal in the middle of a step."""
    original = Trainer.train_step

    def train_step(self: Trainer, batch: object) -> dict[str, float]:
        if self.step == step:
            os.kill(os.getpid(), number)
        return original(self, batch)  # type: ignore[arg-type]

    patch.setattr(Trainer, "train_step", train_step)


def start(config: TrainConfig) -> subprocess.Popen[str]:
    options = ["train", "--config", str(config.output.with_suffix(".toml"))]
    save_config(config, config.output.with_suffix(".toml"))
    root = Path(__file__).parents[2]
    command = [sys.executable, "-c", PROGRAM, *options]
    return subprocess.Popen(
        command,
        cwd=root,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def wait_for_steps(process: subprocess.Popen[str], run: Path, steps: int) -> None:
    deadline = time.monotonic() + 120
    while len(logged_lines(run)) < steps:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.005)


def logged_lines(run: Path) -> list[str]:
    path = run / "metrics.jsonl"
    return path.read_text().splitlines() if path.exists() else []


def test_a_run_leaves_what_it_promises(straight: TrainConfig) -> None:
    run = straight.output
    assert load_config(run / "config.toml") == straight
    assert checkpoints(run) == ["step-00000009", "step-00000012"]
    assert list((run / "tensorboard").glob("events.*"))
    records = logged(run)
    assert [record["step"] for record in records] == list(range(1, 13))
    assert [record["epoch"] for record in records] == [0] * 5 + [1] * 5 + [2] * 2
    assert records[0]["samples"] == 8
    expected = {"step", "epoch", "samples", "loss", "lr", "logit_scale", "grad_norm"}
    measured = {"pairs_per_second", "data_wait", "seconds", "memory_bytes"}
    assert records[0].keys() == expected | measured
    assert all(0 <= record["data_wait"] <= 1 for record in records)
    assert sorted(path.name for path in run.iterdir()) == [
        *("checkpoints", "config.toml", "metrics.jsonl", "model.safetensors", "run.lock"),
        "tensorboard",
    ]


def test_the_same_configuration_gives_the_same_weights(
    straight: TrainConfig, make_config: MakeConfig, tmp_path: Path
) -> None:
    assert train(make_config(tmp_path / "again")) == 0
    assert weights(tmp_path / "again") == weights(straight.output)
    assert train(make_config(tmp_path / "other", seed=1)) == 0
    assert weights(tmp_path / "other") != weights(straight.output)


def test_workers_and_how_often_is_saved_and_logged_change_nothing(
    straight: TrainConfig, make_config: MakeConfig, tmp_path: Path
) -> None:
    config = make_config(tmp_path / "run", workers=2, checkpoint_every=0, log_every=5)
    assert train(config) == 0
    assert weights(config.output) == weights(straight.output)
    assert [record["step"] for record in logged(config.output)] == [5, 10, 12]
    assert checkpoints(config.output) == ["step-00000012"]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 75)])
def test_after_a_signal_it_saves_and_continues_bit_for_bit(
    straight: TrainConfig,
    make_config: MakeConfig,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    number: signal.Signals,
    code: int,
) -> None:
    config = make_config(tmp_path / "run")
    handlers = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    with monkeypatch.context() as patch:
        signal_after(patch, 7, number)  # in the middle of an epoch
        assert train(config, resume_command="THE COMMAND") == code
    assert "after step 8 of 12; continue with: THE COMMAND" in capsys.readouterr().out
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == handlers
    assert checkpoints(config.output)[-1] == "step-00000008"
    assert not (config.output / "model.safetensors").exists()
    assert train(make_config(tmp_path / "run", resume=True)) == 0
    assert weights(config.output) == weights(straight.output)
    keys = ("step", "epoch", "loss", "lr", "logit_scale", "grad_norm")
    assert [[r[k] for k in keys] for r in logged(config.output)] == [
        [r[k] for k in keys] for r in logged(straight.output)
    ]


@pytest.mark.parametrize("decode", ["early", "late"])
def test_a_signal_to_all_its_processes_leaves_the_workers_until_it_has_saved(
    make_config: MakeConfig, tmp_path: Path, decode: str
) -> None:
    config = make_config(tmp_path / "run", steps=400, workers=2, decode=decode)
    process = start(config)
    wait_for_steps(process, config.output, 3)
    os.killpg(process.pid, signal.SIGUSR1)  # as timeout and schedulers do
    os.killpg(process.pid, signal.SIGTERM)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 75, err
    done = len(logged(config.output))
    assert f"interrupted after step {done} of 400" in out
    assert checkpoints(config.output)[-1] == f"step-{done:08d}"
    deadline = time.monotonic() + 20
    while is_there(process.pid):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def is_there(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


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


def test_ctrl_c_of_the_program_is_exit_code_130_and_says_how_to_continue(
    make_config: MakeConfig, tmp_path: Path
) -> None:
    config = make_config(tmp_path / "run", steps=400)
    process = start(config)
    wait_for_steps(process, config.output, 4)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert "Traceback" not in err
    done = len(logged(config.output))
    assert f"interrupted after step {done} of 400" in out
    assert f"--config {config.output.with_suffix('.toml')} --resume" in out.replace("\n", " ")


def killable(rank: int, size: int, port: int, options: list[str]) -> None:
    torch.set_num_threads(1)
    main(["train", *options])


def test_after_kills_at_random_points_it_is_the_run_that_was_never_stopped(
    make_config: MakeConfig, tmp_path: Path
) -> None:
    changes: dict[str, Any] = {"model": "glyph-small", "steps": 200, "checkpoint_every": 2}
    changes["lr_scheduler"] = "const"
    config = make_config(tmp_path / "run", **changes)
    save_config(config, tmp_path / "run.toml")
    moments, last = random.Random(0), 0
    for _ in range(3):
        (process,) = start_processes(
            1, killable, ["--config", str(tmp_path / "run.toml"), "--resume"]
        )
        deadline = time.monotonic() + 60
        while len(logged_lines(config.output)) <= last:
            assert process.is_alive()
            assert time.monotonic() < deadline
            time.sleep(0.01)
        time.sleep(moments.uniform(0, 0.4))
        process.kill()
        process.join()
        last = len(logged_lines(config.output))
    assert 3 <= last < 200
    changes["steps"] = last + 3
    assert train(make_config(config.output, resume=True, **changes)) == 0
    assert train(make_config(tmp_path / "whole", **changes)) == 0
    assert weights(config.output) == weights(tmp_path / "whole")
    assert [r["step"] for r in logged(config.output)] == list(range(1, last + 4))
    assert losses(config.output) == losses(tmp_path / "whole")


def losses(run: Path) -> list[float]:
    return [record["loss"] for record in logged(run)]


def test_resuming_where_nothing_is_begins_at_the_start(
    straight: TrainConfig,
    make_config: MakeConfig,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert train(make_config(tmp_path / "run", resume=True)) == 0
    assert "no checkpoint yet: beginning at step 0" in capsys.readouterr().out
    assert weights(tmp_path / "run") == weights(straight.output)


def test_a_damaged_newest_checkpoint_is_passed_over(
    straight: TrainConfig,
    make_config: MakeConfig,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    config = make_config(tmp_path / "run")
    with monkeypatch.context() as patch:
        signal_after(patch, 7, signal.SIGINT)
        train(config)
    path = config.output / "checkpoints/step-00000008/optimizer.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    assert train(make_config(tmp_path / "run", resume=True)) == 0
    out = capsys.readouterr().out
    assert "step-00000008 is damaged: optimizer.safetensors is not what was written" in out
    assert "continuing after step 6" in out
    assert weights(config.output) == weights(straight.output)
    assert [record["step"] for record in logged(config.output)] == list(range(1, 13))


def test_resuming_a_finished_run_changes_nothing(
    straight: TrainConfig, make_config: MakeConfig
) -> None:
    before, lines = weights(straight.output), logged_lines(straight.output)
    assert train(make_config(straight.output, resume=True)) == 0
    assert weights(straight.output) == before
    assert logged_lines(straight.output) == lines


def test_a_run_can_be_made_longer_but_not_shorter(
    make_config: MakeConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "run"
    assert train(make_config(output, steps=4, lr_scheduler="const")) == 0
    assert train(make_config(output, steps=7, lr_scheduler="const", resume=True)) == 0
    assert "length changes from 4 to 7 steps" in capsys.readouterr().out
    assert train(make_config(tmp_path / "once", steps=7, lr_scheduler="const")) == 0
    assert weights(output) == weights(tmp_path / "once")
    assert load_config(output / "config.toml").steps == 7
    with pytest.raises(UsageError, match="has done 7 steps, asked are 6"):
        train(make_config(output, steps=6, lr_scheduler="const", resume=True))


def test_open_clip_loads_what_was_trained(straight: TrainConfig) -> None:
    path = str(straight.output / "model.safetensors")
    model = open_clip.create_model(TINY, pretrained=path)
    trained = load_file(path)
    assert all(torch.equal(value, trained[name]) for name, value in model.state_dict().items())
    assert not torch.equal(open_clip.create_model(TINY).visual.proj, model.visual.proj)


def test_weights_of_one_run_start_another(
    straight: TrainConfig, make_config: MakeConfig, tmp_path: Path
) -> None:
    pretrained = straight.output / "model.safetensors"
    config = make_config(tmp_path / "run", pretrained=pretrained, steps=1, lr=1e-30, warmup=0)
    assert train(config) == 0
    before, after = load_file(pretrained), load_file(config.output / "model.safetensors")
    assert all(torch.equal(value, after[name]) for name, value in before.items())


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_lower_precision_learns_and_resumes_too(
    make_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, precision: str
) -> None:
    config = make_config(tmp_path / "run", precision=precision)
    with monkeypatch.context() as patch:
        signal_after(patch, 4, signal.SIGINT)
        assert train(config) == 130
    assert train(make_config(tmp_path / "run", precision=precision, resume=True)) == 0
    assert train(make_config(tmp_path / "once", precision=precision)) == 0
    assert weights(config.output) == weights(tmp_path / "once")
    losses = [record["loss"] for record in logged(config.output)]
    assert losses[-1] < losses[0]


def test_samples_that_were_skipped_are_reported(
    make_config: MakeConfig, pictures: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = tmp_path / "some.csv"
    rows = [f"{pictures.parent / f'{i}.png'},picture {i}" for i in range(18)]
    (tmp_path / "broken.png").write_bytes(b"no picture")
    table.write_text("\n".join(["filepath,title", *rows, "broken.png,a caption"]) + "\n")
    assert train(make_config(tmp_path / "run", train_data=str(table), steps=4)) == 0
    assert "skipped 2 x undecodable image" in capsys.readouterr().out


def full_disk(patch: pytest.MonkeyPatch, *steps: int) -> None:
    """No room for the checkpoints of these steps."""
    original = checkpoint.save_tensors

    def save_tensors(tensors: dict[str, torch.Tensor], path: Path) -> None:
        if any(f"step-{step:08d}" in str(path) for step in steps):
            raise OSError(28, "No space left on device")
        original(tensors, path)

    patch.setattr(checkpoint, "save_tensors", save_tensors)


def test_a_disk_that_fills_while_saving_is_told_and_training_goes_on(
    straight: TrainConfig,
    make_config: MakeConfig,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    full_disk(monkeypatch, 6)
    config = make_config(tmp_path / "run")
    assert train(config) == 0
    told = "the checkpoint of step 6 could not be written: No space left on device; "
    assert f"{told}{config.output}/checkpoints/step-00000003 is intact; going on" in (
        capsys.readouterr().out
    )
    assert checkpoints(config.output) == ["step-00000009", "step-00000012"]
    assert weights(config.output) == weights(straight.output)


def test_a_last_checkpoint_that_cannot_be_written_is_an_error_and_loses_nothing_saved(
    straight: TrainConfig, make_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_config(tmp_path / "run")
    with monkeypatch.context() as patch:
        full_disk(patch, 6, 8, 9, 12)
        signal_after(patch, 7, signal.SIGTERM)
        with pytest.raises(UsageError, match=r"step 8 could not .* No space.*00000003 is intact"):
            train(config)
    assert checkpoints(config.output) == ["step-00000003"]
    assert train(make_config(tmp_path / "run", resume=True)) == 0
    assert weights(config.output) == weights(straight.output)


@pytest.mark.parametrize("workers", [0, 2])
def test_data_that_fail_stop_it_after_a_checkpoint(
    straight: TrainConfig,
    make_config: MakeConfig,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    workers: int,
) -> None:
    config = make_config(tmp_path / "run", workers=workers)
    original = PairLoader.__iter__

    def failing(self: PairLoader) -> Iterator[Batch]:
        for i, batch in enumerate(original(self)):
            if self.epoch == 1 and i == 2:
                raise OSError(5, "Input/output error")
            yield batch

    with monkeypatch.context() as patch:
        patch.setattr(PairLoader, "__iter__", failing)
        with pytest.raises(TrainingStopped, match=r"reading data: .*Input/output error"):
            train(config)
    assert checkpoints(config.output)[-1] == "step-00000007"
    assert train(make_config(tmp_path / "run", workers=workers, resume=True)) == 0
    assert weights(config.output) == weights(straight.output)


def poison(patch: pytest.MonkeyPatch, *steps: int) -> None:
    """Make the batches of these steps (from 0) such that their loss is no number."""
    original = Trainer.train_step

    def train_step(self: Trainer, batch: Batch) -> dict[str, float]:
        if self.step in steps:
            batch.images[:] = torch.nan
        return original(self, batch)

    patch.setattr(Trainer, "train_step", train_step)


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_steps_that_are_not_finite_can_be_left_out(
    make_config: MakeConfig,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    precision: str,
) -> None:
    changes = {"precision": precision, "on_nonfinite": "skip", "max_nonfinite": 3}
    config = make_config(tmp_path / "run", checkpoint_every=1, keep_checkpoints=12, **changes)
    poison(monkeypatch, 4, 5, 8)
    assert train(config) == 0
    assert "left out 3 steps that were not finite" in capsys.readouterr().out
    records = logged(config.output)
    assert ["loss" in record for record in records] == [i not in (4, 5, 8) for i in range(12)]
    assert [record.get("skipped_steps", 0) for record in records] == [0] * 4 + [
        1,
        *[2] * 3,
        *[3] * 4,
    ]
    place = config.output / "checkpoints"
    before, after = (load_file(place / f"step-{n:08d}/model.safetensors") for n in (4, 6))
    assert all(torch.equal(after[name], value) for name, value in before.items())


def test_too_many_in_a_row_stop_it_all_the_same(
    make_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_config(tmp_path / "run", on_nonfinite="skip", max_nonfinite=3)
    poison(monkeypatch, 1, 4, 5, 6)
    with pytest.raises(TrainingStopped, match=r"step 7: loss nan.*not finite 3 times in a row"):
        train(config)


def test_a_loss_that_is_not_a_number_stops_it_before_the_weights_change(
    make_config: MakeConfig, tmp_path: Path
) -> None:
    config = make_config(tmp_path / "run", lr=1e30, warmup=0, checkpoint_every=1)
    with pytest.raises(TrainingStopped, match=r"step \d+: loss .*not taken.*lower --lr"):
        train(config)
    saved = checkpoint.load_newest(config.output / "checkpoints")
    assert saved is not None
    assert all(torch.isfinite(tensor).all() for tensor in saved[0].model.values())


def test_glyph_small_trains_on_any_pictures(make_config: MakeConfig, tmp_path: Path) -> None:
    config = make_config(tmp_path / "run", model="glyph-small", checkpoint_every=0)
    assert train(config) == 0
    losses = [record["loss"] for record in logged(config.output)]
    assert losses[-1] < losses[0] - 0.1


def test_the_evaluation_follows_where_it_is_asked_for(
    make_config: MakeConfig, pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import megabatch.evaluation
    import megabatch.evaluation.table

    seen: list[Any] = []

    def evaluate_run(run: Path, **options: Any) -> dict[str, object]:
        assert (run / "model.safetensors").exists()
        seen.append((run, options))
        return {"figures": 1}

    monkeypatch.setattr(megabatch.evaluation, "evaluate_run", evaluate_run, raising=False)
    monkeypatch.setattr(
        megabatch.evaluation.table, "print_evaluation", lambda e, console: seen.append(e)
    )
    config = make_config(tmp_path / "run", steps=2, evaluate=True, val_data=str(pictures))
    assert train(config) == 0
    options = {"device": "cpu", "group": "local", "val_data": str(pictures)}
    assert seen == [(config.output, options), {"figures": 1}]


def test_an_evaluation_without_data_is_refused_before_anything_is_trained(
    make_config: MakeConfig, tmp_path: Path
) -> None:
    config = make_config(tmp_path / "run", evaluate=True)
    with pytest.raises(UsageError, match="evaluate: true; expected val_data with it"):
        train(config)
    with pytest.raises(UsageError, match="val_data: nothing matches nowhere"):
        train(replace(config, val_data="nowhere"))
    with pytest.raises(UsageError, match=r"val_data: x\.csv; expected with evaluate"):
        train(replace(config, evaluate=False, val_data="x.csv"))
    assert not config.output.exists()


def test_a_disk_without_room_for_the_log_at_the_end_is_an_error_with_a_reason(
    make_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: MetricsLog) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(MetricsLog, "close", full)
    with pytest.raises(TrainingStopped, match=f"{tmp_path / 'run'}: No space left on device"):
        train(make_config(tmp_path / "run"))


def test_a_finished_run_made_longer_has_no_stale_weights_meanwhile(
    make_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert train(make_config(tmp_path / "run", steps=4)) == 0
    with monkeypatch.context() as patch:
        signal_after(patch, 6, signal.SIGINT)
        assert train(make_config(tmp_path / "run", steps=12, resume=True)) == 130
    assert not (tmp_path / "run" / "model.safetensors").exists()
