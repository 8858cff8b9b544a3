"""Files of weights on the local disk: which formats are read, and what is in them."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

from megabatch.errors import UsageError

#: What a folder's weights are called, the first that is there: open_clip's names, then a run's.
_IN_FOLDER = (
    "open_clip_model.safetensors",
    "open_clip_pytorch_model.safetensors",
    "model.safetensors",
    "open_clip_pytorch_model.bin",
)
_TORCH = (".pt", ".pth", ".bin", ".ckpt")


def find(path: Path) -> Path:
    """The file that `path` means: itself, or the weights in a folder that open_clip or a run wrote.

    Raises:
        UsageError: there is none, or it is of a format that is not read.
    """
    if path.is_dir():
        found = [path / name for name in _IN_FOLDER if (path / name).is_file()]
        if not found:
            raise UsageError(f"--pretrained: {path} has none of {', '.join(_IN_FOLDER)}")
        if (path / "config.json").is_file() and not (path / "open_clip_config.json").is_file():
            raise UsageError(
                f"--pretrained: {path} is a folder of Hugging Face transformers, whose names of "
                "weights are not open_clip's (expected as --model hf:PATH)"
            )
        return found[0]
    if path.suffix not in (".safetensors", *_TORCH):
        raise UsageError(
            f"--pretrained: expected a local .safetensors or {', '.join(_TORCH)} file, or a folder "
            f"that open_clip or a run wrote, got {str(path)!r} (nothing is downloaded)"
        )
    if not path.is_file():
        raise UsageError(f"--pretrained: there is no file {path}")
    return path


def names(path: Path) -> set[str]:
    """The names of the tensors in a file that `find` gave, as `load` has them.

    Raises:
        UsageError: it is damaged, or no file of tensors.
    """
    if path.suffix in _TORCH:
        return set(load(path))
    try:
        with safe_open(path, framework="pt") as file:
            return {_plain(name) for name in file.keys()}  # noqa: SIM118 - it is no mapping
    except (SafetensorError, OSError) as error:
        raise UsageError(f"--pretrained: {path} is damaged: {error}") from error


def load(path: Path) -> dict[str, Tensor]:
    """The tensors in a file that `find` gave, by name, without the "module." that DDP puts before.

    A torch file is read with `weights_only`, which runs no code out of it; the tensors may be under
    its "state_dict", as OpenCLIP's trainer saves them.

    Raises:
        UsageError: it is damaged, or holds anything but tensors.
    """
    try:
        if path.suffix not in _TORCH:
            return {_plain(name): value for name, value in load_file(path).items()}
        read: Any = torch.load(path, map_location="cpu", weights_only=True)
    except (SafetensorError, OSError, RuntimeError, EOFError) as error:
        raise UsageError(f"--pretrained: {path} is damaged: {_first_line(error)}") from error
    except pickle.UnpicklingError as error:
        raise UsageError(
            f"--pretrained: {path} holds more than tensors, and what a pickle says is not run"
        ) from error
    state = read.get("state_dict", read) if isinstance(read, dict) else None
    if not isinstance(state, dict) or not any(isinstance(v, Tensor) for v in state.values()):
        raise UsageError(f"--pretrained: {path} has no tensors by name, nor under 'state_dict'")
    return {_plain(name): value for name, value in state.items() if isinstance(value, Tensor)}


def fill(module: nn.Module, state: dict[str, Tensor], path: Path, name: str) -> None:
    """Give a module all of its weights; the file's path and the model's name are for errors.

    Raises:
        UsageError: these are another model's weights.
    """
    try:
        module.load_state_dict(state)
    except RuntimeError as error:
        raise UsageError(f"--pretrained: {path} does not hold the weights of {name}") from error


def _plain(name: str) -> str:
    return name.removeprefix("module.")


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
