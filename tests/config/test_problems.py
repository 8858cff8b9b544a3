"""Choices that cannot be, alone or together."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from megabatch.config.problems import problems
from megabatch.training import TrainConfig


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("force_image_size", 0),
        ("force_context_length", -1),
        ("lr_cooldown_end", -1.0),
        ("lr_cooldown_power", 0.0),
        ("momentum", 1.0),
        ("ema_decay", 1.0),
        ("label_smoothing", 1.0),
        ("force_patch_dropout", -0.5),
        ("layer_decay", 0.0),
        ("layer_decay", 1.5),
        ("init_logit_scale", float("nan")),
        ("init_logit_bias", float("inf")),
        ("matryoshka_dims", (8, 0)),
    ],
)
def test_an_impossible_number_is_refused_by_name(name: str, value: Any) -> None:
    reason, *_ = problems(replace(TrainConfig(), **{name: value}))
    shown = " ".join(map(str, value)) if isinstance(value, tuple) else value
    assert reason.startswith(f"--{name.replace('_', '-')} {shown}: expected ")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (
            {"report_to": "comet"},
            "--report-to comet: expected some of tensorboard, wandb, mlflow, joined by commas",
        ),
        (
            {"hard_negatives": 2, "loss": "clip"},
            "--hard-negatives 2: --loss clip does not use it; expected --loss infonce",
        ),
        (
            {"hard_negatives": 2, "loss": "infonce", "lock_text": True},
            "--hard-negatives 2: expected without --lock-text, as negatives go through the tower "
            "that is trained",
        ),
        ({"csv_negative_key": "n"}, "--csv-negative-key n: expected with --hard-negatives"),
        (
            {"decode": "late"},
            "--workers 0: expected at least 1 with --decode late, which is their work",
        ),
        ({"val_frequency": 5}, "--val-frequency 5: expected with --evaluate"),
        (
            {"loss": "siglip", "duplicates": "ignored"},
            "--duplicates ignored: the siglip loss can take them for negatives or positives",
        ),
        (
            {"loss": "infonce", "duplicates": "positives"},
            "--duplicates positives: the infonce loss can take them for negatives or ignored",
        ),
        (
            {"loss": "dcl", "duplicates": "ignored"},
            "--duplicates ignored: the dcl loss can take them for negatives",
        ),
        (
            {"loss": "siglip", "label_smoothing": 0.1},
            "--label-smoothing 0.1: --loss siglip does not use it; expected --loss clip",
        ),
        (
            {"duplicates": "ignored", "label_smoothing": 0.1},
            "--label-smoothing 0.1: expected 0 with --duplicates ignored",
        ),
        (
            {"infonce_margin": 0.1},
            "--infonce-margin 0.1: --loss clip does not use it; expected --loss infonce",
        ),
        (
            {"lr_cooldown": 5},
            "--lr-cooldown 5: --lr-scheduler cosine does not use it; expected "
            "--lr-scheduler const-cooldown or --lr-scheduler wsd",
        ),
        (
            {"lr_cooldown_end": 1e-5},
            "--lr-cooldown-end 1e-05: --lr-scheduler cosine does not use it; expected "
            "--lr-scheduler const-cooldown or --lr-scheduler wsd",
        ),
        (
            {"momentum": 0.5},
            "--momentum 0.5: --opt adamw does not use it; expected --opt lars or --opt sgd",
        ),
        (
            {"opt": "lion", "eps": 1e-8},
            "--eps 1e-08: --opt lion does not use it; expected --opt adamw or --opt lamb",
        ),
        (
            {"init_logit_scale": 10.0},
            "--init-logit-scale 10.0: expected a logarithm from 0 to 4.61, as the first step would "
            "clamp the scale to 1 ... --max-logit-scale 100",
        ),
        (
            {"lock_image_unlocked_groups": 2},
            "--lock-image-unlocked-groups 2: expected with --lock-image",
        ),
        (
            {"lock_text_unlocked_layers": 1},
            "--lock-text-unlocked-layers 1: expected with --lock-text",
        ),
        (
            {"lock_image_freeze_bn_stats": True},
            "--lock-image-freeze-bn-stats: expected with --lock-image",
        ),
        (
            {"lock_image": True, "lock_text": True},
            "--lock-image --lock-text: both towers locked leave nothing to train",
        ),
    ],
)
def test_what_cannot_be_together_says_why(changes: dict[str, Any], reason: str) -> None:
    assert problems(replace(TrainConfig(), **changes)) == [reason]


@pytest.mark.parametrize(
    "changes",
    [
        {"loss": "siglip", "duplicates": "positives"},
        {"lr_scheduler": "wsd", "lr_cooldown": 5},
        {"lock_image": True, "lock_text": True, "lock_text_unlocked_layers": 1},
        {"opt": "lamb", "ema_decay": 0.999, "layer_decay": 1.0, "force_patch_dropout": 0.0},
        {"matryoshka_dims": (8, 16), "label_smoothing": 0.1, "duplicates": "positives"},
    ],
)
def test_what_can_be_together(changes: dict[str, Any]) -> None:
    assert problems(replace(TrainConfig(), **changes)) == []
