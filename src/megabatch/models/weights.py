"""Files of weights on the local disk."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from megabatch.errors import UsageError, one_line
from megabatch.models.names import DOWNLOAD

#: File names of a folder's weights, in order of preference: open_clip's, then a run's.
_IN_FOLDER = (
    "open_clip_model.safetensors",
    "open_clip_pytorch_model.safetensors",
    "model.safetensors",
    "open_clip_pytorch_model.bin",
)


def find(path: Path) -> Path:
    """Return the file of weights: `path` itself, or that in a folder by open_clip or a run.

    Raises:
        UsageError: there is none.
    """
    found = path
    if path.is_dir():
        found = next((path / n for n in _IN_FOLDER if (path / n).is_file()), path / _IN_FOLDER[2])
    if not found.is_file():
        raise UsageError(f"--pretrained: there is no file {found} ({DOWNLOAD})")
    return found


def load(path: Path) -> dict[str, Tensor]:
    """Load the tensors in a file from `find`, by name, without DDP's prefix "module.".

    A torch file is read with `weights_only`, which runs no code from it; the tensors may be under
    its "state_dict", as OpenCLIP's trainer saves them.

    Raises:
        UsageError: it is damaged, or has no tensors by name, or code to run.
    """
    try:
        if path.suffix == ".safetensors":
            read: Any = load_file(path)
        else:
            read = torch.load(path, map_location="cpu", weights_only=True)
            read = read.get("state_dict", read)
        found = {n: value for n, value in read.items() if isinstance(value, Tensor)}
    except Exception as error:  # of many types, depending on the damage
        reason = one_line(error, 200)
        if isinstance(error, pickle.UnpicklingError):  # torch's own message says how to run it
            reason = "it holds more than tensors, and code in a pickle is not run"
        raise UsageError(f"--pretrained: {path} cannot be used: {reason}") from error
    return {name.removeprefix("module."): value for name, value in found.items()}


def load_model(module: nn.Module, path: Path, name: str) -> None:
    """Load a whole model's weights.

    A bias that the file lacks keeps its initial value; if the module's is None, it gets the file's.

    Args:
        module: of `Towers`.
        path: from `find`.
        name: of the model, for errors.

    Raises:
        UsageError: the file holds another model's weights.
    """
    state = load(path)
    bias = getattr(module, "logit_bias", torch.nan)
    if "logit_bias" in state and bias is None:
        module.logit_bias = nn.Parameter(torch.zeros_like(state["logit_bias"]))
    elif isinstance(bias, Tensor):
        state.setdefault("logit_bias", bias.detach())
    try:
        module.load_state_dict(state)
    except RuntimeError as error:
        raise UsageError(f"--pretrained: {path} does not hold the weights of {name}") from error
