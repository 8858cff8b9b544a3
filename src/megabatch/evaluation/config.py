"""The settings of an evaluation."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, Literal

from pydantic import NonNegativeInt, PositiveInt
from pydantic.dataclasses import dataclass

from megabatch.config.settings import Device
from megabatch.errors import UsageError, one_line
from megabatch.options import CONFIG, option

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


@dataclass(frozen=True, config=CONFIG)
class EvalConfig:
    """Evaluate a run or any open_clip model: retrieval, classification, and a report to look at.

    If no data are named, a run is evaluated on the --val-data that it was trained with or, if it
    was trained on the built-in glyphs, on these. Under torchrun the processes share the work; the
    figures stay the same.
    """

    run: Path | None = None
    """The run's folder: config.toml with model.safetensors or checkpoints."""
    model: str | None = None
    """Instead of RUN: the name of a model, such as ViT-B-32, or module:function, your own."""
    pretrained: Path | None = None
    """The weights of --model: a local .safetensors or .pt file, or a folder."""
    weights: Literal["final", "ema"] = "final"
    """Weights of RUN: the trained ones, or their moving average (model-ema.safetensors)."""
    trust: bool = False
    """Allow the configuration of RUN to name code to run: a model of the form module:function."""
    output: Path | None = None
    """Folder for evaluation.json, report.json and report.html. Default: RUN."""

    val_data: str | None = None
    """Retrieval: images with one or several captions each: shards (.tar), tables (.csv, .tsv,
    .parquet, .jsonl, .arrow), a folder of them or one that Hugging Face's datasets saved; or
    "glyphs": held-out faces and characters."""
    csv_img_key: str | None = None
    """Column of image paths (or bytes) in a table. Default: as in the run's training data, else
    filepath, image, image_path or file_name."""
    csv_query_key: str | None = None
    """Column of first texts in a table, for a model of text pairs. Default: as in the run's
    training data, else query, anchor, question or sentence1."""
    csv_caption_key: str | None = None
    """Column of captions in a table. Default: as in the run's training data, else title, caption or
    text."""
    csv_separator: str | None = None
    """Separator of a text table. Default: a tab if the header has one, else a comma."""
    query_prefix: str | None = None
    """The prefix of each first text. Default: that of the run's first source."""
    caption_prefix: str | None = None
    """The prefix of each caption, second text or prompt. Default: likewise."""

    class_data: str | None = None
    """Classification: test images, in a folder with one folder per class, or in shards whose
    samples have a class index (cls)."""
    class_names: str | None = None
    """imagenet, or a text file with one name per line. Default: classnames.txt of the shards, or
    the folders' names."""
    templates: str | None = None
    """Prompts: openai (80), simple (7), or a file with one per line, {} for the name. Default:
    those that came with the shards, else openai."""

    device: Device = "auto"
    """Device of the encoders: cpu, cuda, cuda:1 ...; auto is cuda if there is one. Under torchrun
    each process takes its own."""
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    """Precision of the encoders; everything after them is in float32."""
    batch_size: PositiveInt = 512
    """Images or texts per forward pass of an encoder."""
    workers: NonNegativeInt = 0
    """Worker processes that read and transform images; 0: the evaluation's own process does."""


#: Settings that apply only together with another.
_ONLY_WITH = {
    "model": ("pretrained",),
    "run": ("trust",),
    "val_data": ("csv_img_key", "csv_query_key", "csv_caption_key", "csv_separator"),
    "class_data": ("class_names", "templates"),
}


def check(config: EvalConfig) -> None:
    """Refuse an impossible configuration before anything is read; UsageError names the setting."""
    if (config.run is None) == (config.model is None):
        raise UsageError("expected either a run's folder or --model NAME")
    for needs, names in _ONLY_WITH.items():
        for name in names:
            if getattr(config, name) and getattr(config, needs) is None:
                needed = "RUN" if needs == "run" else option(needs)
                raise UsageError(f"{option(name)}: only with {needed}")
    if config.model is not None:
        if config.output is None:
            raise UsageError("--output: needed with --model")
        if config.val_data is None and config.class_data is None:
            raise UsageError("--val-data or --class-data: needed with --model")
        if config.weights != "final":
            raise UsageError(
                "--weights: chooses between a run's weights; with --model use --pretrained"
            )


def read_config(folder: Path) -> dict[str, Any]:
    """Read the run's `config.toml`; UsageError if it is missing or damaged."""
    path = folder / "config.toml"
    if not folder.is_dir():
        raise UsageError(f"{folder} is not a folder")
    if not path.is_file():
        raise UsageError(f"{folder} is not a run: it has no config.toml")
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, OSError) as error:
        raise UsageError(f"{path} cannot be read: {one_line(error, 200)}") from error
