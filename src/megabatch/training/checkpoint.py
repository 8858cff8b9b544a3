"""Atomic checkpoints: complete or absent, whenever the process dies.

A checkpoint is a folder `step-00000123` with `model.safetensors`, `optimizer.safetensors`,
`state.json` and the run's `config.toml`, by which it can be evaluated and exported as a run's
folder. Nothing in it is a pickle. It is written to a temporary folder next to its place,
flushed to the disk and renamed: a folder with the final name is complete. `state.json` also has the
size and SHA-256 of the other two files, so that later damage is found before anything is loaded.

**With several ranks** (DDP, FSDP2) rank 0 gathers full tensors, one at a time over the devices, and
writes this same format; it alone reads it and sends the others their parts. So a checkpoint is
independent of the number of ranks and of the layout, and a single rename commits it. The formats of
torch.distributed.checkpoint have a pickle, or shards that can be missing unnoticed, and are not
atomic; their advantage, parallel writing, matters from tens of billions of parameters on.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from megabatch.errors import UsageError, one_line
from megabatch.files import new_folder, replacing

FORMAT = 1
_NAME = re.compile(r"step-(\d+)")
_TENSOR_FILES = ("model.safetensors", "optimizer.safetensors")


@dataclass
class Checkpoint:
    """The state of a run: weights, optimizer tensors, and `state`, which JSON can represent.

    `state["step"]` is the number of steps done.
    """

    model: dict[str, Tensor]
    optimizer: dict[str, Tensor]
    state: dict[str, Any]


class TrainingStopped(UsageError):
    """Training cannot continue; earlier checkpoints remain valid."""

    exit_code = 1  # not a mistake in the command


def place(folder: Path, step: int) -> Path:
    """The folder of a step's checkpoint in `folder` (RUN/checkpoints)."""
    return folder / f"step-{step:08d}"


def save(folder: Path, checkpoint: Checkpoint, *, keep: int) -> None:
    """Write a checkpoint into `folder` (RUN/checkpoints), then delete all but the newest `keep`.

    RUN has the `config.toml`.

    Raises:
        TrainingStopped: it could not be written (a full disk, say). The incomplete one is removed,
            earlier ones stay.
    """
    try:
        with new_folder(place(folder, checkpoint.state["step"])) as partial:
            shutil.copyfile(folder.parent / "config.toml", partial / "config.toml")
            _write_files(partial, checkpoint)
        _flush_folder(folder)
    except (OSError, SafetensorError, UsageError) as error:
        raise TrainingStopped(
            f"the checkpoint of step {checkpoint.state['step']} could not be written: "
            f"{one_line(error)}; earlier ones are intact"
        ) from error
    for old in _newest_first(folder)[keep:]:
        shutil.rmtree(old, ignore_errors=True)


def load_newest(folder: Path) -> Checkpoint | None:
    """Read the newest checkpoint, if there is one, and remove the incomplete ones of a killed run.

    Raises:
        TrainingStopped: it is damaged.
    """
    for partial in folder.glob(".step-*.partial-*"):
        shutil.rmtree(partial, ignore_errors=True)
    if not (found := _newest_first(folder)):
        return None
    newest, *older = found
    try:
        state = json.loads((newest / "state.json").read_text(encoding="utf-8"))
        if state["format"] != FORMAT:
            raise ValueError(f"format {state['format']}, expected {FORMAT}")
        for name, facts in state["files"].items():
            if _facts(newest / name) != facts:
                raise ValueError(f"{name} differs from what was written")
        model, optimizer = (load_file(newest / name) for name in _TENSOR_FILES)
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        before = f"; delete it, and --resume continues from {older[0].name}" if older else ""
        raise TrainingStopped(f"{newest} is damaged: {one_line(error)}{before}") from error
    return Checkpoint(model, optimizer, state)


def save_tensors(tensors: dict[str, Tensor], path: Path) -> None:
    """Write a .safetensors file atomically.

    Raises:
        OSError, SafetensorError: it cannot be written.
    """
    # safetensors refuses tensors that share memory, and writes a slice's whole storage.
    separate: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, tensor in tensors.items():
        value = tensor.detach().cpu().contiguous()
        shared = value.data_ptr() in seen or value.untyped_storage().nbytes() > value.nbytes
        separate[name] = value.clone() if shared else value
        seen.add(value.data_ptr())
    with replacing(path) as partial:
        save_file(separate, partial, metadata={"format": "pt"})


def _write_files(partial: Path, checkpoint: Checkpoint) -> None:
    for name, tensors in zip(_TENSOR_FILES, (checkpoint.model, checkpoint.optimizer), strict=True):
        save_tensors(tensors, partial / name)
    facts = {name: _facts(partial / name) for name in _TENSOR_FILES}
    state = {"format": FORMAT, "files": facts, **checkpoint.state}
    with (partial / "state.json").open("w", encoding="utf-8") as file:
        json.dump(state, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    _flush_folder(partial)


def _facts(path: Path) -> dict[str, Any]:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return {"bytes": path.stat().st_size, "sha256": digest.hexdigest()}


def _newest_first(folder: Path) -> list[Path]:
    """Checkpoints; a user's copy, such as step-00000100.bak, is neither read nor deleted."""
    steps = {path: _NAME.fullmatch(path.name) for path in folder.glob("step-*")}
    found = {path: int(match[1]) for path, match in steps.items() if match}
    return sorted(found, key=found.__getitem__, reverse=True)


def _flush_folder(folder: Path) -> None:
    """Flush the entries of a folder to the disk, so that renames survive a power failure."""
    if sys.platform == "win32":  # which opens no folders
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
