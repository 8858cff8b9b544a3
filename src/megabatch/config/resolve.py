"""Conflicts between settings: the one from the weaker source changes.

An option on the command line is stronger than a configuration file, and the file than a default. So
`--steps 6` shortens the warm-up of a packaged configuration, and `--train-data` turns off the
evaluation that it asks for. Conflicting settings from the same source are an error. Settings that
nobody chose have other defaults for a pretrained text encoder than for random weights.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import fields, replace
from enum import IntEnum
from typing import Any

from megabatch.config.problems import Conflict, conflicts
from megabatch.config.settings import TrainConfig
from megabatch.errors import plural
from megabatch.hints import option, settings_of, with_value
from megabatch.models import names


class Level(IntEnum):
    """The source of a setting's value."""

    DEFAULT = 0
    FILE = 1
    OPTION = 2


#: The source of each setting that is not a default.
Given = Mapping[str, Level]

#: Defaults for a pretrained text encoder, as is usual with BERT and its successors and AdamW.
FINE_TUNING: Mapping[str, Any] = {"lr": 2e-5, "wd": 0.01}

_LENGTH = (
    *("steps", "epochs", "global_batch_size"),
    *("train_data", "train_data_upsampling_factors"),
)


def levels(of_file: Collection[str], of_options: Collection[str]) -> Given:
    """The sources, given the names of settings in a file and on the command line."""
    return dict.fromkeys(of_file, Level.FILE) | dict.fromkeys(of_options, Level.OPTION)


def given_in(config: TrainConfig) -> Given:
    """The sources for a configuration made in Python: values other than the default are options."""
    default = TrainConfig()
    asked = [f.name for f in fields(config) if getattr(config, f.name) != getattr(default, f.name)]
    return levels((), asked)


def resolve(
    config: TrainConfig,
    given: Given,
    find: Callable[[TrainConfig], Iterable[Conflict]] = conflicts,
) -> tuple[TrainConfig, list[str]]:
    """Change settings that conflict with others from a stronger source.

    Args:
        config: its values have the right types.
        given: the sources of its values.
        find: returns a configuration's conflicts; by default those independent of data and model.

    Returns:
        The configuration, which may still have conflicts that are errors; and a line for each
        setting that was changed.
    """
    notes: list[str] = []
    firm = given
    if config.steps is not None and firm.get("epochs", 0) > firm.get("steps", 0):
        notes.append(
            f"--steps {config.steps}: --epochs {config.epochs} is given instead; taking no --steps"
        )
        config = replace(config, steps=None)

    def standing(name: str) -> Level:
        return firm.get(name, Level.DEFAULT)

    while found := next(
        ((c, n) for c in find(config) if (n := _yielding(c, standing)) is not None), None
    ):
        conflict, name = found
        value, reason = conflict.instead[name], f"{conflict.reason};"
        if standing(name) == Level.DEFAULT:  # nobody asked for it: name what was asked for
            asked = [n for n in conflict.between if standing(n) > Level.DEFAULT]
            reason = " ".join(with_value(n, getattr(config, n)) for n in asked) + ":"
        config = replace(config, **{name: value})
        firm = {**firm, name: Level.OPTION}  # no setting changes twice
        taken = f"no {option(name)}" if value is None else with_value(name, value)
        notes.append(f"{reason} taking {taken}")
    return config, notes


def name_defaults(message: str, given: Given) -> str:
    """Call a value that nobody set a default: `--global-batch-size 4096 (the default): ...`.

    Messages name settings as `with_value` writes them, without knowing their sources.
    """
    for name, setting in settings_of(TrainConfig).items():
        if name not in given and not isinstance(setting.default, bool):
            written = re.escape(with_value(name, setting.default))
            message = re.sub(rf"({written})(?!\S*\w)", r"\1 (the default)", message)
    return message


def fine_tuned(config: TrainConfig, given: Given) -> tuple[TrainConfig, list[str]]:
    """Take the defaults of fine-tuning for a pretrained text encoder, and say so.

    Other models that start with weights keep the defaults, as learning rates for them differ more;
    a line says so. A resumed run has its own settings, which are not defaults.

    Args:
        config, given: as of `resolve`.

    Returns:
        The configuration, and a line if it starts with weights.
    """
    trained = names.is_trained(config.model)
    open_ones = {name: value for name, value in FINE_TUNING.items() if not given.get(name)}
    if trained and config.opt == "adamw" and open_ones and names.is_text_encoder(config.model):
        taken = " ".join(with_value(name, value) for name, value in open_ones.items())
        usual = " and ".join(str(getattr(config, name)) for name in open_ones)
        note = (
            f"{config.model} has weights, so the defaults are those of fine-tuning: {taken} "
            f"(instead of {usual})"
        )
        return replace(config, **open_ones), [note]
    locked = config.lock_image or config.lock_text
    if "lr" in open_ones and not locked and (trained or config.pretrained is not None):
        source = config.model if config.pretrained is None else f"--pretrained {config.pretrained}"
        note = (
            f"{source} has weights, but {with_value('lr', config.lr)} is meant for random ones; "
            "fine-tuning usually takes 1e-5 to 1e-4"
        )
        return config, [note]
    return config, []


def length_conflicts(config: TrainConfig, total_steps: int) -> list[Conflict]:
    """Warm-up and cooldown that were set and do not fit into so many steps."""
    cooldown = config.lr_cooldown or 0
    if total_steps < 1:
        return []
    if cooldown > total_steps:
        reason = f"--lr-cooldown {cooldown}: the run has only {plural(total_steps, 'step')}"
        return [Conflict(reason, ("lr_cooldown", *_LENGTH), {"lr_cooldown": None})]
    room = total_steps - cooldown
    if config.warmup is None or config.warmup <= room:
        return []
    before = f" before its --lr-cooldown {cooldown}" if cooldown else ""
    reason = f"--warmup {config.warmup}: the run has only {plural(room, 'step')}{before}"
    shorter: dict[str, object] = {"warmup": room // 5}
    if cooldown:
        shorter["lr_cooldown"] = None
    return [Conflict(reason, (*shorter, *_LENGTH), shorter)]


def _yielding(conflict: Conflict, level: Callable[[str], Level]) -> str | None:
    """The setting to change: from the weakest source, if another's is stronger; else None."""
    highest = max(map(level, conflict.between))
    lower = [name for name in conflict.instead if level(name) < highest]
    return min(lower, key=level, default=None)
