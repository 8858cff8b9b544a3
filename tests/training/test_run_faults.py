"""Runs on full disks, with data that fail and steps that are not finite."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import replace
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch

from megabatch.data import Batch, PairLoader
from megabatch.errors import UsageError
from megabatch.training import TrainConfig, checkpoint, train
from megabatch.training.checkpoint import TrainingStopped
from megabatch.training.run_folder import locked_file
from megabatch.training.trackers import Trackers
from tests.server import forked
from tests.training.conftest import MakeConfig
from tests.training.runs import checkpoints, weights


def no_room(*_: object) -> None:
    raise OSError(28, "No space left on device")


def test_a_checkpoint_that_cannot_be_written_stops_the_run_and_loses_nothing_saved(
    straight: TrainConfig, make_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, save_tensors = make_config(tmp_path / "run"), checkpoint.save_tensors

    def full(tensors: dict[str, torch.Tensor], path: Path) -> None:
        (no_room if "step-00000006" in str(path) else save_tensors)(tensors, path)

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "save_tensors", full)
        with pytest.raises(UsageError, match=r"step 6 could not .* No space.*earlier ones are"):
            train(config)
    assert checkpoints(config.output) == ["step-00000003"]
    assert train(replace(config, resume=True)) == 0
    assert weights(config.output) == weights(straight.output)


def test_a_disk_without_room_for_the_log_is_an_error_with_a_reason(
    make_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Trackers, "step", no_room)
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


def hold_lock(folder: Path, channel: Connection) -> None:
    with locked_file(folder):
        if os.fork() == 0:  # as a loader's worker, which outlives it for a while
            time.sleep(2)
            os._exit(0)
        channel.send("locked")
        time.sleep(60)


def test_a_second_process_is_refused_until_the_first_is_gone(tmp_path: Path) -> None:
    here, there = Pipe()
    process = forked(hold_lock, tmp_path, there)
    assert here.recv() == "locked"
    with pytest.raises(UsageError, match="is being written by another process"):
        locked_file(tmp_path)
    process.kill()
    process.join()
    locked_file(tmp_path).close()
