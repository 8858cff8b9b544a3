"""Files of weights on the local disk, of a whole model or of one tower."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from megabatch.errors import UsageError, one_line
from megabatch.models.names import DOWNLOAD
from megabatch.models.towers import Tower, tower_of

#: File names of a folder's weights, in order of preference: open_clip's, then a run's.
_IN_FOLDER = (
    "open_clip_model.safetensors",
    "open_clip_pytorch_model.safetensors",
    "model.safetensors",
    "open_clip_pytorch_model.bin",
)
#: Prefixes that a file's names may lack: of a tower alone, of a timm trunk.
_PREFIXES = {"image": ("", "visual.", "visual.trunk."), "text": ("", "text.")}


def find(path: Path, option: str = "--pretrained") -> Path:
    """Return the file of weights: `path` itself, or that in a folder by open_clip or a run.

    Raises:
        UsageError: there is none.
    """
    found = path
    if path.is_dir():
        found = next((path / n for n in _IN_FOLDER if (path / n).is_file()), path / _IN_FOLDER[2])
    if not found.is_file():
        raise UsageError(f"{option}: there is no file {found} ({DOWNLOAD})")
    return found


def load(path: Path, option: str = "--pretrained") -> dict[str, Tensor]:
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
    except pickle.UnpicklingError as error:
        raise UsageError(
            f"{option}: {path} holds more than tensors, and code in a pickle is not run"
        ) from error
    except Exception as error:  # of many types, depending on the damage
        reason = one_line(error, 200)
        raise UsageError(f"{option}: {path} has no tensors that can be read: {reason}") from error
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


def load_tower(module: nn.Module, tower: Tower, path: Path) -> None:
    """Load one tower's weights; other tensors in the file are ignored.

    Args:
        module: of `Towers`.
        tower: "image" is the first tower.
        path: as `pretrained` of `create`: a file of a whole model, of the tower alone, or of a timm
            trunk, in which case the projection keeps its weights.

    Raises:
        UsageError: the file lacks some of the tower's tensors, or has them in other sizes.
    """
    from open_clip.model import resize_pos_embed, resize_text_pos_embed

    option = f"--pretrained-{tower}-path"
    stored = load(find(path, option), option)
    # A text tower may be a submodule in the file, but not in the model.
    stored |= {name.removeprefix("text."): value for name, value in stored.items()}
    shared = ("logit_scale", "logit_bias")
    wanted = [n for n in module.state_dict() if n not in shared and tower_of(n) == tower]
    missing = wanted
    for prefix in _PREFIXES[tower]:
        names = {name: name.removeprefix(prefix) for name in wanted if name.startswith(prefix)}
        absent = [name for name, in_file in names.items() if in_file not in stored]
        if names and not absent:
            break
        missing = min(missing, absent or missing, key=len)
    else:
        raise UsageError(
            f"{option}: {path} lacks {len(missing)} of the {len(wanted)} tensors of the {tower} "
            f"tower, such as {min(missing, default='')}"
        )
    state = {name: stored[in_file] for name, in_file in names.items()}
    try:
        resize_pos_embed(state, module)  # neither affects other models
        resize_text_pos_embed(state, module)
        module.load_state_dict(state, strict=False)
    except Exception as error:  # other sizes; open_clip's resizing raises various kinds
        raise UsageError(f"{option}: {path} is of another tower: {one_line(error)}") from error
