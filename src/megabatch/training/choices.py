"""Which choices of model, loss, optimizer and schedule cannot be, alone or with each other."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

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


def problems(config: TrainConfig) -> list[str]:
    """Every choice that cannot be, each with its reason; the types are right already."""
    alone = [
        f"{name}: {getattr(config, name)}; expected {expected}"
        for name, holds, expected in _ranges(config)
        if not holds
    ]
    return alone + list(_together(config))


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


def _together(config: TrainConfig) -> Iterator[str]:
    if config.decode == "late" and config.workers == 0:
        yield "workers: 0; expected at least 1 with decode late, which is their work"
    if config.csv_img_key is not None and config.csv_query_key is not None:
        yield f"csv_query_key: {config.csv_query_key!r}; expected without csv_img_key"
    if config.evaluate and config.val_data is None and config.train_data != "glyphs":
        yield "evaluate: true; expected val_data with it, held-out pairs"
    if config.val_data is not None and not config.evaluate:
        yield f"val_data: {config.val_data}; expected with evaluate"
    if config.duplicates not in DUPLICATES[config.loss]:
        can = " or ".join(DUPLICATES[config.loss])
        yield f"duplicates: {config.duplicates}; the {config.loss} loss can take them for {can}"
    if config.label_smoothing and config.loss != "clip":
        yield f"label_smoothing: {config.label_smoothing}; only the clip loss has it"
    elif config.label_smoothing and config.duplicates == "ignored":
        yield f"label_smoothing: {config.label_smoothing}; expected 0 where duplicates are ignored"
    if config.infonce_margin is not None and config.loss != "infonce":
        yield f"infonce_margin: {config.infonce_margin}; only the infonce loss has it"
    if config.lr_cooldown is not None and config.lr_scheduler in ("cosine", "const"):
        yield f"lr_cooldown: {config.lr_cooldown}; lr_scheduler {config.lr_scheduler} has none"
    locks = (
        ("lock_image", config.lock_image, config.lock_image_unlocked_groups),
        ("lock_text", config.lock_text, config.lock_text_unlocked_layers),
    )
    for name, locked, unlocked in locks:
        if unlocked and not locked:
            yield f"{name}: false, but {unlocked} of its groups are to stay unlocked"
    if config.lock_image_freeze_bn_stats and not config.lock_image:
        yield "lock_image_freeze_bn_stats: true; expected with lock_image"
    if all(locked and not unlocked for _, locked, unlocked in locks):
        yield "lock_image, lock_text: both towers locked leave nothing to train"
