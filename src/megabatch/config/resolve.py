"""Which setting gives way where two cannot be together: the one that was asked for less.

A value that a user typed goes before one from a configuration file, and that before a default. So
`--steps 6` is no contradiction to a warm-up that nobody set, nor `--train-data` to the evaluation
of a packaged configuration. Settings of the same standing are refused together.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import fields, replace
from enum import IntEnum

from megabatch.config.problems import Conflict, conflicts
from megabatch.config.settings import TrainConfig
from megabatch.hints import option, with_value


class Level(IntEnum):
    """How a setting came to its value."""

    DEFAULT = 0
    FILE = 1
    OPTION = 2


#: The level of each setting that is not a default.
Given = Mapping[str, Level]

_LENGTH = (
    *("steps", "epochs", "global_batch_size"),
    *("train_data", "train_data_upsampling_factors"),
)


def levels(of_file: Collection[str], of_options: Collection[str]) -> Given:
    """The settings that a configuration file and the command line have."""
    return dict.fromkeys(of_file, Level.FILE) | dict.fromkeys(of_options, Level.OPTION)


def given_in(config: TrainConfig) -> Given:
    """The settings of a configuration made in Python: what differs from the defaults was asked."""
    default = TrainConfig()
    asked = [f.name for f in fields(config) if getattr(config, f.name) != getattr(default, f.name)]
    return levels((), asked)


def resolve(
    config: TrainConfig,
    given: Given,
    find: Callable[[TrainConfig], Iterable[Conflict]] = conflicts,
) -> tuple[TrainConfig, list[str]]:
    """Let settings give way to others that were asked for more.

    Args:
        config: types are right.
        given: where its values come from.
        find: conflicts of a configuration; by default those that need neither data nor model.

    Returns:
        The configuration, in which conflicts are left that have to be refused; and a line for each
        setting that gave way.
    """
    notes: list[str] = []
    firm = given

    def standing(name: str) -> Level:
        return firm.get(name, Level.DEFAULT)

    while found := next(
        ((c, n) for c in find(config) if (n := _yielding(c, standing)) is not None), None
    ):
        conflict, name = found
        value = conflict.instead[name]
        config = replace(config, **{name: value})
        firm = {**firm, name: Level.OPTION}  # once is enough
        taken = f"no {option(name)}" if value is None else with_value(name, value)
        notes.append(f"{conflict.reason}; taking {taken}")
    return config, notes


def length_conflicts(config: TrainConfig, total_steps: int) -> list[Conflict]:
    """What a run of so many steps is too short for."""
    cooldown = config.lr_cooldown or 0
    if total_steps < 1:
        return []
    if cooldown > total_steps:
        reason = f"--lr-cooldown {cooldown}: the run has only {_steps(total_steps)}"
        return [Conflict(reason, ("lr_cooldown", *_LENGTH), {"lr_cooldown": None})]
    room = total_steps - cooldown
    if config.warmup <= room:
        return []
    before = f" before its --lr-cooldown {cooldown}" if cooldown else ""
    reason = f"--warmup {config.warmup}: the run has only {_steps(room)}{before}"
    shorter: dict[str, object] = {"warmup": room // 5}
    if cooldown:
        shorter["lr_cooldown"] = None
    return [Conflict(reason, (*shorter, *_LENGTH), shorter)]


def _yielding(conflict: Conflict, level: Callable[[str], Level]) -> str | None:
    """The setting that gives way: of those asked for less than another, the least."""
    highest = max(map(level, conflict.between))
    lower = [name for name in conflict.instead if level(name) < highest]
    return min(lower, key=level, default=None)


def _steps(count: int) -> str:
    return "1 step" if count == 1 else f"{count} steps"
