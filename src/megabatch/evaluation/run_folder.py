"""A run's folder: its configuration, its weights, its log."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from megabatch import files
from megabatch.config.file import refuse_references
from megabatch.errors import UsageError, one_line
from megabatch.evaluation.config import read_config
from megabatch.models import ModelOptions, Towers, create
from megabatch.models.names import is_trained


@dataclass(frozen=True)
class Opened:
    """A model to evaluate: a run's, or one by name.

    weights: the file of the towers' weights, None if they are random; folder: the run's; config:
    the content of its config.toml; step: of its weights, None if the folder does not tell it.
    """

    towers: Towers
    weights: Path | None
    folder: Path | None = None
    config: dict[str, Any] = field(default_factory=dict)
    step: int | None = None


def open_run(folder: Path, *, ema: bool = False, trust: bool = False) -> Opened:
    """Build the run's towers with `model.safetensors`, or with the newest checkpoint.

    With `ema`, the weights come from `model-ema.safetensors`, their moving average. With
    `trust`, the model may be code to run (`module:function`).

    Raises:
        UsageError: the folder is not a run, it names code to run, it has no weights, or they are
            damaged or belong to another model.
    """
    config = read_config(folder)
    weights = _weights_of(folder, ema)
    model = config.get("model")
    if not isinstance(model, str):
        raise UsageError(f"{folder / 'config.toml'}: model must name a model, got {model!r}")
    if not trust:
        refuse_references({"model": model}, folder / "config.toml")
    try:
        towers = create(model, options=ModelOptions.of(config))
    except (UsageError, ValueError, TypeError, RuntimeError) as error:
        raise UsageError(f"{folder / 'config.toml'}: {error}") from error
    try:
        towers.module.load_state_dict(load_file(weights))
    except (SafetensorError, OSError, RuntimeError) as error:
        reason = one_line(error, 200)
        raise UsageError(f"{weights} is damaged, or of another model: {reason}") from error
    return Opened(towers, weights, folder, config, _step_of(weights, folder))


def open_model(name: str, pretrained: Path | None) -> Opened:
    """Build a model by name, as `megabatch.models.create`; random weights are always the same.

    Raises:
        UsageError: there is no such model, or its weights are missing, damaged or another model's.
    """
    torch.manual_seed(0)  # all ranks evaluate the same weights
    towers = create(name, pretrained=pretrained)
    own = Path(name.partition(":")[2]) if is_trained(name) else None  # local-dir:FOLDER
    return Opened(towers, pretrained or own)


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Read the logged steps in order, one record each; none if the file is missing.

    Of evaluations during the training, one for each step and `val_data`. A run that was killed and
    resumed logs some steps twice: the later record is of the run that led to the weights. Lines
    that are not a record are skipped: a killed run may leave half a line.
    """
    if not path.is_file():
        return []
    by_step: dict[tuple[int, str | None], dict[str, Any]] = {}
    with path.open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            try:
                record = json.loads(line)
            except json.JSONDecodeError:
                continue
            if isinstance(record, dict) and isinstance(record.get("step"), int):
                by_step[record["step"], validated_on(record)] = record
    return sorted(by_step.values(), key=lambda record: record["step"])


def validated_on(record: dict[str, Any]) -> str | None:
    """The data of an evaluation during the training; None for the default data."""
    data = record.get("val_data")
    return data if isinstance(data, str) else None


def write_atomically(path: Path, text: str) -> None:
    """`megabatch.files.write_text`, also into a new folder; UsageError if it cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        files.write_text(path, text)
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror or error}") from error


def _weights_of(folder: Path, ema: bool) -> Path:
    """The file of a run's final weights if there are any, else that of its newest checkpoint."""
    weights = folder / ("model-ema.safetensors" if ema else "model.safetensors")
    if not ema and not weights.is_file():
        weights = max(folder.glob("checkpoints/step-*/model.safetensors"), default=weights)
    if not weights.is_file():
        why = "it was trained without --ema-decay" if ema else "and no checkpoint"
        raise UsageError(f"{folder} has no {weights.name}: {why}")
    return weights


def _step_of(weights: Path, folder: Path) -> int | None:
    """The step of a run's weights: a checkpoint's, or else the run's last one.

    Final weights are removed before the first step of a run that goes on, so a
    run that is not complete has its newest checkpoint's.
    """
    newest = max(folder.glob("checkpoints/step-*"), default=folder)
    checkpoint = newest if weights.parent == folder else weights.parent
    named = re.fullmatch(r"step-(\d+)", checkpoint.name)
    return int(named[1]) if named else None
