"""Evaluation at the end of a run and during it, by all ranks, and the best weights so far."""

from __future__ import annotations

import contextlib
import importlib
import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from safetensors import SafetensorError
from torch import Tensor

from megabatch import files
from megabatch.config.file import to_dict
from megabatch.config.settings import TrainConfig
from megabatch.data.fetch import random_state_kept
from megabatch.errors import UsageError, naming
from megabatch.imports import MissingLibrary, named_extras
from megabatch.models import ModelOptions, create
from megabatch.training.trackers import Trackers
from megabatch.training.world import World

# Evaluation needs matplotlib and jinja2, so it is imported only if requested.


def problems(config: TrainConfig, first: str) -> list[str]:
    """Reasons why the evaluation would fail after hours of training.

    `first`: the model's first input, "image" or "text".
    """
    if config.val_data is None:
        return []
    try:
        with named_extras():
            importlib.import_module("megabatch.evaluation.run")
    except MissingLibrary as missing:
        return [f"--val-data: {missing}"]
    if config.val_data == "glyphs":
        return []
    from megabatch.evaluation.captions import open_val_data, reading_of

    try:
        with naming("--val-data"):
            reading = reading_of(vars(config))
            open_val_data(config.val_data, config.model, first, reading)
    except UsageError as error:
        return [str(error)]
    return []


def evaluate(
    config: TrainConfig, step: int, world: World, console: Console, trackers: Trackers
) -> None:
    """Evaluate the run after its last step, on all ranks of the world; rank 0 prints the figures.

    Raises:
        UsageError: on all ranks.
    """
    from megabatch.evaluation import evaluate_run
    from megabatch.evaluation.table import print_evaluation

    def record_last(evaluation: dict[str, Any]) -> None:
        write = partial(shutil.copyfile, config.output / "model.safetensors")
        record(config, step, figures(evaluation), write, trackers, console)

    if not all(world.gather((config.output / "model.safetensors").exists())):
        console.print("not evaluated: not all machines can read the run's folder (megabatch eval)")
        return
    with console.status("evaluating"), world.failures("evaluating"):
        evaluation = evaluate_run(
            config.output,
            device=world.device.type if world.size > 1 else str(world.device),
            group=world.group,
            on_figures=record_last,
            trust=True,  # this run wrote the folder, and has run the model's code
        )
    if world.main:
        print_evaluation(evaluation, console)
        console.print(f"report:  {config.output / 'report.html'}")


class Validation:
    """Evaluates a run's weights on the data and tasks of the evaluation at its end.

    The weights go into a second copy of the towers, which is on the device only meanwhile. So the
    trained module's modes, wrappers, shards and compiled blocks are not touched, and neither is the
    random state. All ranks call every method together.

    Args:
        config: has `val_data`.
        world: the ranks, which share the work.

    Raises:
        UsageError: the data cannot be opened, or there is no figure `best_metric`.
    """

    def __init__(self, config: TrainConfig, world: World) -> None:
        from megabatch.evaluation.config import EvalConfig
        from megabatch.evaluation.run import check_ranks, open_tasks
        from megabatch.evaluation.run_folder import Opened

        self._world = world
        settings = to_dict(config)
        with random_state_kept():
            self._towers = create(config.model, options=ModelOptions.of(settings))
        opened = Opened(self._towers, None, config.output, settings)
        evaluation = EvalConfig(run=config.output, trust=True)
        self._tasks = world.attempt(lambda: open_tasks(evaluation, opened))
        check_ranks(evaluation, opened, self._tasks, world.group)
        if config.best_metric is not None and config.best_metric not in self.names():
            raise UsageError(
                f"--best-metric {config.best_metric}: expected one of {', '.join(self.names())}"
            )

    def names(self) -> list[str]:
        """The names of the figures."""
        from megabatch.evaluation.table import ACCURACY, RETRIEVAL, WAYS
        from megabatch.evaluation.tasks import ClassTask

        of_ways = [f"{way}/{name}" for way in WAYS for name in RETRIEVAL.values()]
        return [
            f"{task.key}/{name}"
            for task in self._tasks
            for name in (ACCURACY.values() if isinstance(task, ClassTask) else of_ways)
        ]

    def figures(self, weights: dict[str, Tensor]) -> dict[str, float]:
        """The figures of full weights, which only rank 0 needs to have; the same on every rank.

        Raises:
            UsageError: the features are not finite, or no sample can be read.
        """
        from megabatch.evaluation.embed import Encoder
        from megabatch.evaluation.run import score_all

        module, world = self._towers.module, self._world
        encoder = Encoder(self._towers, str(world.device), group=world.group)
        with world.failures("evaluating"), random_state_kept():
            module.to(world.device)
            module.load_state_dict(dict(world.tensors_from_main(weights)))
            entries, _ = score_all(encoder, self._tasks)
            module.to("cpu")
        return figures(entries)


def figures(evaluation: dict[str, Any]) -> dict[str, float]:
    """The model's figures in `evaluation.json`, by names such as `pairs/image_to_text/recall@1`."""
    tasks = {**evaluation.get("retrieval", {}), **evaluation.get("zero_shot", {})}
    return {
        f"{task}/{name}": value
        for task, contenders in tasks.items()
        for name, value in contenders["model"].items()
        if not name.endswith("queries")
    }


def record(
    config: TrainConfig,
    step: int,
    found: dict[str, float],
    write: Callable[[Path], object],
    trackers: Trackers,
    console: Console,
) -> None:
    """Log a step's figures and, with `val_frequency`, keep its weights if they are the best so far.

    A file that cannot be written is no reason to stop: a message says so.

    Args:
        config, step, found: the run, and the figures of this step's weights.
        write: writes these weights to a path, atomically.
        trackers, console: get the figures, and messages.
    """
    try:
        trackers.validation(step, config.val_data, found)
        metric = config.best_metric or next(iter(found), "")
        of = metric, config.val_data
        if config.val_frequency and keep_best(config.output, of, found[metric], step, write):
            console.print(f"  the best {metric} so far; weights: {config.output / 'best'}")
    except (OSError, SafetensorError) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or error
        console.print(
            f"the evaluation of step {step} could not be written: {reason}; training continues"
        )


def keep_best(
    run: Path,
    of: tuple[str, str | None],
    value: float,
    step: int,
    write: Callable[[Path], object],
) -> bool:
    """Write weights to RUN/best if their value is better than that of the weights there.

    RUN/best is a run's folder of its own, with `config.toml`, `model.safetensors` and `best.json`:
    the metric, `val_data`, the value and the step. A lower median rank is better, and a higher
    value of any other metric. If the process is killed between the last two files, a resumed run
    repeats the step and completes them.

    Args:
        run: the run's folder.
        of: the metric, and `val_data`, on which it was measured.
        value, step, write: the metric's value, and as in `record`.

    Returns:
        Whether it is better. The weights of another metric, or of other data, always give way.

    Raises:
        OSError, SafetensorError: a file cannot be written.
    """
    folder, (metric, val_data) = run / "best", of
    sign = -1 if metric.endswith("median_rank") else 1
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):  # none, or damaged
        before = json.loads((folder / "best.json").read_text(encoding="utf-8"))
        if (before["metric"], before["val_data"]) == of and sign * value <= sign * before["value"]:
            return False
    folder.mkdir(exist_ok=True)
    write(folder / "model.safetensors")
    shutil.copyfile(run / "config.toml", folder / "config.toml")
    about = {"metric": metric, "val_data": val_data, "value": value, "step": step}
    files.write_text(folder / "best.json", json.dumps(about, indent=1) + "\n")
    return True
