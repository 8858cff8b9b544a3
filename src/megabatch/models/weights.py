"""Files of weights on the local disk, of a whole model or of one tower."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megabatch.errors import UsageError, one_line
from megabatch.models.layers import FIRST, Tower

if TYPE_CHECKING:
    from torch import Tensor, nn

# Libraries are imported by the functions that use them: `find` needs none.

#: File names of a folder's weights, in order of preference: open_clip's, then a run's.
_IN_FOLDER = (
    "open_clip_model.safetensors",
    "open_clip_pytorch_model.safetensors",
    "model.safetensors",
    "open_clip_pytorch_model.bin",
)
_TORCH = (".pt", ".pth", ".bin", ".ckpt")


def find(path: Path, option: str = "--pretrained") -> Path:
    """Return the file of weights: `path` itself, or that in a folder by open_clip or a run.

    `option` is for errors.

    Raises:
        UsageError: there is none, or its format is not supported.
    """
    if path.is_dir():
        found = [path / name for name in _IN_FOLDER if (path / name).is_file()]
        if not found:
            raise UsageError(f"{option}: {path} has none of {', '.join(_IN_FOLDER)}")
        if (path / "config.json").is_file() and not (path / "open_clip_config.json").is_file():
            raise UsageError(
                f"{option}: {path} is a folder of Hugging Face transformers, whose names of "
                "weights are not open_clip's (load it with --model hf:PATH)"
            )
        return found[0]
    if path.suffix not in (".safetensors", *_TORCH):
        raise UsageError(
            f"{option}: expected a local .safetensors or {', '.join(_TORCH)} file, or a folder "
            f"that open_clip or a run wrote, got {str(path)!r} (nothing is downloaded)"
        )
    if not path.is_file():
        raise UsageError(f"{option}: there is no file {path}")
    return path


def names(path: Path) -> set[str]:
    """Return the names of the tensors in a file from `find`, as `load` returns them.

    Raises:
        UsageError: it is damaged, or not a file of tensors.
    """
    from safetensors import SafetensorError, safe_open

    if path.suffix in _TORCH:
        return set(load(path))
    try:
        with safe_open(path, framework="pt") as file:
            return {_plain(name) for name in file.keys()}  # noqa: SIM118 - it is not a mapping
    except (SafetensorError, OSError) as error:
        raise UsageError(f"--pretrained: {path} is damaged: {error}") from error


def load(path: Path) -> dict[str, Tensor]:
    """Load the tensors in a file from `find`, by name, without DDP's prefix "module.".

    A torch file is read with `weights_only`, which runs no code from it; the tensors may be under
    its "state_dict", as OpenCLIP's trainer saves them.

    Raises:
        UsageError: it is damaged, or has anything but tensors.
    """
    import torch
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        if path.suffix not in _TORCH:
            return {_plain(name): value for name, value in load_file(path).items()}
        read: Any = torch.load(path, map_location="cpu", weights_only=True)
    except (SafetensorError, OSError, RuntimeError, EOFError) as error:
        raise UsageError(f"--pretrained: {path} is damaged: {_first_line(error)}") from error
    except pickle.UnpicklingError as error:
        raise UsageError(
            f"--pretrained: {path} holds more than tensors, and code in a pickle is not run"
        ) from error
    state = read.get("state_dict", read) if isinstance(read, dict) else None
    if not isinstance(state, dict) or not any(isinstance(v, torch.Tensor) for v in state.values()):
        raise UsageError(f"--pretrained: {path} has no tensors by name, nor under 'state_dict'")
    return {_plain(name): value for name, value in state.items() if isinstance(value, torch.Tensor)}


def fill(module: nn.Module, state: dict[str, Tensor], path: Path, name: str) -> None:
    """Load all of a module's weights; the file's path and the model's name are for errors.

    Raises:
        UsageError: they are another model's weights.
    """
    try:
        module.load_state_dict(state)
    except RuntimeError as error:
        raise UsageError(f"--pretrained: {path} does not hold the weights of {name}") from error


def _plain(name: str) -> str:
    return name.removeprefix("module.")


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


# Prefixes that a file's names may lack, compared with the whole model's: those of a whole model, a
# tower, a timm trunk; a text tower may also be a submodule in the file, but not in the model.
_PREFIXES = {"image": ("", "visual.", "visual.trunk.", "first."), "text": ("", "text.", "second.")}


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
    stored = load(find(path, option))
    wanted = {name for name in module.state_dict() if _is_of(name, tower)}
    missing: set[str] = wanted
    for state, needed in _readings(stored, wanted, tower):
        lacking = needed - state.keys()
        if needed and not lacking:
            found = {name: state[name] for name in needed}
            try:
                resize_pos_embed(found, module)  # neither affects other models
                resize_text_pos_embed(found, module)
                module.load_state_dict(found, strict=False)
            except Exception as error:  # other sizes; open_clip's resizing raises various kinds
                raise UsageError(
                    f"{option}: {path} is of another tower: {one_line(error)}"
                ) from error
            return
        missing = min(missing, lacking or missing, key=len)
    raise UsageError(
        f"{option}: {path} lacks {len(missing)} of the {len(wanted)} tensors of the {tower} tower, "
        f"such as {min(missing)}"
    )


def _readings(
    stored: dict[str, Tensor], wanted: set[str], tower: Tower
) -> Iterator[tuple[dict[str, Tensor], set[str]]]:
    """Yield the file's tensors under possible names in the model, with the names that it needs."""
    for prefix in _PREFIXES[tower]:
        needed = {name for name in wanted if name.startswith(prefix)}
        yield {prefix + name: value for name, value in stored.items()}, needed
    yield {name.removeprefix("text."): value for name, value in stored.items()}, wanted


def _is_of(name: str, tower: Tower) -> bool:
    if name in ("logit_scale", "logit_bias"):
        return False
    return name.startswith(FIRST) == (tower == "image")
