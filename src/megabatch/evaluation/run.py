"""Evaluate a run or a model: every figure with chance and a baseline beside it, and a report."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

from megabatch.data.glyphs import GlyphSet, load_glyphs
from megabatch.errors import UsageError
from megabatch.evaluation.class_tasks import ClassTask, Neighbours, score_classes
from megabatch.evaluation.classification import chance, rank_by_similarity
from megabatch.evaluation.config import EvalConfig, check, choose_device
from megabatch.evaluation.embed import Encoder
from megabatch.evaluation.labels import open_labelled
from megabatch.evaluation.processes import is_first, together
from megabatch.evaluation.prompts import OPENAI, Prompts, read_names, read_templates
from megabatch.evaluation.report import Shown, write_report
from megabatch.evaluation.run_folder import Opened, open_model, open_run, write_atomically
from megabatch.evaluation.tasks import (
    Task,
    digit_baseline,
    glyph_tasks,
    pairs_task,
    record,
    score,
)
from megabatch.evaluation.val_data import open_val_data, reading_of
from megabatch.evaluation.zeroshot import (
    CAPTIONED_DIGITS,
    UNICODE_DIGITS,
    class_features,
    handwritten_digits,
)
from megabatch.similarity.exchange import rank_and_size


def evaluate_run(run: str | Path, *, group: object = "local", **settings: Any) -> dict[str, Any]:
    """Evaluate a run's weights; writes `RUN/evaluation.json` and `RUN/report.html`.

    In this process alone, unless a `group` is given: a trainer may call it on one of many.

    Args:
        run: the run's folder: `config.toml` and `model.safetensors` or checkpoints.
        group: as for `evaluate`.
        settings: other fields of `EvalConfig` by name: `val_data`, `device`, `precision` ...

    Returns, raises: as `evaluate`.
    """
    return evaluate(EvalConfig(run=Path(run), **{"device": "cpu", **settings}), group=group)


def evaluate(
    config: EvalConfig, *, group: object = None, report: Callable[[str], None] = lambda words: None
) -> dict[str, Any]:
    """Evaluate; the first process writes `evaluation.json` and `report.html` to the output folder.

    `val_data` is evaluated by retrieval, `class_data` by classification. Without either, a model
    that was trained on the built-in glyphs is asked for held-out faces among their own names, and
    for held-out characters among all names. Unless there is `class_data`, scikit-learn's
    handwritten digits are classed too, without having seen any.

    Args:
        config: what and how.
        group: processes that share the work and must all call this: None for the default group
            where torch.distributed is initialised, a process group, or "local" for this process
            alone. The figures are the same on all of them, and the same as one process's.
        report: is told how far this process is, in words.

    Returns:
        What `evaluation.json` holds: `run`, `retrieval` (by task, then "model", "chance" and, where
        there is one, "baseline"), `zero_shot` likewise, `classification` (by task, then
        "neighbours", "probe", "chance"), `date`, `images_per_second` (read, transformed and encoded
        by all processes together), `seconds`.

    Raises:
        UsageError: no run, no weights, damaged files, or a setting that is impossible.
    """
    started = time.perf_counter()
    several = rank_and_size(group)[1] > 1
    plan = together(lambda: _prepare(config, several), group)
    opened, glyphs, tasks, classes = plan.opened, plan.glyphs, plan.tasks, plan.classes
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
    shown = [  # pairs of texts have nothing to show beside them
        Shown(s.task.title, s.matched, s.task.picture_of, s.task.pictures_are)
        for s in scored
        if opened.towers.first == "image"
    ]
    if classes is None and opened.towers.first == "image":
        zero_shot["digits"] = _digits(encoder, glyphs)
    elif classes is not None:
        classed = score_classes(encoder, classes)
        if classed.zero_shot is not None and classed.matched is not None:
            zero_shot["classes"] = classed.zero_shot
            shown.append(Shown(classes.title, classed.matched))
        if classed.classification is not None:
            classification["classes"] = classed.classification
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
        _write(plan.folder, opened.folder, evaluation, shown)
    return evaluation


@dataclass(frozen=True)
class _Plan:
    """What is evaluated, on what: all that can be wrong with a configuration is found by then."""

    device: str
    folder: Path
    opened: Opened
    glyphs: GlyphSet | None
    tasks: list[Task]
    classes: ClassTask | None


def _prepare(config: EvalConfig, several: bool) -> _Plan:
    check(config)
    device = choose_device(config.device, several=several)
    opened = _open(config)
    folder = config.output or opened.folder
    assert folder is not None  # `check` sees to it
    if opened.towers.first == "text":
        _refuse_images(config, opened.towers.name)
    elif config.csv_query_key is not None:
        raise UsageError(f"csv-query-key: {opened.towers.name} takes images with texts, not texts")
    glyphs, tasks = _retrieval_tasks(config, opened)
    return _Plan(device, folder, opened, glyphs, tasks, _class_task(config))


def _refuse_images(config: EvalConfig, model: str) -> None:
    """Refuse what a model of text pairs can be asked about images alone."""
    for option in ("class_data", "image_folder", "split", "csv_img_key"):
        if getattr(config, option) is not None:
            option = option.replace("_", "-")
            raise UsageError(f"{option}: {model} takes texts with texts, not images")
    if config.val_data is not None and config.val_data.endswith(".json"):
        raise UsageError(
            f"{model} takes texts with texts, but {config.val_data} is a list of images (pairs of "
            "texts are read from tables)"
        )


def _open(config: EvalConfig) -> Opened:
    if config.run is not None:
        return open_run(config.run, ema=config.weights == "ema")
    assert config.model is not None  # `check` sees to it
    return open_model(config.model, config.pretrained)


def _retrieval_tasks(config: EvalConfig, opened: Opened) -> tuple[GlyphSet | None, list[Task]]:
    """What is asked for, or what fits the training data; with the glyphs, if it is they."""
    train_data = opened.config.get("train_data")
    val_data = config.val_data
    if val_data is None and config.class_data is None:
        if opened.towers.first == "text":
            raise UsageError(f"{opened.towers.name} takes texts: give held-out pairs by --val-data")
        if train_data != "glyphs":
            raise UsageError(
                f"the run was trained on {train_data}: give held-out pairs by --val-data (for the "
                "built-in glyphs: --val-data glyphs) or labelled images by --class-data"
            )
        val_data = "glyphs"
    if val_data == "glyphs" and opened.towers.first == "image":
        glyphs = load_glyphs()
        return glyphs, glyph_tasks(glyphs)
    if val_data is None:
        return None, []
    own = {
        "image_column": config.csv_img_key,
        "query_column": config.csv_query_key,
        "caption_column": config.csv_caption_key,
        "separator": config.csv_separator,
    }
    reading = reading_of(opened.config, val_data)
    reading |= {option: value for option, value in own.items() if value is not None}
    samples = open_val_data(
        val_data,
        opened.towers.name,
        opened.towers.first,
        reading,
        image_folder=config.image_folder,
        split=config.split,
    )
    return None, [pairs_task(val_data, samples)]


def _class_task(config: EvalConfig) -> ClassTask | None:
    if config.class_data is None:
        return None
    test = open_labelled(config.class_data)
    train = None if config.class_train_data is None else open_labelled(config.class_train_data)
    prompts = None
    if "zero-shot" in config.methods:
        own = None if test.templates is None else str(test.templates)
        templates = read_templates(config.templates or own or OPENAI)
        prompts = Prompts(read_names(config.class_names, test.classes, test.n_classes), templates)
    knn = Neighbours(config.knn_k, config.knn_temperature) if "knn" in config.methods else None
    probe = "linear-probe" in config.methods
    return ClassTask(config.class_data, test, prompts, train, knn, probe)


def _digits(encoder: Encoder, glyphs: GlyphSet | None) -> dict[str, Any]:
    images, labels = handwritten_digits()
    prompts = UNICODE_DIGITS if glyphs else CAPTIONED_DIGITS
    classes = class_features(encoder.texts, prompts)
    features = encoder.images(images)
    ranked = rank_by_similarity(features, labels.to(features.device), classes, encoder.group)
    figures = {"model": ranked.figures(), "chance": chance(len(classes))}
    if glyphs:
        figures["baseline"] = digit_baseline(glyphs, prompts.names, images, labels)
    return {
        "title": "handwritten digits",
        "note": "Scikit-learn's 8×8 images, enlarged. Templates: "
        + ", ".join(f"“{template}”" for template in prompts.templates)
        + ".",
        "images": len(images),
        "classes": len(classes),
        **figures,
    }


def _describe(opened: Opened, encoder: Encoder) -> dict[str, Any]:
    weights = opened.weights
    if weights is not None and opened.folder is not None:
        weights = weights.relative_to(opened.folder)
    return {
        "model": opened.towers.name,
        "parameters": sum(p.numel() for p in opened.towers.module.parameters()),
        "weights": "random" if weights is None else weights.as_posix(),
        "train_data": opened.config.get("train_data"),
        "device": encoder.device,
        "precision": encoder.precision,
        "torch": torch.__version__,
    }


def _write(folder: Path, run: Path | None, evaluation: dict[str, Any], shown: list[Shown]) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"output: {folder} cannot be made: {error.strerror or error}") from error
    text = json.dumps(evaluation, indent=2, ensure_ascii=False, allow_nan=False)
    write_atomically(folder / "evaluation.json", text + "\n")
    write_report(folder, evaluation, shown, run)
