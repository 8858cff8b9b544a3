"""Evaluation at the end of a run and during it, by all ranks."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from rich.console import Console

from megabatch.config.settings import TrainConfig
from megabatch.data.fetch import random_state_kept
from megabatch.errors import naming
from megabatch.imports import named_extras
from megabatch.training.trackers import Trackers
from megabatch.training.world import World

# Evaluation needs matplotlib and jinja2, so it is imported only if requested.


def check(config: TrainConfig, first: str) -> None:
    """Raise a UsageError if the evaluation would fail after hours of training.

    `first`: the model's first input, "image" or "text".
    """
    if config.val_data is None:
        return
    with naming("--val-data"), named_extras():
        importlib.import_module("megabatch.evaluation.run")
        if config.val_data != "glyphs":
            from megabatch.evaluation.captions import open_val_data

            open_val_data(config.val_data, config.model, first, vars(config))


def evaluate(
    config: TrainConfig, folder: Path, step: int, world: World, console: Console, trackers: Trackers
) -> dict[str, Any]:
    """Evaluate the weights in a folder, on all ranks of the world, and log the figures.

    The towers are built anew: the trained ones, their wrappers and shards, and the random state are
    not touched.

    Args:
        config: of the run, with `val_data`.
        folder: has `config.toml` and `model.safetensors`, and gets `evaluation.json` and a report.
        step: of the run, which these weights are from.
        world, console, trackers: of the run.

    Returns:
        The content of `evaluation.json`; {} if not all ranks can read the folder.

    Raises:
        UsageError: on all ranks.
    """
    from megabatch.evaluation import evaluate_run

    def log(evaluation: dict[str, Any]) -> None:
        trackers.validation(step, config.val_data, figures(evaluation))

    if not all(world.gather((folder / "model.safetensors").exists())):
        console.print("not evaluated: not all machines can read the run's folder (megabatch eval)")
        return {}
    with console.status("evaluating"), world.failures("evaluating"), random_state_kept():
        return evaluate_run(
            folder,
            device=world.device.type if world.size > 1 else str(world.device),
            group=world.group,
            on_figures=log,
            trust=True,  # this run wrote the folder, and has run the model's code
        )


def figures(evaluation: dict[str, Any]) -> dict[str, float]:
    """The model's figures in `evaluation.json`, by names such as `pairs/image_to_text/recall@1`."""
    tasks = {**evaluation.get("retrieval", {}), **evaluation.get("zero_shot", {})}
    return {
        f"{task}/{name}": value
        for task, contenders in tasks.items()
        for name, value in contenders["model"].items()
        if not name.endswith("queries")
    }


def best_step(run: Path, val_data: str | None, figure: str) -> int:
    """The step whose evaluation on this data has the highest figure, in RUN/validation.jsonl."""
    from megabatch.evaluation.run_folder import read_metrics, validated_on

    records = read_metrics(run / "validation.jsonl")
    same = [record for record in records if validated_on(record) == val_data]
    return int(max(same, key=lambda record: record[figure])["step"])
