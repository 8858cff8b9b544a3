"""Invalid settings, alone or in combination, each with its reason."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from megabatch.config.settings import (
    TRACKERS,
    TrainConfig,
    activation_bytes,
    check_device_name,
    resolve_device,
    tracker_names,
)
from megabatch.errors import did_you_mean
from megabatch.hints import is_reference, option, settings_of, shown, with_value
from megabatch.losses.registry import TRAINABLE, losses_with


@dataclass(frozen=True)
class Conflict:
    """Settings that contradict each other.

    Attributes:
        reason: the message; it begins with the setting as it is typed.
        between: the settings involved.
        instead: values, by setting, each of which alone would resolve the conflict.
    """

    reason: str
    between: tuple[str, ...]
    instead: Mapping[str, Any] = field(default_factory=dict)


def problems(config: TrainConfig, *, here: bool = True) -> list[str]:
    """Every setting that is invalid for any data and model, each with its reason.

    A reason begins with the setting as it is typed: `--global-batch-size 0: expected at least 1`.

    here: also look whether this machine has the device, for which torch is imported.
    """
    if wrong := wrong_types(config):
        return wrong
    reasons = [
        f"{option(name)} {shown(value)}: expected {expected}"
        for name, setting in settings_of(TrainConfig).items()
        if (expected := setting.expected(value := getattr(config, name)))
    ]
    try:
        (resolve_device if here else check_device_name)(config.device)
    except ValueError as error:
        reasons.append(f"--device {error}")
    try:
        activation_bytes(config, "cpu")
    except ValueError as error:
        reasons.append(f"--activation-memory {config.activation_memory}: {error}")
    if unknown := [name for name in tracker_names(config) if name not in TRACKERS]:
        reasons.append(
            f"--report-to {config.report_to}: expected some of {', '.join(TRACKERS)}, joined by "
            f"commas{did_you_mean(unknown[0], TRACKERS)}"
        )
    return reasons + [conflict.reason for conflict in conflicts(config)]


def unnamed(config: TrainConfig, *names: str) -> str:
    """An error message if required settings are missing, with an example; "" if all are there."""
    lacking = [name for name in names or ("model", "train_data") if not getattr(config, name)]
    if not lacking:
        return ""
    no_run = f"--resume: --output {config.output} holds no run; a new one: " * config.resume
    examples = {"model": "--model ViT-B-32", "train_data": "--train-data 'shards/{000..099}.tar'"}
    written = " ".join(examples[name] for name in lacking)
    return (
        f"{no_run}{' and '.join(map(option, lacking))}: not given; name "
        f"{'both' if lacking[1:] else 'it'}, such as {written}, or a configuration, such as "
        "--config quickstart"
    )


def wrong_types(config: TrainConfig) -> list[str]:
    """Settings whose value has the wrong type, each with its reason."""
    return [
        f"{option(name)} {value!r}: expected {setting.wanted(value)}"
        for name, setting in settings_of(TrainConfig).items()
        if not setting.accepts(value := getattr(config, name))
    ]


def conflicts(config: TrainConfig) -> Iterator[Conflict]:
    """Settings that contradict each other for any data and model."""
    if config.steps is None and config.epochs < 1:
        yield Conflict(f"--epochs {config.epochs}: expected at least 1", ("epochs",))
    yield from _without_effect(config)
    yield from _of_data(config)
    yield from _of_loss(config)
    yield from _of_towers(config)


#: Settings that ask for another one, which must then be on.
_EXPECTED_WITH = (
    ("csv_negative_key", "hard_negatives"),
    ("val_data", "evaluate"),
    ("val_frequency", "evaluate"),
    ("lock_image_unlocked_groups", "lock_image"),
    ("lock_image_freeze_bn_stats", "lock_image"),
    ("lock_text_unlocked_layers", "lock_text"),
)

_COOLDOWN = ("lr_scheduler", ("const-cooldown", "wsd"))

#: Settings without effect unless another one has one of some values: name, the other, its values.
_USED_WITH = (
    ("beta1", "opt", ("adamw", "lamb", "lion", "adafactor")),
    ("beta2", "opt", ("adamw", "lamb", "lion")),
    ("eps", "opt", ("adamw", "lamb")),
    ("momentum", "opt", ("lars", "sgd")),
    ("lr_cooldown", *_COOLDOWN),
    ("lr_cooldown_power", *_COOLDOWN),
    ("lr_cooldown_end", *_COOLDOWN),
    *((name, "loss", users) for name in settings_of(TrainConfig) if (users := losses_with(name))),
    ("hard_negatives", "loss", [name for name, loss in TRAINABLE.items() if loss.negatives]),
)


def _without_effect(config: TrainConfig) -> Iterator[Conflict]:
    """Settings that differ from their default, where nothing would use them."""
    settings = settings_of(TrainConfig)
    for name, other in _EXPECTED_WITH:
        value, default = getattr(config, name), settings[name].default
        if value != default and not getattr(config, other):
            reason = f"{with_value(name, value)}: expected with {option(other)}"
            on = {other: True} if settings[other].kinds == (bool,) else {}
            yield Conflict(reason, (name, other), {name: default, **on})
    for name, other, users in _USED_WITH:
        value, default, choice = (
            getattr(config, name),
            settings[name].default,
            getattr(config, other),
        )
        own = other == "loss" and is_reference(choice) and name == "hard_negatives"
        if value != default and choice not in users and not own:
            expected = " or ".join(with_value(other, user) for user in users)
            reason = f"{with_value(name, value)}: {with_value(other, choice)} does not use it; "
            yield Conflict(f"{reason}expected {expected}", (name, other), {name: default})


def _of_data(config: TrainConfig) -> Iterator[Conflict]:
    if config.decode == "late" and config.workers == 0:
        yield Conflict(
            "--workers 0: expected at least 1 with --decode late, which is their work",
            ("workers", "decode"),
            {"workers": 1, "decode": "early"},
        )
    if config.csv_img_key is not None and config.csv_query_key is not None:
        yield Conflict(
            f"--csv-query-key {config.csv_query_key}: expected without --csv-img-key",
            ("csv_img_key", "csv_query_key"),
            {"csv_img_key": None, "csv_query_key": None},
        )
    if config.evaluate and config.val_data is None and config.train_data != "glyphs":
        yield Conflict(
            "--evaluate: expected --val-data with it, held-out pairs",
            ("evaluate", "train_data", "val_data"),
            {"evaluate": False},
        )


def _of_loss(config: TrainConfig) -> Iterator[Conflict]:
    own = is_reference(config.loss)
    supported = ("negatives",) if own else tuple(TRAINABLE[config.loss].duplicates)
    if config.duplicates not in supported:
        why = (
            "expected without it, as a loss of your own gets ids if it takes them"
            if own
            else f"the {config.loss} loss can take them for {' or '.join(supported)}"
        )
        yield Conflict(
            f"--duplicates {config.duplicates}: {why}",
            ("duplicates", "loss"),
            {"duplicates": "negatives"},
        )
    smoothed = config.loss in losses_with("label_smoothing") and config.label_smoothing
    if smoothed and config.duplicates == "ignored":
        yield Conflict(
            f"--label-smoothing {config.label_smoothing}: expected 0 with --duplicates ignored",
            ("label_smoothing", "duplicates"),
            {"label_smoothing": 0.0, "duplicates": "negatives"},
        )


def _of_towers(config: TrainConfig) -> Iterator[Conflict]:
    image = config.lock_image and not config.lock_image_unlocked_groups
    text = config.lock_text and not config.lock_text_unlocked_layers
    if image and text:
        yield Conflict(
            "--lock-image --lock-text: both towers locked leave nothing to train",
            ("lock_image", "lock_text"),
        )
    if config.hard_negatives and text:
        yield Conflict(
            f"--hard-negatives {config.hard_negatives}: expected without --lock-text, as negatives "
            "go through the tower that is trained",
            ("hard_negatives", "lock_text"),
            {"hard_negatives": 0, "lock_text": False},
        )
    start, most = config.init_logit_scale, config.max_logit_scale
    # A hundredth more is a rounded logarithm, such as 4.61 of 100.
    if start is not None and not 0 <= start <= math.log(most) + 0.01:
        yield Conflict(
            f"--init-logit-scale {start}: expected a logarithm from 0 to {math.log(most):.3g}, as "
            f"the first step would clamp the scale to 1 ... --max-logit-scale {most:g}",
            ("init_logit_scale", "max_logit_scale"),
        )
