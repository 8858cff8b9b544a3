"""Checkpoints that are whole or absent: crashes, damage, full disks."""

from __future__ import annotations

import errno
import os
import pickle
import shutil
from pathlib import Path

import pytest
import torch

from megabatch.training import checkpoint
from megabatch.training.checkpoint import Checkpoint, CheckpointError, load_newest, save


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
    place = save(folder, made(7), keep=2)
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
    copy = shutil.copytree(save(folder, made(9), keep=2), folder / "step-200000000.bak")
    for step in (10, 99_999_999, 100_000_000):  # in order of steps, not of names
        save(folder, made(step), keep=2)
    assert names(folder) == ["step-100000000", copy.name, "step-99999999"]
    assert newest_step(folder) == 100_000_000


def calls_of_a_save(folder: Path, patch: pytest.MonkeyPatch) -> int:
    """How often a save reaches the disk's side: flushes and renames."""
    count = 0

    def counting(function: object) -> object:
        def call(*args: object) -> object:
            nonlocal count
            count += 1
            return function(*args)  # type: ignore[operator]

        return call

    with patch.context() as context:
        for name in ("fsync", "replace"):
            context.setattr(checkpoint.os, name, counting(getattr(os, name)))
        save(folder, made(1), keep=2)
    return count


def die_at(call: int, folder: Path, before: bool) -> None:
    """Save step 2 in a process that ends, cleaning nothing up, at one of those calls."""
    child = os.fork()
    if child:
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
        return
    count = 0
    for name in ("fsync", "replace"):
        function = getattr(os, name)

        def dying(*args: object, function=function) -> None:  # type: ignore[no-untyped-def]
            nonlocal count
            count += 1
            if count == call and before:
                os._exit(9)
            function(*args)
            if count == call:
                os._exit(9)

        setattr(checkpoint.os, name, dying)
    try:
        save(folder, made(2), keep=2)
    finally:
        os._exit(1)  # the call was not reached, or something else failed


@pytest.mark.parametrize("before", [True, False])
def test_a_process_that_dies_anywhere_in_a_save_leaves_a_good_checkpoint(
    folder: Path, monkeypatch: pytest.MonkeyPatch, before: bool
) -> None:
    calls = calls_of_a_save(folder, monkeypatch)
    assert calls >= 6  # three files, their folder, the rename, the folder above
    reached = []
    for call in range(1, calls + 1):
        shutil.rmtree(folder)
        save(folder, made(1), keep=2)
        die_at(call, folder, before)
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
    place = save(folder, made(2), keep=3)
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
    with pytest.raises(CheckpointError, match=told):
        load_newest(folder)
    shutil.rmtree(place)
    assert newest_step(folder) == 1


@pytest.mark.parametrize(
    ("failure", "expected", "message"),
    [
        (
            OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)),
            CheckpointError,
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
