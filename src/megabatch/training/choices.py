"""Which choices of model, loss, optimizer and schedule cannot be, alone or with each other."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from megabatch.hints import option, with_value

if TYPE_CHECKING:
    from megabatch.training.config import TrainConfig

#: What each loss can take pairs of the same caption for.
DUPLICATES = {
    "clip": ("negatives", "positives", "ignored"),
    "siglip": ("negatives", "positives"),
    "infonce": ("negatives", "ignored"),
    "ntxent": ("negatives",),
    "dcl": ("negatives",),
}

_AT_LEAST_1 = ("lr_base_batch_size", "force_image_size", "force_context_length", "lr_cooldown")
_NOT_NEGATIVE = ("lock_image_unlocked_groups", "lock_text_unlocked_layers", "lr_cooldown_end")
_SHARES = ("momentum", "ema_decay", "label_smoothing", "force_patch_dropout")
_FINITE = ("init_logit_scale", "init_logit_bias", "infonce_margin")


@dataclass(frozen=True)
class Conflict:
    """Settings that cannot be together.

    reason: as it is told; begins with the setting as it is typed.
    between: the settings.
    instead: which of them another value would put right, and that value.
    """

    reason: str
    between: tuple[str, ...]
    instead: Mapping[str, Any] = field(default_factory=dict)


def problems(config: TrainConfig) -> list[str]:
    """Every choice that cannot be, each with its reason; the types are right already."""
    alone = [
        f"{option(name)} {_shown(getattr(config, name))}: expected {expected}"
        for name, holds, expected in _ranges(config)
        if not holds
    ]
    return alone + [conflict.reason for conflict in conflicts(config)]


def _shown(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _ranges(config: TrainConfig) -> Iterator[tuple[str, bool, str]]:
    def given(names: tuple[str, ...]) -> Iterator[tuple[str, Any]]:
        return ((n, v) for n in names if (v := getattr(config, n)) is not None)

    for name, value in given(_AT_LEAST_1):
        yield name, value >= 1, "at least 1"
    for name, value in given(_NOT_NEGATIVE):
        yield name, 0 <= value < math.inf, "at least 0"
    for name, value in given(_SHARES):
        yield name, 0 <= value < 1, "at least 0 and below 1"
    for name, value in given(_FINITE):
        yield name, math.isfinite(value), "a finite number"
    for name, value in given(("layer_decay",)):
        yield name, 0 < value <= 1, "above 0 and at most 1"
    yield "lr_cooldown_power", 0 < config.lr_cooldown_power < math.inf, "above 0"
    dims = config.matryoshka_dims
    yield "matryoshka_dims", all(width >= 1 for width in dims), "widths of at least 1"


def conflicts(config: TrainConfig) -> Iterator[Conflict]:
    """Choices that cannot be together, whatever the data and the model."""
    yield from _of_data(config)
    yield from _of_loss(config)
    yield from _of_locks(config)
    if config.lr_cooldown is not None and config.lr_scheduler in ("cosine", "const"):
        yield Conflict(
            f"--lr-cooldown {config.lr_cooldown}: --lr-scheduler {config.lr_scheduler} has none",
            ("lr_cooldown", "lr_scheduler"),
            {"lr_cooldown": None},
        )


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
    if config.val_data is not None and not config.evaluate:
        yield Conflict(
            f"--val-data {config.val_data}: expected with --evaluate",
            ("val_data", "evaluate"),
            {"val_data": None, "evaluate": True},
        )


def _of_loss(config: TrainConfig) -> Iterator[Conflict]:
    loss = config.loss
    if config.duplicates not in DUPLICATES[loss]:
        can = " or ".join(DUPLICATES[loss])
        yield Conflict(
            f"--duplicates {config.duplicates}: the {loss} loss can take them for {can}",
            ("duplicates", "loss"),
            {"duplicates": "negatives"},
        )
    smoothing = f"--label-smoothing {config.label_smoothing}"
    if config.label_smoothing and loss != "clip":
        yield Conflict(
            f"{smoothing}: only the clip loss has it",
            ("label_smoothing", "loss"),
            {"label_smoothing": 0.0},
        )
    elif config.label_smoothing and config.duplicates == "ignored":
        yield Conflict(
            f"{smoothing}: expected 0 with --duplicates ignored",
            ("label_smoothing", "duplicates"),
            {"label_smoothing": 0.0, "duplicates": "negatives"},
        )
    if config.infonce_margin is not None and loss != "infonce":
        yield Conflict(
            f"--infonce-margin {config.infonce_margin}: only the infonce loss has it",
            ("infonce_margin", "loss"),
            {"infonce_margin": None},
        )


def _of_locks(config: TrainConfig) -> Iterator[Conflict]:
    locks = {
        "lock_image": "lock_image_unlocked_groups",
        "lock_text": "lock_text_unlocked_layers",
    }
    needs = [*locks.items(), ("lock_image", "lock_image_freeze_bn_stats")]
    for lock, name in needs:
        value = getattr(config, name)
        if value and not getattr(config, lock):
            yield Conflict(
                f"{with_value(name, value)}: expected with {option(lock)}",
                (name, lock),
                {name: type(value)(), lock: True},
            )
    if all(getattr(config, lock) and not getattr(config, left) for lock, left in locks.items()):
        yield Conflict(
            "--lock-image --lock-text: both towers locked leave nothing to train", tuple(locks)
        )
