"""Evaluate a whole run: every figure with chance and a baseline beside it, and a report."""

from __future__ import annotations

import json
import time
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

from megabatch.data import open_pairs
from megabatch.data.glyphs import GlyphSet, load_glyphs
from megabatch.errors import UsageError
from megabatch.evaluation.embed import Encoder
from megabatch.evaluation.report import write_report
from megabatch.evaluation.run_folder import Run, open_run, write_atomically
from megabatch.evaluation.tasks import (
    Scored,
    Task,
    digit_baseline,
    glyph_tasks,
    pairs_task,
    record,
    score,
)
from megabatch.evaluation.zeroshot import (
    CAPTIONED_DIGITS,
    UNICODE_DIGITS,
    class_features,
    handwritten_digits,
    zero_shot_metrics,
)

PRECISIONS = ("fp32", "bf16")


def evaluate_run(
    run: str | Path,
    *,
    val_data: str | None = None,
    device: str = "cpu",
    precision: str = "fp32",
    batch_size: int = 512,
) -> dict[str, Any]:
    """Evaluate a run's weights; writes `RUN/evaluation.json` and `RUN/report.html`.

    A model trained on the built-in glyphs is asked for held-out faces among their own names, and
    for held-out characters among all names. Any other model is asked for the pairs of `val_data`.
    Both also class scikit-learn's handwritten digits without having seen any.

    Args:
        run: the run's folder: `config.toml` and `model.safetensors` or checkpoints.
        val_data: held-out pairs, as for `megabatch.data.open_pairs`; "glyphs" for the glyph tasks.
            None: "glyphs" if the model was trained on them.
        device: a torch device; precision: "fp32" or "bf16"; batch_size: of the encoders.

    Returns:
        What `evaluation.json` holds: `run`, `retrieval` (by task, then "model", "chance" and, where
        there is one, "baseline"), `zero_shot` likewise, `date`, `seconds`.

    Raises:
        UsageError: no run, no weights, damaged files, or a setting that is impossible.
    """
    started = time.perf_counter()
    _check_settings(device, precision, batch_size)
    opened = open_run(Path(run))
    train_data = opened.config.get("train_data")
    val_data = val_data or ("glyphs" if train_data == "glyphs" else None)
    if val_data is None:
        raise UsageError(
            f"the run was trained on {train_data}: give held-out pairs by --val-data (for the "
            "built-in glyphs: --val-data glyphs)"
        )
    opened.towers.module.to(device)
    encoder = Encoder(opened.towers, device, precision, batch_size)
    glyphs = load_glyphs() if val_data == "glyphs" else None
    tasks = glyph_tasks(glyphs) if glyphs else [_pairs_task(val_data, opened.config)]
    scored = [score(encoder, task) for task in tasks]
    evaluation = {
        "run": _describe(opened, encoder),
        "retrieval": {s.task.key: record(s) for s in scored},
        "zero_shot": {"digits": _digits(encoder, glyphs)},
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "seconds": round(time.perf_counter() - started, 2),
    }
    _write(opened.folder, evaluation, scored)
    return evaluation


def _pairs_task(val_data: str, config: dict[str, Any]) -> Task:
    pairs = open_pairs(  # tables have the columns that the training data had
        val_data,
        image_column=config.get("csv_img_key"),
        caption_column=config.get("csv_caption_key"),
        separator=config.get("csv_separator"),
    )
    return pairs_task(val_data, pairs)


def _check_settings(device: str, precision: str, batch_size: int) -> None:
    if precision not in PRECISIONS:
        raise UsageError(f"precision: {precision!r}; expected one of {', '.join(PRECISIONS)}")
    if batch_size < 1:
        raise UsageError(f"batch size: {batch_size}; expected at least 1")
    try:
        torch.zeros(1, device=device).cpu()
    except (RuntimeError, AssertionError) as error:  # torch raises either for a missing device
        raise UsageError(
            f"device {device!r} cannot be used: {str(error).splitlines()[0]}"
        ) from error


def _digits(encoder: Encoder, glyphs: GlyphSet | None) -> dict[str, Any]:
    images, labels = handwritten_digits()
    prompts = UNICODE_DIGITS if glyphs else CAPTIONED_DIGITS
    classes = class_features(encoder.texts, prompts)
    figures = zero_shot_metrics(encoder.images(images), labels, classes)
    if glyphs:
        figures["baseline"] = digit_baseline(glyphs, prompts.names, images, labels)
    return {
        "title": "handwritten digits",
        "note": "Scikit-learn's 8×8 images, enlarged. Templates: "
        + ", ".join(f"“{template}”" for template in prompts.templates)
        + ".",
        "images": len(images),
        "classes": len(prompts.names),
        **figures,
    }


def _describe(run: Run, encoder: Encoder) -> dict[str, Any]:
    return {
        "model": run.towers.name,
        "parameters": sum(p.numel() for p in run.towers.module.parameters()),
        "weights": run.weights.relative_to(run.folder).as_posix(),
        "train_data": run.config.get("train_data"),
        "device": encoder.device,
        "precision": encoder.precision,
        "torch": torch.__version__,
    }


def _write(folder: Path, evaluation: dict[str, Any], scored: list[Scored]) -> None:
    text = json.dumps(evaluation, indent=2, ensure_ascii=False, allow_nan=False)
    write_atomically(folder / "evaluation.json", text + "\n")
    write_report(folder, evaluation, scored)
