"""What a run's folder holds: its configuration, its weights, its log."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from megabatch import files
from megabatch.errors import UsageError
from megabatch.models import ModelOptions, Towers, create

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


@dataclass(frozen=True)
class Opened:
    """A model to evaluate: a run's, or one by name.

    weights: the file that the towers' weights came from, None where they are random; folder: the
    run's, and config: what its config.toml says; None and empty without a run.
    """

    towers: Towers
    weights: Path | None
    folder: Path | None = None
    config: dict[str, Any] = field(default_factory=dict)


def open_run(folder: Path, *, ema: bool = False) -> Opened:
    """Build the run's towers with `model.safetensors`, or with the newest checkpoint that is whole.

    With `ema` with `model-ema.safetensors`, the moving average of the weights.

    Raises:
        UsageError: the folder is no run, has no weights, or they are damaged or of another model.
    """
    config = read_config(folder)
    candidates = _moving_average(folder) if ema else _weight_files(folder)
    if not candidates:
        raise UsageError(f"{folder} has no weights: neither model.safetensors nor a checkpoint")
    model = config.get("model")
    if not isinstance(model, str):
        raise UsageError(f"{folder / 'config.toml'}: model must name a model, got {model!r}")
    try:
        towers = create(model, options=ModelOptions.of(config))
    except (UsageError, ValueError, TypeError, RuntimeError) as error:
        raise UsageError(f"{folder / 'config.toml'}: {error}") from error
    weights = _load_first_good(towers, candidates)
    return Opened(towers, weights, folder, config)


def open_model(name: str, pretrained: Path | None) -> Opened:
    """A model by name, as `megabatch.models.create` builds it; the same random one without weights.

    Raises:
        UsageError: no such model, or weights that are missing, damaged or another model's.
    """
    torch.manual_seed(0)  # all processes of a group evaluate the same one
    towers = create(name, pretrained=pretrained)
    own = Path(name.partition(":")[2]) if ":" in name else None  # local-dir:FOLDER
    return Opened(towers, pretrained or own)


def read_config(folder: Path) -> dict[str, Any]:
    """The run's `config.toml`; UsageError if the folder is no run or the file is damaged."""
    path = folder / "config.toml"
    if not folder.is_dir():
        raise UsageError(f"{folder} is no folder")
    if not path.is_file():
        raise UsageError(f"{folder} is no run: it has no config.toml")
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, OSError) as error:
        raise UsageError(f"{path} cannot be read: {_one_line(error)}") from error


def write_atomically(path: Path, text: str) -> None:
    """Write beside and rename, so that a reader never finds half a file."""
    try:
        files.write_text(path, text)
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror or error}") from error


def _moving_average(folder: Path) -> list[Path]:
    path = folder / "model-ema.safetensors"
    if not path.is_file():
        raise UsageError(
            f"{folder} has no model-ema.safetensors: it was trained without --ema-decay"
        )
    return [path]


def _weight_files(folder: Path) -> list[Path]:
    """The final weights alone if there are any, else the checkpoints' from the newest on."""
    final = folder / "model.safetensors"
    if final.is_file():
        return [final]
    return sorted(folder.glob("checkpoints/step-*/model.safetensors"), reverse=True)


def _load_first_good(towers: Towers, candidates: list[Path]) -> Path:
    failures: list[str] = []
    for path in candidates:
        try:
            _load(towers.module, load_file(path))
        except (SafetensorError, OSError) as error:
            failures.append(f"{path} is damaged: {_one_line(error)}")
        except RuntimeError as error:  # load_state_dict, after a list of every name
            failures.append(f"{path} holds the weights of another model: {_one_line(error)}")
        else:
            return path
    raise UsageError(
        failures[0] if len(failures) == 1 else f"no checkpoint is whole; {failures[0]}"
    )


def _load(module: torch.nn.Module, state: dict[str, torch.Tensor]) -> None:
    module.load_state_dict(state, strict=True)


def _one_line(error: Exception) -> str:
    text = " ".join(str(error).split())
    return text if len(text) <= 200 else text[:197] + "..."
