"""Evaluation at the end of a run and during it, by all ranks, and the best weights so far."""

from __future__ import annotations

import contextlib
import importlib
import json
import shutil
from pathlib import Path
from typing import Any

from rich.console import Console

from megabatch import files
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
    with naming("--val-data"):
        with named_extras():
            importlib.import_module("megabatch.evaluation.run")
            if config.val_data == "glyphs":
                return
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


def keep_best(
    run: Path, folder: Path, step: int, val_data: str | None, found: dict[str, float]
) -> str:
    """Copy an evaluated folder's weights to RUN/best if they are better than those there.

    The first figure decides: recall@1 from images (or first texts) to texts, of the first task.
    RUN/best is a run's folder of its own, with `config.toml`, `model.safetensors` and `best.json`:
    the metric, `val_data`, the value and the step. If the process is killed between the last two
    files, a resumed run repeats the step and completes them.

    Args:
        run: the run's folder. folder: has the weights of `step`.
        val_data, found: the data of the evaluation, and its figures.

    Returns:
        The figure's name; "" if they are not better. Those of other data always give way.

    Raises:
        OSError: a file cannot be written.
    """
    best = run / "best"
    metric, value = next(iter(found.items()))
    about = {"metric": metric, "val_data": val_data, "value": value, "step": step}
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):  # none, or damaged
        before = json.loads((best / "best.json").read_text(encoding="utf-8"))
        same = (before["metric"], before["val_data"]) == (metric, val_data)
        if same and value <= before["value"]:
            return ""
    best.mkdir(exist_ok=True)
    for name in ("config.toml", "model.safetensors"):
        with files.replacing(best / name) as partial:
            shutil.copyfile(folder / name, partial)
    files.write_text(best / "best.json", json.dumps(about, indent=1) + "\n")
    return metric
