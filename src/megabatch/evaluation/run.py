"""Evaluate a run or a model: figures, compared with chance and baselines, and a report."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from itertools import compress
from pathlib import Path
from typing import Any

import torch

from megabatch import files
from megabatch.data.glyphs import GlyphSet, load_glyphs
from megabatch.data.mixture import SEPARATOR
from megabatch.errors import UsageError, naming, plural
from megabatch.evaluation.captions import GLYPHS, open_val_data, reading_of
from megabatch.evaluation.classification import ClassTask, Neighbours, score_classes
from megabatch.evaluation.config import DIGITS, METHODS, EvalConfig, check, choose_device
from megabatch.evaluation.embed import Encoder
from megabatch.evaluation.report.content import NAME as REPORT
from megabatch.evaluation.report.content import Confusion
from megabatch.evaluation.report.write import Shown, write_report
from megabatch.evaluation.run_folder import Opened, open_model, open_run, write_atomically
from megabatch.evaluation.same_on_ranks import check_ranks
from megabatch.evaluation.samples import Labelled, first_of, open_labelled
from megabatch.evaluation.tasks import Task, digit_baseline, glyph_tasks, pairs_task, record, score
from megabatch.evaluation.zeroshot import (
    CAPTIONED_DIGITS,
    OPENAI,
    UNICODE_DIGITS,
    DigitLabels,
    Prompts,
    read_names,
    read_templates,
)
from megabatch.imports import named_extras
from megabatch.models import glyph
from megabatch.ranks import is_first, on_all_ranks
from megabatch.references import refuse_references
from megabatch.similarity.distributed.comm import rank_and_size


def _ignored(_: object) -> None:
    pass


@named_extras()
def evaluate_run(
    run: str | Path,
    *,
    group: object = "local",
    report: Callable[[str], None] = _ignored,
    announce: Callable[[str], None] = _ignored,
    on_figures: Callable[[dict[str, Any]], None] = _ignored,
    **settings: Any,
) -> dict[str, Any]:
    """Evaluate a run's weights; writes `evaluation.json`, `report.json`, `report.html` into `RUN`.

    Without a `group` only this process evaluates: a trainer may call it on one rank of many.

    Args:
        run: the run's folder: `config.toml` and `model.safetensors` or checkpoints.
        group, report, announce, on_figures: as for `evaluate`.
        settings: other fields of `EvalConfig` by name: `val_data`, `device`, `precision` ...

    Returns, raises: as `evaluate`; MissingLibrary, a UsageError, if a library is not installed.
    """
    config = EvalConfig(run=Path(run), **{"device": "cpu", **settings})
    return evaluate(config, group=group, report=report, announce=announce, on_figures=on_figures)


def evaluate(
    config: EvalConfig,
    *,
    group: object = None,
    report: Callable[[str], None] = _ignored,
    announce: Callable[[str], None] = _ignored,
    on_figures: Callable[[dict[str, Any]], None] = _ignored,
) -> dict[str, Any]:
    """Evaluate; the first rank writes figures and a report to the output folder.

    `evaluation.json` contains the figures; `report.json` contains the examples and distributions
    that the report shows in addition, so that `megabatch report` can write `report.html` again at
    any time.

    `val_data` is evaluated by retrieval, `class_data` by classification. Without either, a run is
    evaluated on the `val_data` that it was trained with; or, if it had none and was trained on the
    built-in glyphs, as with `val_data="glyphs"` (held-out faces among their own names, held-out
    characters among all names) and `class_data="digits"` (scikit-learn's handwritten digits, which
    it has never seen).

    Args:
        config: the settings.
        group: ranks that share the work and must all call this: None for the default group if
            torch.distributed is initialised, a process group, or "local" for this process alone.
            The figures are the same on all ranks, and the same as with one process.
        report: called with messages about the progress of this process.
        announce: called before the evaluation begins, with each line of its description.
        on_figures: called on the first rank with the content of `evaluation.json`, before anything
            is written: a trainer logs the figures, whose curves the report shows.

    Returns:
        The content of `evaluation.json`: `run`, `retrieval` (by task, then "model", "chance" and,
        if there is one, "baseline"), `zero_shot` likewise, `classification` (by task, then
        "neighbours", "probe", "chance"), `date`, `images_per_second` (read, transformed and encoded
        by all ranks together), `seconds`.

    Raises:
        UsageError: there is no run or no weights, files are damaged, or a setting is impossible.
    """
    started = time.perf_counter()
    several = rank_and_size(group)[1] > 1
    plan = on_all_ranks(lambda: _prepare(config, several, writes=is_first(group)), group)
    opened, tasks, classes = plan.opened, plan.tasks, plan.classes
    check_ranks(config, opened, tasks, classes, group)
    for line in _announcement(plan, config):
        announce(line)
    opened.towers.module.to(plan.device)
    encoder = Encoder(
        opened.towers,
        plan.device,
        config.precision,
        config.batch_size,
        config.workers,
        group,
        report=report,
    )
    scored = [score(encoder, task) for task in tasks]
    zero_shot, classification = {}, {}
    confusions: dict[str, list[Confusion]] = {}
    shown = [Shown(s.task.title, s.matched, s.task.picture_of, s.task.pictures_are) for s in scored]
    if classes is not None:
        classed = score_classes(encoder, classes)
        if classed.zero_shot is not None and classed.matched is not None:
            zero_shot[classes.key] = classed.zero_shot
            shown.append(Shown(classes.title, classed.matched, of_classes=True))
        if classed.classification is not None:
            classification[classes.key] = classed.classification
        confusions[classes.title] = classed.confusions
    evaluation = {
        "run": _describe(opened, encoder),
        "retrieval": {s.task.key: record(s) for s in scored},
        "zero_shot": zero_shot,
        "classification": classification,
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "images_per_second": round(encoder.pace.images_per_second, 1),
        "seconds": round(time.perf_counter() - started, 2),
    }
    if is_first(group):
        on_figures(evaluation)
        _write(plan.folder, opened.folder, evaluation, shown, confusions)
    return evaluation


@dataclass(frozen=True)
class _Plan:
    """A checked evaluation: errors in a configuration are found before there is one."""

    device: str
    folder: Path
    opened: Opened
    tasks: list[Task]
    classes: ClassTask | None


def _announcement(plan: _Plan, config: EvalConfig) -> list[str]:
    """A description of the evaluation, with the files' notes and damage."""
    towers, classes = plan.opened.towers, plan.classes
    weights = str(plan.opened.weights or "random weights")
    if plan.opened.step is not None:
        weights += f", step {plan.opened.step:,}"
    lines = [f"{towers.name} ({weights}) on {plan.device}, {config.precision}:"]
    for task in plan.tasks:
        lines.append(
            f"  retrieval: {task.title}, {plural(len(task.samples), first_of(task.samples))}"
        )
    if classes is not None:
        wanted = (classes.prompts is not None, classes.neighbours is not None, classes.probe)
        how = ", ".join(compress(METHODS, wanted))
        lines.append(
            f"  classification: {classes.title}, {plural(len(classes.test), 'image')} ({how})"
        )
        if classes.prompts is not None:
            lines.append(f"  prompts: {classes.prompts.shown()}")
    sources = [*(task.samples for task in plan.tasks), classes and classes.test]
    for source in sources:
        lines += [f"  note: {line}" for line in getattr(source, "notes", [])]
        lines += [f"  damaged: {line}" for line in getattr(source, "damage", [])]
    return lines


def _prepare(config: EvalConfig, several: bool, *, writes: bool) -> _Plan:
    check(config)
    device = choose_device(config.device, several=several)
    opened = _open(config)
    folder = config.output or opened.folder
    assert folder is not None  # by `check`
    if writes and (problem := files.folder_problem(folder)):
        raise UsageError(f"--output {folder}: {problem}")
    return _Plan(device, folder, opened, *open_tasks(config, opened))


def open_tasks(config: EvalConfig, opened: Opened) -> tuple[list[Task], ClassTask | None]:
    """The tasks that a checked configuration describes, for the model of `opened`.

    Raises:
        UsageError: data cannot be opened, do not suit the model, or are missing.
    """
    if opened.towers.first == "text":
        _refuse_images(config, opened.towers.name)
    elif config.csv_query_key is not None:
        raise UsageError(
            f"--csv-query-key: {opened.towers.name} takes images with texts, not texts"
        )
    config = _with_default_data(config, opened)
    # One set for both kinds of tasks, since rendering it takes seconds.
    of_glyphs = _trained_on_glyphs(opened) and config.class_data == DIGITS
    glyphs = load_glyphs() if of_glyphs or config.val_data == GLYPHS else None
    return _retrieval_tasks(config, opened, glyphs), _class_task(config, opened, glyphs)


def _trained_on_glyphs(opened: Opened) -> bool:
    """Whether the model was trained on Unicode's names of characters.

    Without a run, glyph-small is assumed to be, and other models are not.
    """
    data = opened.config.get("train_data")
    if data is None:
        return opened.towers.name == glyph.NAME
    return GLYPHS in str(data).split(SEPARATOR)


def _with_default_data(config: EvalConfig, opened: Opened) -> EvalConfig:
    """The configuration, with the run's own held-out pairs or built-in tasks if it names no data.

    Raises:
        UsageError: it names no data, and the run has neither.
    """
    if config.val_data is not None or config.class_data is not None:
        return config
    if (own := opened.config.get("val_data")) is not None:
        if not config.trust:
            refuse_references({"val_data": own}, f"{opened.folder}/config.toml")
        return replace(config, val_data=str(own))
    if opened.towers.first == "text":
        raise UsageError(f"{opened.towers.name} takes texts: give held-out pairs by --val-data")
    train_data = opened.config.get("train_data")
    if train_data != GLYPHS:
        raise UsageError(
            f"the run was trained on {train_data}: give held-out pairs by --val-data (for the "
            "built-in glyphs: --val-data glyphs) or labelled images by --class-data"
        )
    return replace(config, val_data=GLYPHS, class_data=DIGITS)


def _refuse_images(config: EvalConfig, model: str) -> None:
    """Refuse options for images, for a model of text pairs."""
    for option in ("class_data", "image_folder", "split", "csv_img_key"):
        if getattr(config, option) is not None:
            option = option.replace("_", "-")
            raise UsageError(f"--{option}: {model} takes texts with texts, not images")
    if config.val_data is not None and config.val_data.endswith(".json"):
        raise UsageError(
            f"{model} takes texts with texts, but {config.val_data} is a list of images (pairs of "
            "texts are read from tables)"
        )


def _open(config: EvalConfig) -> Opened:
    if config.run is not None:
        return open_run(config.run, ema=config.weights == "ema", trust=config.trust)
    assert config.model is not None  # by `check`
    return open_model(config.model, config.pretrained)


def _retrieval_tasks(config: EvalConfig, opened: Opened, glyphs: GlyphSet | None) -> list[Task]:
    val_data = config.val_data
    if val_data is None:
        return []
    if val_data == GLYPHS and opened.towers.first == "image":
        assert glyphs is not None
        return glyph_tasks(glyphs)
    own = {
        "image_column": config.csv_img_key,
        "query_column": config.csv_query_key,
        "caption_column": config.csv_caption_key,
        "separator": config.csv_separator,
    }
    reading = reading_of(opened.config, val_data)
    reading |= {option: value for option, value in own.items() if value is not None}
    with naming("--val-data"):
        samples = open_val_data(
            val_data,
            opened.towers.name,
            opened.towers.first,
            reading,
            image_folder=config.image_folder,
            split=config.split,
        )
    return [pairs_task(val_data, samples)]


def _class_task(config: EvalConfig, opened: Opened, glyphs: GlyphSet | None) -> ClassTask | None:
    if config.class_data is None:
        return None
    train = None
    if config.class_train_data is not None:
        with naming("--class-train-data"):
            train = open_labelled(config.class_train_data)
    trained = train is not None
    options: dict[str, Any] = {
        "train": train,
        "neighbours": Neighbours(config.knn_k, config.knn_temperature)
        if trained and "knn" in config.methods
        else None,
        "probe": trained and "linear-probe" in config.methods,
    }
    if config.class_data != DIGITS:
        with naming("--class-data"):
            test = open_labelled(config.class_data)
        return ClassTask(config.class_data, test, _prompts(config, test), **options)
    digits = DigitLabels()
    of_glyphs = _trained_on_glyphs(opened)
    prompts = _prompts(config, digits, UNICODE_DIGITS if of_glyphs else CAPTIONED_DIGITS)
    if of_glyphs:
        assert glyphs is not None
        options["baseline"] = lambda: digit_baseline(
            glyphs, UNICODE_DIGITS.names, digits.images, digits.labels()
        )
    note = "Scikit-learn's 8×8 images, enlarged."
    return ClassTask("handwritten digits", digits, prompts, **options, key=DIGITS, note=note)


def _prompts(config: EvalConfig, test: Labelled, built_in: Prompts | None = None) -> Prompts | None:
    """The requested prompts, or else the data's own, which may be `built_in`."""
    if "zero-shot" not in config.methods:
        return None
    if built_in is not None and config.templates is None and config.class_names is None:
        return built_in
    if built_in is not None and config.class_names is None:
        names, named_by = built_in.names, "the digits' own"
    else:
        names = read_names(config.class_names, test.classes, test.n_classes)
        named_by = config.class_names or "those of the data"
    if built_in is not None and config.templates is None:
        templates, worded_by = built_in.templates, built_in.source
    else:
        own = None if test.templates is None else str(test.templates)
        worded_by = config.templates or own or OPENAI
        templates = read_templates(worded_by)
    return Prompts(names, templates, f"from {worded_by}; class names: {named_by}")


def _describe(opened: Opened, encoder: Encoder) -> dict[str, Any]:
    weights = opened.weights
    if weights is not None and opened.folder is not None:
        weights = weights.relative_to(opened.folder)
    return {
        "model": opened.towers.name,
        "parameters": sum(p.numel() for p in opened.towers.module.parameters()),
        "weights": "random" if weights is None else weights.as_posix(),
        "step": opened.step,
        "train_data": opened.config.get("train_data"),
        "device": encoder.device,
        "precision": encoder.precision,
        "torch": torch.__version__,
    }


def _write(
    folder: Path,
    run: Path | None,
    evaluation: dict[str, Any],
    shown: list[Shown],
    confusions: dict[str, list[Confusion]],
) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"--output {folder}: cannot be made: {error.strerror or error}") from error
    text = json.dumps(evaluation, indent=2, ensure_ascii=False, allow_nan=False)
    with contextlib.suppress(OSError):  # of an earlier evaluation, if this process is killed now
        (folder / REPORT).unlink()
    write_atomically(folder / "evaluation.json", text + "\n")
    write_report(folder, run, shown, confusions)
