"""Runs on full disks, with data that fail and steps that are not finite."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megabatch.data import Batch, PairLoader
from megabatch.errors import UsageError
from megabatch.training import TrainConfig, checkpoint, train
from megabatch.training.trackers import Trackers
from megabatch.training.trainer import TrainingStopped
from tests.training.conftest import MakeConfig
from tests.training.runs import checkpoints, weights


def full_disk(patch: pytest.MonkeyPatch, *steps: int) -> None:
    """No room for the checkpoints of these steps."""
    original = checkpoint.save_tensors

    def save_tensors(tensors: dict[str, torch.Tensor], path: Path) -> None:
        if any(f"step-{step:08d}" in str(path) for step in steps):
            raise OSError(28, "No space left on device")
        original(tensors, path)

    patch.setattr(checkpoint, "save_tensors", save_tensors)


def test_a_checkpoint_that_cannot_be_written_stops_the_run_and_loses_nothing_saved(
    straight: TrainConfig, make_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_config(tmp_path / "run")
    with monkeypatch.context() as patch:
        full_disk(patch, 6)
        with pytest.raises(UsageError, match=r"step 6 could not .* No space.*earlier ones are"):
            train(config)
    assert checkpoints(config.output) == ["step-00000003"]
    assert train(make_config(tmp_path / "run", resume=True)) == 0
    assert weights(config.output) == weights(straight.output)


def test_a_disk_without_room_for_the_log_is_an_error_with_a_reason(
    make_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: Trackers, record: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Trackers, "step", full)
    with pytest.raises(TrainingStopped, match=f"{tmp_path / 'run'}: No space left on device"):
        train(make_config(tmp_path / "run", steps=2))


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (OSError(5, "Input/output error"), r"reading data: .*Input/output error"),
        (UsageError("a whole epoch has no usable pair"), "^a whole epoch has no usable pair$"),
    ],
)
def test_data_that_fail_stop_it_after_a_checkpoint(
    straight: TrainConfig,
    make_config: MakeConfig,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    error: Exception,
    told: str,
) -> None:
    config = make_config(tmp_path / "run", workers=2)
    original = PairLoader.__iter__

    def failing(self: PairLoader) -> Iterator[Batch]:
        for i, batch in enumerate(original(self)):
            if self.epoch == 1 and i == 2:
                raise error
            yield batch

    with monkeypatch.context() as patch:
        patch.setattr(PairLoader, "__iter__", failing)
        with pytest.raises(TrainingStopped, match=told):  # its exit code is 1
            train(config)
    assert checkpoints(config.output)[-1] == "step-00000007"
    assert train(replace(config, resume=True)) == 0
    assert weights(config.output) == weights(straight.output)


def test_a_loss_that_is_not_a_number_stops_it_before_the_weights_change(
    make_config: MakeConfig, tmp_path: Path
) -> None:
    config = make_config(tmp_path / "run", lr=1e30, warmup=0, checkpoint_every=1)
    with pytest.raises(TrainingStopped, match=r"step \d+: loss .*not taken.*lower --lr"):
        train(config)
    saved = checkpoint.load_newest(config.output / "checkpoints")
    assert saved is not None
    assert all(torch.isfinite(tensor).all() for tensor in saved.model.values())
