"""Evaluate a run or a model: figures, compared with chance, and a report."""

from __future__ import annotations

import json
import os
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import torch
from rich.console import Console
from rich.text import Text
from torch import Tensor

from megabatch import files
from megabatch.config.file import refuse_references
from megabatch.config.settings import resolve_device
from megabatch.data.glyphs import load_glyphs
from megabatch.data.sources import split_prefixes
from megabatch.errors import UsageError, naming, plural
from megabatch.evaluation.captions import GLYPHS, open_val_data
from megabatch.evaluation.config import EvalConfig, check
from megabatch.evaluation.embed import Encoder
from megabatch.evaluation.report import content
from megabatch.evaluation.report.page import make_page
from megabatch.evaluation.run_folder import Opened, open_model, open_run, write_atomically
from megabatch.evaluation.samples import open_labelled
from megabatch.evaluation.table import KINDS
from megabatch.evaluation.tasks import ClassTask, Matched, RetrievalTask, glyph_tasks
from megabatch.evaluation.zeroshot import read_prompts
from megabatch.imports import named_extras
from megabatch.models import Towers
from megabatch.options import option
from megabatch.ranks import all_gather_values, is_first, on_all_ranks
from megabatch.similarity.distributed.comm import rank_and_size
from megabatch.terminal import plain_console

Task: TypeAlias = RetrievalTask | ClassTask
OnFigures: TypeAlias = Callable[[dict[str, Any]], None]


@named_extras()
def evaluate_run(
    run: str | Path,
    *,
    group: object = "local",
    on_figures: OnFigures | None = None,
    **settings: Any,
) -> dict[str, Any]:
    """Evaluate a run's weights; writes `evaluation.json`, `report.json`, `report.html` into `RUN`.

    Args:
        run: the run's folder: `config.toml` and `model.safetensors` or checkpoints.
        group: ranks that share the work and must all call this: None for the default group if
            torch.distributed is initialised, a process group, or "local" for this process alone.
            The figures are the same on all ranks, and the same as with one process.
        on_figures: called on the first rank with the content of `evaluation.json`, before anything
            is written: a trainer logs the figures, whose curves the report shows.
        settings: other fields of `EvalConfig` by name: `val_data`, `device`, `precision` ...

    Returns:
        The content of `evaluation.json`: `run`, `retrieval` and `zero_shot` (by task, then "model"
        and "chance"), `date`, `seconds`.

    Raises:
        UsageError: there is no run or no weights, files are damaged, or a setting is impossible;
            MissingLibrary, if a library is not installed.
    """
    config = EvalConfig(**{"run": Path(run), "device": "cpu", **settings})
    return evaluate(config, group=group, on_figures=on_figures)


def evaluate(
    config: EvalConfig,
    *,
    group: object = None,
    console: Console | None = None,
    on_figures: OnFigures | None = None,
) -> dict[str, Any]:
    """As `evaluate_run`; `console` shows a description and this process's progress."""
    started = time.perf_counter()
    console = console or plain_console(quiet=True)
    opened, tasks, device = on_all_ranks(lambda: _open(config, group), group)
    folder = config.output or opened.folder
    assert folder is not None  # by `check`
    _check_ranks(config, opened, tasks, group)
    for line in _description(opened, tasks):
        console.print(line)
    title = f"evaluating {config.run or config.model}"
    with console.status(Text(title)) as status:  # as Text, since a string would be markup
        encoder = Encoder(
            *(opened.towers, device, config.precision, config.batch_size, config.workers, group),
            lambda words: status.update(Text(f"{title}: {words}")),
        )
        opened.towers.module.to(device)
        entries: dict[str, dict[str, Any]] = {kind: {} for kind in KINDS}
        shown = []
        for task in tasks:
            kind, entry, matched = task.score(encoder)
            entries[kind][task.key] = entry
            shown.append(matched)
    evaluation = {
        "run": _about(opened, device, config.precision),
        **entries,
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "seconds": round(time.perf_counter() - started, 2),
    }
    if is_first(group):
        if on_figures is not None:
            on_figures(evaluation)
        text = json.dumps(evaluation, indent=2, ensure_ascii=False, allow_nan=False)
        (folder / content.NAME).unlink(missing_ok=True)  # of an earlier evaluation
        write_atomically(folder / "evaluation.json", text + "\n")
        write_report(folder, shown)
    return evaluation


def write_report(folder: Path, shown: Sequence[Matched]) -> None:
    """Write `report.json` and `report.html` next to `folder/evaluation.json`."""
    content.save(folder, shown)
    write_atomically(folder / "report.html", make_page([folder]))


def _open(config: EvalConfig, group: object) -> tuple[Opened, list[Task], str]:
    """Check the configuration, open the model and the data, and choose this process's device."""
    check(config)
    local_rank = int(os.environ.get("LOCAL_RANK", "0")) if rank_and_size(group)[1] > 1 else None
    device = str(resolve_device(config.device, local_rank))
    if config.run is not None:
        opened = open_run(config.run, ema=config.weights == "ema", trust=config.trust)
    else:
        opened = open_model(str(config.model), config.pretrained)
    opened = replace(opened, towers=prefixing(opened, config))
    folder = config.output or opened.folder
    if folder and is_first(group) and (problem := files.folder_problem(folder)):
        raise UsageError(f"--output {folder}: {problem}")
    return opened, open_tasks(config, opened), device


def prefixing(opened: Opened, config: EvalConfig) -> Towers:
    """The towers, which put prefixes before texts: by default those of the run's first source."""
    given, towers, names = vars(config), opened.towers, ("query_prefix", "caption_prefix")
    query, caption = (split_prefixes(given[n] or opened.config.get(n))[0] for n in names)
    if query:
        towers = replace(towers, eval_transform=partial(_prefixed, towers.eval_transform, query))
    if caption:
        towers = replace(towers, tokenizer=partial(_prefixed, towers.tokenizer, caption))
    return towers


def _prefixed(made: Callable[[Any], Tensor], prefix: str, texts: str | list[str]) -> Tensor:
    return made(prefix + texts if isinstance(texts, str) else [prefix + text for text in texts])


def _description(opened: Opened, tasks: Sequence[Task]) -> list[str]:
    """Lines about the model and the data, with the files' damage."""
    step = "" if opened.step is None else f", step {opened.step:,}"
    lines = [f"{opened.towers.name} ({opened.weights or 'random weights'}{step}):"]
    for task in tasks:
        lines.append(f"  {task.title}: {plural(len(task.samples), task.samples.first)}")
        lines += [f"  damaged: {line}" for line in task.samples.damage]
    return lines


def _check_ranks(config: EvalConfig, opened: Opened, tasks: Sequence[Task], group: object) -> None:
    """Raise a UsageError, on all ranks, if their settings, weights or numbers of samples differ.

    Each rank reads the files for itself and encodes its own part: with other files than rank 0's,
    some samples would count twice and others not at all.
    """
    if rank_and_size(group)[1] == 1:
        return
    facts: dict[str, Any] = {option(name): str(value) for name, value in vars(config).items()}
    for name in ("device", "workers", "output"):
        del facts[option(name)]
    facts |= {f"number of samples of {task.key}": len(task.samples) for task in tasks}
    name = "checksum of the weights"
    for tensor in opened.towers.module.state_dict().values():
        data = tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
        facts[name] = zlib.crc32(data, facts.get(name, 0))
    of_ranks = all_gather_values(facts, group)
    for name in facts:
        values = [str(found.get(name)) for found in of_ranks]
        if len(set(values)) > 1:
            raise UsageError(f"{name}: {', '.join(values)} by rank; expected the same on all")


def _about(opened: Opened, device: str, precision: str) -> dict[str, Any]:
    return {
        "model": opened.towers.name,
        "parameters": sum(p.numel() for p in opened.towers.module.parameters()),
        "weights": opened.weights.name if opened.weights else "random",
        "step": opened.step,
        "train_data": opened.config.get("train_data"),
        "device": device,
        "precision": precision,
        "torch": torch.__version__,
    }


# Tasks.


def open_tasks(config: EvalConfig, opened: Opened) -> list[Task]:
    """The tasks that a checked configuration describes, for the model of `opened`.

    Raises:
        UsageError: data cannot be opened, do not suit the model, or are missing.
    """
    of_texts = opened.towers.first == "text"
    for name in ("class_data", "csv_img_key") if of_texts else ("csv_query_key", "query_prefix"):
        if getattr(config, name) is not None:
            takes = "texts with texts, not images" if of_texts else "images with texts, not texts"
            raise UsageError(f"{option(name)}: {opened.towers.name} takes {takes}")
    if opened.towers.multi_vector and config.class_data is not None:
        raise UsageError(
            f"--class-data: {opened.towers.name} has a feature for each token; expected a model "
            "with one for each image and text"
        )
    val_data = config.val_data
    if val_data is None and config.class_data is None:
        val_data = _own_data(opened, config.trust)
    tasks: list[Task] = []
    if val_data == GLYPHS and not of_texts:
        tasks += glyph_tasks(load_glyphs())
    elif val_data is not None:
        given = {name: value for name, value in vars(config).items() if value is not None}
        settings = {**opened.config, **given}
        with naming("--val-data"):
            samples = open_val_data(val_data, opened.towers.name, opened.towers.first, settings)
        tasks.append(RetrievalTask("pairs", val_data, samples))
    if config.class_data is not None:
        with naming("--class-data"):
            test = open_labelled(config.class_data)
        prompts = read_prompts(config.class_names, config.templates, test)
        tasks.append(ClassTask("classes", config.class_data, test, prompts))
    return tasks


def _own_data(opened: Opened, trust: bool) -> str:
    """The held-out pairs of a run for which no data are named.

    Raises:
        UsageError: it has none, or they are a command to run, which needs `trust`.
    """
    train_data = opened.config.get("train_data")
    own = opened.config.get("val_data") or (GLYPHS if train_data == GLYPHS else None)
    if own is None:
        raise UsageError(
            f"the run was trained on {train_data}: give held-out pairs by --val-data (for the "
            "built-in glyphs: --val-data glyphs) or labelled images by --class-data"
        )
    if not trust:
        refuse_references({"val_data": own}, f"{opened.folder}/config.toml")
    return str(own)
