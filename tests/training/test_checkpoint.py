"""Checkpoints that are whole or absent: crashes, damage, full disks."""

from __future__ import annotations

import errno
import os
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from megabatch.training import checkpoint
from megabatch.training.checkpoint import Checkpoint, TrainingStopped, load_newest, save


def made(step: int, size: int = 8) -> Checkpoint:
    weights = torch.full((size,), float(step))
    return Checkpoint({"w": weights}, {"w/exp_avg": weights * 2}, {"step": step, "seconds": 1.5})


def newest_step(folder: Path) -> int | None:
    found = load_newest(folder)
    if found is None:
        return None
    step: int = found.state["step"]
    assert found.model["w"][0] == step
    assert found.optimizer["w/exp_avg"][0] == 2 * step
    return step


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.toml").write_text("seed = 7")
    return tmp_path / "checkpoints"


def test_what_is_saved_is_what_is_read_and_nothing_is_a_pickle(folder: Path) -> None:
    assert load_newest(folder) is None
    save(folder, made(7), keep=2)
    (place,) = folder.iterdir()
    read = load_newest(folder)
    assert read is not None
    assert torch.equal(read.model["w"], torch.full((8,), 7.0))
    assert torch.equal(read.optimizer["w/exp_avg"], torch.full((8,), 14.0))
    assert read.state["seconds"] == 1.5
    expected = ["config.toml", "model.safetensors", "optimizer.safetensors", "state.json"]
    assert names(place) == expected
    assert (place / "config.toml").read_text() == "seed = 7"
    for path in place.iterdir():
        with pytest.raises((pickle.UnpicklingError, KeyError, ValueError, EOFError, IndexError)):
            pickle.loads(path.read_bytes())
        assert not path.read_bytes().startswith(b"PK")  # the zip that torch.save makes


def test_the_newest_steps_are_kept_and_a_user_s_copy_is_none(folder: Path) -> None:
    save(folder, made(9), keep=2)
    copy = shutil.copytree(folder / "step-00000009", folder / "step-200000000.bak")
    for step in (10, 99_999_999, 100_000_000):  # in order of steps, not of names
        save(folder, made(step), keep=2)
    assert names(folder) == ["step-100000000", copy.name, "step-99999999"]
    assert newest_step(folder) == 100_000_000


def end_at(patch: pytest.MonkeyPatch, call: int, before: bool) -> list[str]:
    """Note each call that reaches the disk; at one of them the process ends, before or after it."""
    calls: list[str] = []
    for name, function in (("fsync", os.fsync), ("replace", os.replace)):

        def dying(*args: Any, function: Any = function, name: str = name) -> None:
            calls.append(name)
            if before and len(calls) == call:
                os._exit(9)
            function(*args)
            if len(calls) == call:
                os._exit(9)

        patch.setattr(checkpoint.os, name, dying)
    return calls


@pytest.mark.parametrize("before", [True, False])
def test_a_process_that_dies_anywhere_in_a_save_leaves_a_good_checkpoint(
    folder: Path, monkeypatch: pytest.MonkeyPatch, before: bool
) -> None:
    with monkeypatch.context() as patch:
        calls = end_at(patch, 0, before)
        save(folder, made(1), keep=2)
    assert len(calls) >= 6  # three files, their folder, the rename, the folder above
    reached = []
    for call in range(1, len(calls) + 1):
        shutil.rmtree(folder)
        save(folder, made(1), keep=2)
        child = os.fork()
        if child == 0:
            try:
                end_at(monkeypatch, call, before)
                save(folder, made(2), keep=2)
            finally:
                os._exit(1)  # the call was not reached, or something else failed
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
        reached.append(newest_step(folder))
        assert all(name.startswith("step-") for name in names(folder))
        save(folder, made(3), keep=2)
        assert newest_step(folder) == 3
    assert set(reached) == {1, 2}
    assert reached == sorted(reached)  # there is one moment from which on the new one counts


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors", "state.json"])
@pytest.mark.parametrize("damage", ["absent", "empty", "cut", "flipped"])
def test_a_damaged_newest_checkpoint_is_told_with_the_one_before(
    folder: Path, name: str, damage: str
) -> None:
    save(folder, made(1), keep=3)
    save(folder, made(2), keep=3)
    place = folder / "step-00000002"
    path = place / name
    content = bytearray(path.read_bytes())
    if damage == "absent":
        path.unlink()
    elif damage == "flipped" and name == "state.json":
        path.write_bytes(content.replace(b'"format": 1', b'"format": 9'))
    else:
        content[-3] ^= 255
        path.write_bytes({"empty": b"", "cut": content[:-9], "flipped": bytes(content)}[damage])
    told = f"{place} is damaged: .*; delete it, and --resume continues from step-00000001"
    with pytest.raises(TrainingStopped, match=told):
        load_newest(folder)
    shutil.rmtree(place)
    assert newest_step(folder) == 1


@pytest.mark.parametrize(
    ("failure", "expected", "message"),
    [
        (
            OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)),
            TrainingStopped,
            r"step 2 could not be written: .*: No space left on device; earlier ones are intact",
        ),
        (KeyboardInterrupt("second Ctrl-C"), KeyboardInterrupt, "second Ctrl-C"),
    ],
)
def test_a_save_that_fails_leaves_the_earlier_checkpoint_and_no_rubbish(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    failure: BaseException,
    expected: type[BaseException],
    message: str,
) -> None:
    def fail(descriptor: int) -> None:
        raise failure

    save(folder, made(1), keep=2)
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint.os, "fsync", fail)
        with pytest.raises(expected, match=message):
            save(folder, made(2), keep=2)
    assert names(folder) == ["step-00000001"]
    assert newest_step(folder) == 1


def test_tensors_that_share_memory_and_slices_are_written_apart(tmp_path: Path) -> None:
    whole = torch.arange(1000.0)
    tensors = {"a": whole, "same": whole, "slice": whole[:2], "across": whole.view(10, 100).t()}
    path = tmp_path / "t.safetensors"
    checkpoint.save_tensors(tensors, path)
    read = checkpoint.load_file(path)
    assert all(torch.equal(read[name], tensor) for name, tensor in tensors.items())
