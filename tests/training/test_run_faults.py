"""Runs on full disks, with data that fail and steps that are not finite."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from megabatch.data import Batch, PairLoader
from megabatch.errors import UsageError
from megabatch.training import TrainConfig, checkpoint, train
from megabatch.training.trackers import Trackers
from megabatch.training.trainer import Trainer, TrainingStopped
from tests.training.conftest import MakeConfig
from tests.training.runs import checkpoints, logged, signal_after, weights


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


def test_data_without_a_usable_batch_stop_a_run_that_has_started(
    make_config: MakeConfig, tmp_path: Path
) -> None:
    table = tmp_path / "bad.csv"
    table.write_bytes(b"filepath,title\n" + b"0.png,gr\xfcn\n" * 8)
    (tmp_path / "0.png").write_bytes(b"no picture")
    with pytest.raises(TrainingStopped, match="a whole epoch of 8 pairs has no usable one"):
        train(make_config(tmp_path / "run", train_data=str(table)))  # exit code 1


def test_a_disk_without_room_for_the_log_at_the_end_is_an_error_with_a_reason(
    make_config: MakeConfig,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def full(self: Trackers) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Trackers, "last_step", full)
    with pytest.raises(TrainingStopped, match=f"{tmp_path / 'run'}: No space left on device"):
        train(make_config(tmp_path / "run", steps=2))
    full_disk(monkeypatch, 3)
    with pytest.raises(UsageError, match="the checkpoint of step 3 could not be written"):
        train(make_config(tmp_path / "other", steps=3))  # checkpoint_every: 3
    assert "could not be written" not in capsys.readouterr().out  # it is told once


def test_data_that_fail_stop_it_after_a_checkpoint(
    straight: TrainConfig,
    make_config: MakeConfig,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = make_config(tmp_path / "run", workers=2)
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
    assert train(replace(config, resume=True)) == 0
    assert weights(config.output) == weights(straight.output)


def poison(patch: pytest.MonkeyPatch, *steps: int) -> None:
    """Make the batches of these steps (from 0) such that their loss is no number."""
    original = Trainer.train_step

    def train_step(self: Trainer, batch: Batch) -> dict[str, float]:
        if self.step in steps:
            images = torch.full(batch.images.shape, torch.nan)  # in place of pixels
            batch = replace(batch, images=images)
        return original(self, batch)

    patch.setattr(Trainer, "train_step", train_step)


def test_steps_that_are_not_finite_can_be_left_out(
    make_config: MakeConfig,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    changes = {"precision": "fp16", "on_nonfinite": "skip", "max_nonfinite": 3}
    config = make_config(
        tmp_path / "run", steps=8, checkpoint_every=2, keep_checkpoints=4, **changes
    )
    poison(monkeypatch, 4, 5, 7)
    assert train(config) == 0
    assert "left out 3 steps that were not finite" in capsys.readouterr().out
    records = logged(config.output)
    assert ["loss" in record for record in records] == [i not in (4, 5, 7) for i in range(8)]
    assert [record.get("skipped_steps", 0) for record in records] == [0, 0, 0, 0, 1, 2, 2, 3]
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
