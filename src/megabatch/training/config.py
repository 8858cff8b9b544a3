"""What a run can be told, and which settings cannot be."""

from __future__ import annotations

import math
import types
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import torch


@dataclass(frozen=True)
class TrainConfig:
    """Train two towers on pairs with one contrastive loss over the whole global batch."""

    model: str = "glyph-small"
    """glyph-small, or the name of an open_clip architecture such as ViT-B-32."""
    pretrained: Path | None = None
    """Weights to start from: a local .safetensors file."""
    train_data: str = "glyphs"
    """"glyphs"; or .tar shards (WebDataset), .csv, .tsv or .parquet tables: a path, a pattern such
    as 'shards/{00000..00099}.tar', several joined by '::', or a folder of them."""
    csv_img_key: str | None = None
    """Column of image paths (or bytes) in a table. Default: filepath, image, image_path or
    file_name, whichever the table has."""
    csv_caption_key: str | None = None
    """Column of captions in a table. Default: title, caption or text."""
    csv_separator: str | None = None
    """Separator of a text table. Default: a comma, in .tsv files a tab."""
    output: Path = Path("runs/train")
    """The run's folder: configuration, logs, checkpoints, weights."""
    resume: bool = False
    """Continue the run in the output folder where its newest checkpoint left it. A folder without
    one is begun from the start, so the same command serves both."""

    global_batch_size: int = 4096
    """Pairs that are contrasted with each other in one step."""
    micro_batch_size: int = 512
    """Pairs that go through the towers at a time: bounds memory and changes no gradient (models
    with batch normalisation excepted)."""
    epochs: int = 16
    """Passes over the data."""
    steps: int | None = None
    """Optimizer steps; given, it decides instead of epochs."""

    lr: float = 1e-3
    """Peak learning rate."""
    lr_scheduler: Literal["cosine", "const"] = "cosine"
    """After the warm-up: fall to zero along a half cosine, or stay."""
    warmup: int = 20
    """Steps in which the learning rate rises linearly to its peak."""
    beta1: float = 0.9
    """AdamW's decay of the mean gradient."""
    beta2: float = 0.98
    """AdamW's decay of the mean squared gradient."""
    eps: float = 1e-6
    """AdamW's epsilon."""
    wd: float = 0.2
    """Weight decay of matrices; biases, gains and the logit scale have none."""
    grad_clip_norm: float | None = None
    """Largest norm of the whole gradient; longer ones are scaled down."""
    max_logit_scale: float = 100.0
    """The logit scale (1 / temperature) is clamped to this after each step."""
    precision: Literal["fp32", "bf16", "fp16"] = "bf16"
    """Of the towers' and the loss's products, by autocast (OpenCLIP's amp_bf16 and amp); weights
    stay in fp32. fp16 scales the loss."""
    device: str = "auto"
    """cpu, cuda, cuda:1 ...; auto takes cuda where there is one."""

    seed: int = 0
    """Of the weights, the order of the data, augmentation and dropout."""
    workers: int = 0
    """Processes that read and transform data; 0: none beside the trainer. Changes no result."""
    log_every: int = 1
    """Steps between two lines of metrics.jsonl and two points in TensorBoard."""
    checkpoint_every: int = 100
    """Steps between two checkpoints; 0: only at the end and on Ctrl-C."""
    keep_checkpoints: int = 2
    """How many of the newest checkpoints are kept."""
    evaluate: bool = False
    """Evaluate at the end, as `megabatch eval` does."""


def problems(config: TrainConfig) -> list[str]:
    """Every setting that is impossible whatever the data and the model, each with its reason."""
    wrong = list(_wrong_types(config))
    return wrong if wrong else [reason for reason in _out_of_range(config) if reason]


def resolve_device(name: str) -> torch.device:
    """The device that a configuration's `device` means here.

    Raises:
        ValueError: there is no such device.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ValueError(f"{name!r}; expected auto, cpu, cuda or cuda:N") from error
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"{name!r}; expected auto, cpu, cuda or cuda:N")
    count = torch.cuda.device_count()
    if device.type == "cuda" and (device.index or 0) >= count:
        raise ValueError(f"{name!r}, but this machine has {count} CUDA devices")
    return device


def _out_of_range(config: TrainConfig) -> Iterator[str | None]:
    for name in ("global_batch_size", "micro_batch_size", "log_every", "keep_checkpoints"):
        yield _unless(getattr(config, name) >= 1, config, name, "at least 1")
    for name in ("warmup", "workers", "checkpoint_every"):
        yield _unless(getattr(config, name) >= 0, config, name, "at least 0")
    length = "epochs" if config.steps is None else "steps"
    yield _unless(getattr(config, length) >= 1, config, length, "at least 1")
    for name in ("lr", "eps"):
        yield _unless(0 < getattr(config, name) < math.inf, config, name, "a number above 0")
    for name in ("beta1", "beta2"):
        yield _unless(0 <= getattr(config, name) < 1, config, name, "at least 0 and below 1")
    yield _unless(0 <= config.wd < math.inf, config, "wd", "at least 0")
    clip = config.grad_clip_norm
    yield _unless(clip is None or 0 < clip < math.inf, config, "grad_clip_norm", "above 0")
    scale = config.max_logit_scale
    yield _unless(1 <= scale < math.inf, config, "max_logit_scale", "at least 1")
    yield _unless(0 <= config.seed < 2**32, config, "seed", "at least 0 and below 2**32")
    try:
        resolve_device(config.device)
    except ValueError as error:
        yield f"device: {error}"


def _unless(holds: bool, config: TrainConfig, name: str, expected: str) -> str | None:
    return None if holds else f"{name}: {getattr(config, name)}; expected {expected}"


def _wrong_types(config: TrainConfig) -> Iterator[str]:
    hints = get_type_hints(TrainConfig)
    for field in fields(config):
        value = getattr(config, field.name)
        if not accepts(hints[field.name], value):
            yield f"{field.name}: {value!r}; expected {describe_type(hints[field.name])}"


def accepts(hint: Any, value: Any) -> bool:
    """Whether a value is of a field's type: exactly, but for whole numbers where a float goes."""
    if get_origin(hint) is Literal:
        return value in get_args(hint)
    if get_origin(hint) in (Union, types.UnionType):
        return any(accepts(part, value) for part in get_args(hint))
    if hint in (int, float) and isinstance(value, bool):
        return False
    return isinstance(value, (int, float) if hint is float else hint)


def describe_type(hint: Any) -> str:
    """A field's type in words."""
    if get_origin(hint) is Literal:
        return " or ".join(repr(choice) for choice in get_args(hint))
    if get_origin(hint) in (Union, types.UnionType):
        return " or ".join(describe_type(p) for p in get_args(hint) if p is not types.NoneType)
    words = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}
    return words.get(hint, "a path")
