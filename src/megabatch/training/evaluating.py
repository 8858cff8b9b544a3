"""The evaluation at the end of a run, by all ranks, and the check that it will have data."""

from __future__ import annotations

import importlib
import shutil
from pathlib import Path
from typing import Any

from rich.console import Console

from megabatch.config.settings import TrainConfig
from megabatch.errors import UsageError, naming
from megabatch.imports import MissingLibrary, named_extras
from megabatch.training import validation
from megabatch.training.trackers import Trackers
from megabatch.training.world import World

# Evaluation needs matplotlib and scikit-learn, so it is imported only if requested.


def problems(config: TrainConfig, first: str) -> list[str]:
    """Reasons why the evaluation would fail after hours of training.

    `first`: the model's first input, "image" or "text".
    """
    if not config.evaluate:
        return []
    try:
        with named_extras():
            importlib.import_module("megabatch.evaluation.run")
            if config.val_data is None:  # the glyphs, and digits too
                importlib.import_module("sklearn.datasets")
    except MissingLibrary as missing:
        return [f"--evaluate: {missing}"]
    if config.val_data in (None, "glyphs"):
        return []
    from megabatch.evaluation.captions import open_val_data, reading_of

    assert config.val_data is not None
    try:
        with naming("--val-data"):
            reading = reading_of(vars(config))
            open_val_data(config.val_data, config.model, first, reading)
    except UsageError as error:
        return [str(error)]
    return []


def readable(folder: Path, world: World) -> bool:
    """Whether all ranks can read the weights: the folder may be local to one machine."""
    there = (folder / "model.safetensors").exists()
    return all(world.gather(there))


def evaluate(
    config: TrainConfig, step: int, world: World, console: Console, trackers: Trackers
) -> None:
    """Evaluate the run after its last step, on all ranks of the world; rank 0 prints the figures.

    Raises:
        UsageError: on all ranks.
    """
    from megabatch.evaluation import evaluate_run
    from megabatch.evaluation.table import print_evaluation

    def record(evaluation: dict[str, Any]) -> None:
        weights = config.output / "model.safetensors"
        validation.record(
            *(config, step, validation.figures(evaluation)),
            lambda path: shutil.copyfile(weights, path),
            *(trackers, console),
        )

    several = world.size > 1
    with console.status("evaluating"), world.failures("evaluating"):
        evaluation = evaluate_run(
            config.output,
            device=world.device.type if several else str(world.device),
            group=None if several else "local",
            val_data=config.val_data,
            on_figures=record,
            trust=True,  # this run wrote the folder, and has run the model's code
        )
    if world.main:
        print_evaluation(evaluation, console)
        console.print(f"report:  {config.output / 'report.html'}")
