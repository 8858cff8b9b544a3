"""Evaluate a run or a model: figures, compared with chance and baselines, and a report."""

from __future__ import annotations

import contextlib
import json
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

from megabatch import files
from megabatch.config.references import refuse_references
from megabatch.data.glyphs import load_glyphs
from megabatch.data.mixture import SEPARATOR
from megabatch.errors import UsageError, naming, plural
from megabatch.evaluation.captions import GLYPHS, READING, open_val_data, reading_of
from megabatch.evaluation.classification import ClassTask, score_classes
from megabatch.evaluation.config import DIGITS, EvalConfig, check, choose_device
from megabatch.evaluation.embed import Encoder
from megabatch.evaluation.report import content
from megabatch.evaluation.report.page import make_page
from megabatch.evaluation.run_folder import Opened, open_model, open_run, write_atomically
from megabatch.evaluation.samples import Labelled, first_of, open_labelled
from megabatch.evaluation.tasks import Matched, Task, glyph_tasks, pairs_task, score
from megabatch.evaluation.zeroshot import (
    CAPTIONED_DIGITS,
    UNICODE_DIGITS,
    DigitLabels,
    Prompts,
    read_names,
    read_templates,
)
from megabatch.hints import option
from megabatch.imports import named_extras
from megabatch.models import glyph
from megabatch.ranks import all_gather_values, is_first, on_all_ranks
from megabatch.similarity.distributed.comm import rank_and_size

# Settings that ranks need not share: of the process, and paths, since each machine may have its own
# copies.
_OF_A_RANK = {
    *("device", "workers", "output", "run", "pretrained", "val_data", "image_folder"),
    *("class_data", "class_train_data", "class_names", "templates"),
}


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
    given: dict[str, Any] = {"device": "cpu", **settings}
    given = {name: tuple(v) if isinstance(v, list) else v for name, v in given.items()}
    config = EvalConfig(run=Path(run), **given)
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

    `val_data` is evaluated by retrieval, `class_data` by classification. Without either, a run is
    evaluated on the `val_data` that it was trained with. If that is "glyphs", or none and the run
    was trained on the built-in glyphs, these are held-out faces among their own names, held-out
    characters among all names, and `class_data="digits"`, scikit-learn's handwritten digits, which
    it has never seen.

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
    several, writes = rank_and_size(group)[1] > 1, is_first(group)
    plan = on_all_ranks(lambda: _prepare(config, several, writes), group)
    opened, classes = plan.opened, plan.classes
    check_ranks(config, opened, plan.tasks, classes, group)
    for line in _announcement(plan, config):
        announce(line)
    opened.towers.module.to(plan.device)
    settings = config.precision, config.batch_size, config.workers
    encoder = Encoder(opened.towers, plan.device, *settings, group, report=report)
    retrieval, zero_shot, classification = {}, {}, {}
    shown: list[Matched] = []
    for task in plan.tasks:
        retrieval[task.key], matched = score(encoder, task)
        shown.append(matched)
    if classes is not None:
        scored = score_classes(encoder, classes)
        zero_shot = {classes.key: scored.zero_shot} if scored.zero_shot else {}
        classification = {classes.key: scored.classification} if scored.classification else {}
        shown += [scored.matched] if scored.matched else []
    evaluation = {
        "run": _describe(opened, encoder),
        "retrieval": retrieval,
        "zero_shot": zero_shot,
        "classification": classification,
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "images_per_second": round(encoder.images / encoder.seconds, 1),
        "seconds": round(time.perf_counter() - started, 2),
    }
    if writes:
        on_figures(evaluation)
        text = json.dumps(evaluation, indent=2, ensure_ascii=False, allow_nan=False)
        with contextlib.suppress(OSError):  # of an earlier evaluation, if this process dies now
            (plan.folder / content.NAME).unlink()
        write_atomically(plan.folder / "evaluation.json", text + "\n")
        write_report(plan.folder, shown)
    return evaluation


def write_report(folder: Path, shown: Sequence[Matched]) -> None:
    """Write `report.json` and `report.html` next to `folder/evaluation.json`."""
    content.save(folder, shown)
    write_atomically(folder / "report.html", make_page([folder]))


@dataclass(frozen=True)
class _Plan:
    """A checked evaluation: errors in a configuration are found before there is one."""

    device: str
    folder: Path
    opened: Opened
    tasks: list[Task]
    classes: ClassTask | None


def _prepare(config: EvalConfig, several: bool, writes: bool) -> _Plan:
    check(config)
    device = choose_device(config.device, several=several)
    if config.run is not None:
        opened = open_run(config.run, ema=config.weights == "ema", trust=config.trust)
    else:
        assert config.model is not None  # by `check`, as is the folder
        opened = open_model(config.model, config.pretrained)
    folder = config.output or opened.folder
    assert folder is not None
    if writes and (problem := files.folder_problem(folder)):
        raise UsageError(f"--output {folder}: {problem}")
    return _Plan(device, folder, opened, *open_tasks(config, opened))


def _announcement(plan: _Plan, config: EvalConfig) -> list[str]:
    """A description of the evaluation, with the files' notes and damage."""
    opened, classes = plan.opened, plan.classes
    weights = str(opened.weights or "random weights")
    if opened.step is not None:
        weights += f", step {opened.step:,}"
    lines = [f"{opened.towers.name} ({weights}) on {plan.device}, {config.precision}:"]
    sources: list[tuple[str, Any]] = [(task.title, task.samples) for task in plan.tasks]
    sources += [(classes.title, classes.test)] if classes else []
    for title, samples in sources:
        lines.append(f"  {title}: {plural(len(samples), first_of(samples))}")
        lines += [f"  note: {line}" for line in getattr(samples, "notes", [])]
        lines += [f"  damaged: {line}" for line in getattr(samples, "damage", [])]
    return lines


def check_ranks(
    config: EvalConfig,
    opened: Opened,
    tasks: Sequence[Task],
    classes: ClassTask | None,
    group: object,
) -> None:
    """Raise a UsageError, on all ranks, if their settings, weights or numbers of samples differ.

    Each rank reads the files for itself and encodes its own part: with other files than rank 0's,
    some samples would count twice and others not at all.
    """
    if rank_and_size(group)[1] == 1:
        return
    own = {f.name for f in fields(config)} - _OF_A_RANK
    facts: dict[str, Any] = {option(name): str(getattr(config, name)) for name in sorted(own)}
    facts["samples of the retrieval tasks"] = [len(task.samples) for task in tasks]
    if classes is not None:
        data = [(len(images), images.classes) for images in (classes.test, classes.train) if images]
        prompts = classes.prompts and classes.prompts.texts()
        facts["checksum of classes and prompts"] = zlib.crc32(repr((data, prompts)).encode())
    if opened.weights is not None:
        checksum = 0
        for tensor in opened.towers.module.state_dict().values():
            data = tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
            checksum = zlib.crc32(data, checksum)
        facts["checksum of the weights"] = checksum
    found = all_gather_values(facts, group)
    for rank, of_rank in enumerate(found):
        for name, value in of_rank.items():
            if value != found[0][name]:
                raise UsageError(
                    f"{name}: {value} on rank {rank}, {found[0][name]} on rank 0; expected the "
                    "same on all of them"
                )


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


# Tasks.


def open_tasks(config: EvalConfig, opened: Opened) -> tuple[list[Task], ClassTask | None]:
    """The tasks that a checked configuration describes, for the model of `opened`.

    Raises:
        UsageError: data cannot be opened, do not suit the model, or are missing.
    """
    of_texts = opened.towers.first == "text"
    images = ("class_data", "image_folder", "split", "csv_img_key")
    for name in images if of_texts else ("csv_query_key",):
        if getattr(config, name) is not None:
            takes = "texts with texts, not images" if of_texts else "images with texts, not texts"
            raise UsageError(f"{option(name)}: {opened.towers.name} takes {takes}")
    config = _with_default_data(config, opened)
    return _retrieval_tasks(config, opened), _class_task(config, _trained_on_glyphs(opened))


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
    train_data = opened.config.get("train_data")
    of_glyphs = train_data == GLYPHS and opened.towers.first == "image"
    own = opened.config.get("val_data") or (GLYPHS if of_glyphs else None)
    if own is None:
        raise UsageError(
            f"the run was trained on {train_data}: give held-out pairs by --val-data (for the "
            "built-in glyphs: --val-data glyphs) or labelled images by --class-data"
        )
    if not config.trust:
        refuse_references({"val_data": own}, f"{opened.folder}/config.toml")
    digits = DIGITS if of_glyphs and own == GLYPHS else None
    return replace(config, val_data=own, class_data=digits)


def _retrieval_tasks(config: EvalConfig, opened: Opened) -> list[Task]:
    val_data, towers = config.val_data, opened.towers
    if val_data is None:
        return []
    if val_data == GLYPHS and towers.first == "image":
        return glyph_tasks(load_glyphs())
    own = {name: getattr(config, setting) for name, setting in READING.items()}
    reading = reading_of(opened.config)
    reading |= {name: value for name, value in own.items() if value is not None}
    more: dict[str, Any] = {"image_folder": config.image_folder, "split": config.split}
    with naming("--val-data"):
        samples = open_val_data(val_data, towers.name, towers.first, reading, **more)
    return [pairs_task(val_data, samples)]


def _class_task(config: EvalConfig, of_glyphs: bool) -> ClassTask | None:
    """The classification task; `of_glyphs`: whether the model was trained on these."""
    if config.class_data is None:
        return None
    options: dict[str, Any] = {}
    if config.class_train_data is not None:
        with naming("--class-train-data"):
            options["train"] = open_labelled(config.class_train_data)
        if "knn" in config.methods:
            options["neighbours"] = config.knn_k, config.knn_temperature
        options["probe"] = "linear-probe" in config.methods
    if config.class_data == DIGITS:
        digits, own = DigitLabels(), UNICODE_DIGITS if of_glyphs else CAPTIONED_DIGITS
        options |= {"key": DIGITS, "note": "Scikit-learn's 8×8 images, enlarged."}
        return ClassTask("handwritten digits", digits, _prompts(config, digits, own), **options)
    with naming("--class-data"):
        test = open_labelled(config.class_data)
    return ClassTask(config.class_data, test, _prompts(config, test), **options)


def _prompts(config: EvalConfig, test: Labelled, own: Prompts | None = None) -> Prompts | None:
    """The requested prompts; without names or templates the data's own, if there are any."""
    if "zero-shot" not in config.methods:
        return None
    if own is not None and config.class_names is None and config.templates is None:
        return own
    names = read_names(config.class_names, test.classes, test.n_classes)
    worded_by = config.templates or str(test.templates or "openai")
    named_by = config.class_names or "those of the data"
    return Prompts(names, read_templates(worded_by), f"from {worded_by}; class names: {named_by}")
