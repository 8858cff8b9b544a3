"""Folders of runs with tiny models."""

from __future__ import annotations

import contextlib
import functools
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from megabatch.models import ModelOptions, Towers, create
from megabatch.training import TrainConfig, save_config
from megabatch.training.checkpoint import save_tensors

assert_near = functools.partial(torch.testing.assert_close, atol=1e-6, rtol=0)


def write_run(folder: Path, model: str, **settings: Any) -> Towers:
    """A run's folder with weights that no initialisation has; returns the model as evaluated."""
    folder.mkdir(parents=True)
    save_config(TrainConfig(model=model, **settings), folder / "config.toml")
    towers = create(model, options=ModelOptions.of({"loss": "clip", **settings}))
    with torch.no_grad():
        for parameter in towers.module.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    towers.module.eval()
    save_tensors(towers.module.state_dict(), folder / "model.safetensors")
    return towers


def own_model() -> Towers:
    """The model that the reference `tests.export.runs:own_model` makes."""
    return create("glyph-small")


@contextlib.contextmanager
def reports() -> Iterator[list[str]]:
    """Collect messages that transformers logs, such as the report of weights that do not fit."""
    transformers: Any = pytest.importorskip("transformers")
    logged: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: logged.append(record.getMessage())  # type: ignore[method-assign]
    logger = transformers.utils.logging.get_logger("transformers")
    logger.addHandler(handler)
    try:
        yield logged
    finally:
        logger.removeHandler(handler)


def transformers_model(folder: Path) -> Any:
    """The model that transformers loads from a folder, which has its weights and no others."""
    transformers: Any = pytest.importorskip("transformers")
    model, found = transformers.AutoModel.from_pretrained(folder, output_loading_info=True)
    assert not [*found["missing_keys"], *found["unexpected_keys"]]
    return model


def pictures() -> list[Image.Image]:
    """Noise, wider than high and square."""
    random = np.random.default_rng(0)
    sizes = ((40, 60), (32, 32))
    return [Image.fromarray(random.integers(0, 256, (*s, 3), dtype=np.uint8)) for s in sizes]


def change_json(path: Path, **values: Any) -> None:
    """Set some values in a file."""
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))
