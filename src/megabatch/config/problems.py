"""Invalid settings, alone or in combination, each with its reason."""

from __future__ import annotations

import math
from collections.abc import Iterator

from megabatch.config.settings import TrainConfig
from megabatch.errors import did_you_mean, plural
from megabatch.hints import is_reference, option, settings_of, with_value
from megabatch.losses.registry import TRAINABLE, losses_with


def problems(config: TrainConfig, *needed: str) -> list[str]:
    """Every setting that is invalid for any data and model, each with its reason.

    A reason begins with the setting as it is typed: `--global-batch-size 0: expected at least 1`.

    Args:
        config: its values may have any type.
        needed: settings that may not be empty.
    """
    invalid = [
        f"{option(name)} {value}: expected {expected}"
        for name, setting in settings_of(TrainConfig).items()
        if (expected := setting.problem(value := getattr(config, name)))
    ]
    if invalid:
        return invalid
    if config.loss not in TRAINABLE and not is_reference(config.loss):
        known = f"{', '.join(TRAINABLE)} or module:Class{did_you_mean(config.loss, TRAINABLE)}"
        return [f"--loss {config.loss}: expected {known}"]
    missing = [name for name in needed if not getattr(config, name)]
    return [
        *(f"{option(name)}: needed, as an option or in a --config" for name in missing),
        *_without_effect(config),
        *_conflicts(config),
    ]


def schedule_problems(config: TrainConfig, total_steps: int) -> list[str]:
    """Reasons why the learning rate's schedule does not fit into a run of so many steps."""
    cooldown, warmup = config.lr_cooldown or 0, config.warmup or 0
    if cooldown + warmup <= total_steps:
        return []
    given = [n for n in ("warmup", "lr_cooldown") if getattr(config, n)]
    options = " and ".join(with_value(name, getattr(config, name)) for name in given)
    return [f"{options}: the run has only {plural(total_steps, 'step')}"]


#: Settings without effect unless another one has one of some values, or any that is on.
_USED_WITH = (
    ("csv_negative_key", "hard_negatives", ()),
    ("val_frequency", "val_data", ()),
    ("lock_image_unlocked_groups", "lock_image", ()),
    ("lock_text_unlocked_layers", "lock_text", ()),
    ("beta1", "opt", ("adamw", "lamb", "lion", "adafactor")),
    ("beta2", "opt", ("adamw", "lamb", "lion")),
    ("eps", "opt", ("adamw", "lamb")),
    ("momentum", "opt", ("lars", "sgd")),
    ("lr_cooldown", "lr_scheduler", ("const-cooldown", "wsd")),
    *((name, "loss", users) for name in settings_of(TrainConfig) if (users := losses_with(name))),
    ("hard_negatives", "loss", [name for name, loss in TRAINABLE.items() if loss.negatives]),
)


def _without_effect(config: TrainConfig) -> Iterator[str]:
    """Settings that differ from their default, where nothing would use them."""
    for name, other, users in _USED_WITH:
        value, choice = getattr(config, name), getattr(config, other)
        used = choice in users if users else bool(choice)
        own = name == "hard_negatives" and is_reference(choice)
        if value != settings_of(TrainConfig)[name].default and not (used or own):
            expected = " or ".join(with_value(other, user) for user in users) or option(other)
            got = with_value(other, choice)
            yield f"{with_value(name, value)}: expected with {expected}, got {got}"


def _conflicts(config: TrainConfig) -> Iterator[str]:
    """Settings that contradict each other."""
    if config.decode == "late" and config.workers == 0:
        yield "--workers 0: expected at least 1 with --decode late, which is their work"
    if config.csv_img_key is not None and config.csv_query_key is not None:
        yield f"--csv-query-key {config.csv_query_key}: expected without --csv-img-key"
    own = is_reference(config.loss)
    supported = ("negatives",) if own else tuple(TRAINABLE[config.loss].duplicates)
    if config.duplicates not in supported:
        duplicates, loss = f"--duplicates {config.duplicates}", f"--loss {config.loss}"
        yield f"{duplicates}: expected {' or '.join(supported)} with {loss}"
    if config.label_smoothing and config.duplicates == "ignored":
        yield f"--label-smoothing {config.label_smoothing}: expected 0 with --duplicates ignored"
    image = config.lock_image and not config.lock_image_unlocked_groups
    text = config.lock_text and not config.lock_text_unlocked_layers
    if image and text:
        yield "--lock-image --lock-text: both towers locked leave nothing to train"
    if config.hard_negatives and text:
        yield f"--hard-negatives {config.hard_negatives}: expected 0 with --lock-text"
    start, most = config.init_logit_scale, config.max_logit_scale
    # A hundredth more is a rounded logarithm, such as 4.61 of 100.
    if start is not None and not 0 <= start <= math.log(most) + 0.01:
        yield (
            f"--init-logit-scale {start}: expected a logarithm from 0 to {math.log(most):.3g}, as "
            f"the first step would clamp the scale to 1 ... --max-logit-scale {most:g}"
        )
