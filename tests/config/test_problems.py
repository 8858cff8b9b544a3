"""Settings that are refused, each with its reason and all at once."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest
import torch

from megabatch.config.problems import problems, schedule_problems
from megabatch.config.settings import resolve_device
from megabatch.errors import UsageError
from megabatch.hints import option
from megabatch.training import TrainConfig


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"lr": 1, "grad_clip_norm": 1},
        {"global_batch_size": 4, "micro_batch_size": 512},
        {"init_logit_scale": 4.61},  # log 100, rounded
        {"loss": "mine:Loss", "hard_negatives": 2},
        {"model": "m", "train_data": "d"},
    ],
)
def test_what_is_possible(settings: dict[str, Any]) -> None:
    assert problems(TrainConfig(**settings)) == []


INFONCE = {"loss": "infonce", "hard_negatives": 1}


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"global_batch_size": 0}, "global-batch-size 0: expected at least 1"),
        ({"micro_batch_size": -5}, "micro-batch-size -5: expected at least 1"),
        ({"micro_batch_size": "big"}, "micro-batch-size big: expected a whole number or 'auto'"),
        ({"lr": 0.0}, "lr 0.0: expected a number above 0"),
        ({"lr": float("nan")}, "lr nan: expected a number above 0"),
        ({"lr": float("inf")}, "lr inf: expected a number above 0"),
        ({"beta1": 1.0}, "beta1 1.0: expected at least 0 and below 1"),
        ({"seed": 2**32}, "seed 4294967296: expected at least 0 and below 4,294,967,296"),
        ({"device": "gpu"}, "device gpu: expected auto, cpu, cuda or cuda:N"),
        ({"activation_memory": "lots"}, "activation-memory lots: expected auto or a size such"),
        ({"report_to": ("comet",)}, "report-to ('comet',): expected a list, each 'tensorb"),
        ({"precision": "amp_bf16"}, "precision amp_bf16: expected 'fp32' or 'bf16' or 'fp16'; did"),
        ({"matryoshka_dims": (8, 0.5)}, "matryoshka-dims (8, 0.5): expected a list, each a wh"),
        ({"workers": True}, "workers True: expected a whole number"),
        (
            {"loss": "infonse"},
            "loss infonse: expected clip, siglip, infonce, ntxent, dcl or module:",
        ),
        ({"val_frequency": 5}, "val-frequency 5: expected with --val-data, got --val-data Non"),
        ({"csv_negative_key": "n"}, "csv-negative-key n: expected with --hard-negatives, got"),
        ({"lock_text_unlocked_layers": 1}, "lock-text-unlocked-layers 1: expected with --lock"),
        ({"momentum": 0.5}, "momentum 0.5: expected with --opt lars or --opt sgd, got --opt ada"),
        ({"lr_cooldown": 9}, "lr-cooldown 9: expected with --lr-scheduler const-cooldown or --"),
        ({"infonce_margin": 0.1}, "infonce-margin 0.1: expected with --loss infonce, got --lo"),
        ({"hard_negatives": 2}, "hard-negatives 2: expected with --loss infonce, got --loss c"),
        ({"decode": "late"}, "workers 0: expected at least 1 with --decode late"),
        ({"csv_img_key": "a", "csv_query_key": "b"}, "csv-query-key b: expected without --"),
        ({**INFONCE, "duplicates": "positives"}, "duplicates positives: expected negatives or ign"),
        ({"loss": "m:Loss", "duplicates": "ignored"}, "duplicates ignored: expected negatives wi"),
        ({"label_smoothing": 0.1, "duplicates": "ignored"}, "label-smoothing 0.1: expected 0"),
        ({"lock_image": True, "lock_text": True}, "lock-image --lock-text: both towers locked"),
        ({**INFONCE, "lock_text": True}, "hard-negatives 1: expected 0 with --lock-text"),
        ({"init_logit_scale": 10.0}, "init-logit-scale 10.0: expected a logarithm from 0 to 4"),
    ],
)
def test_what_is_refused(settings: dict[str, Any], reason: str) -> None:
    (found,) = problems(replace(TrainConfig(), **settings))
    assert found.startswith(f"--{reason}")


def test_all_reasons_come_at_once_and_name_their_settings_as_they_are_typed() -> None:
    names = [field.name for field in fields(TrainConfig)]
    reasons = problems(TrainConfig(**dict.fromkeys(names, object())))
    assert [reason.split()[0] for reason in reasons] == [option(name) for name in names]
    reasons = problems(TrainConfig(momentum=0.5, decode="late"), "model", "train_data")
    needed = "needed, as an option or in a --config"
    assert reasons[:2] == [f"--model: {needed}", f"--train-data: {needed}"]
    assert len(reasons) == 4


def test_a_schedule_has_to_fit_into_the_run() -> None:
    short = replace(TrainConfig(), warmup=20, lr_cooldown=20, lr_scheduler="wsd")
    assert schedule_problems(short, 40) == []
    reason = "--warmup 20 and --lr-cooldown 20: the run has only 39 steps"
    assert schedule_problems(short, 39) == [reason]
    reason = "--warmup 20: the run has only 1 step"
    assert schedule_problems(TrainConfig(warmup=20), 1) == [reason]
    assert schedule_problems(TrainConfig(), 1) == []


def test_a_device_is_one_of_this_machine() -> None:
    assert resolve_device("auto").type == ("cuda" if torch.cuda.is_available() else "cpu")
    assert resolve_device("cpu", 3) == torch.device("cpu")
    with pytest.raises(UsageError, match=r"--device cuda:99: this machine has \d+ CUDA devices?"):
        resolve_device("cuda:99")


def test_each_of_several_processes_takes_its_own_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    assert resolve_device("auto", 3) == torch.device("cuda", 3)
    assert resolve_device("cuda", 0) == torch.device("cuda", 0)
    for name, rank, message in (
        ("cuda:1", 1, "cuda:1: expected cuda or auto, as each process takes its own"),
        ("cuda", 4, "cuda: this machine has 4 CUDA devices"),
        ("gpu", 0, "gpu: expected auto, cpu, cuda or cuda:N"),
    ):
        with pytest.raises(UsageError, match=f"--device {message}"):
            resolve_device(name, rank)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)  # as srun --gpus-per-task=1 shows it
    assert resolve_device("cuda", 3) == torch.device("cuda", 0)
