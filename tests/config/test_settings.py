"""Settings that are refused, each with its reason and all at once; devices."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megabatch.config.settings import (
    problems,
    resolve_device,
    schedule_problems,
    with_precision,
)
from megabatch.errors import UsageError
from megabatch.losses.registry import TRAINABLE
from megabatch.options import make, option
from megabatch.training import TrainConfig


def test_what_is_possible() -> None:
    rounded = TrainConfig(init_logit_scale=4.61)  # log 100
    own = TrainConfig(loss="mine:Loss", hard_negatives=2)
    for config in (TrainConfig(), TrainConfig(global_batch_size=4, micro_batch_size=512)):
        assert problems(config) == problems(rounded) == problems(own) == []


def test_values_are_converted() -> None:
    config = TrainConfig(output="runs/x", report_to=["wandb"], lr=1, activation_memory="1GiB")
    assert (config.output, config.report_to) == (Path("runs/x"), ("wandb",))
    assert (type(config.lr), config.activation_memory) == (float, 1 << 30)


def test_every_wrong_value_is_named_as_it_is_typed() -> None:
    names = [field.name for field in fields(TrainConfig)]
    with pytest.raises(UsageError) as caught:
        make(TrainConfig, dict.fromkeys(names, object()))
    reasons = str(caught.value).split("\n  - ")[1:]
    assert [reason.split()[0] for reason in reasons] == [option(name) for name in names]
    with pytest.raises(ValueError, match=r"lr\n  Input should be greater than 0 .*input_value=0"):
        TrainConfig(lr=0)


INFONCE = {"loss": "infonce", "hard_negatives": 1}
FP8 = {"precision": "fp8", "torchcompile": False}


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"device": "gpu"}, "device gpu: String should match pattern '^(auto|cpu|cuda|cuda:"),
        ({"activation_memory": "lots"}, "activation-memory lots: expected a size such as 20GiB or"),
        (
            {"precision": "amp_bf16"},
            "precision amp_bf16: expected 'auto', 'fp32', 'bf16', 'fp16' or 'fp8'; did",
        ),
        (FP8, "no-torchcompile: expected compiled blocks with --precision fp8, slow without"),
        ({"loss": "infonse"}, "loss infonse: expected clip, siglip, infonce, maxsim, ntxent, dcl"),
        ({"maxsim_dim": 64}, "maxsim-dim 64: expected with --loss maxsim, got --loss clip"),
        ({"loss": "maxsim", "matryoshka_dims": [8]}, "matryoshka-dims: expected without --loss m"),
        ({"loss": "maxsim", "lock_text": True}, "lock-text: expected without --loss maxsim"),
        ({"val_frequency": 5}, "val-frequency 5: expected with --val-data, got --val-data Non"),
        ({"csv_negative_key": "n"}, "csv-negative-key n: expected with --hard-negatives, got"),
        ({"lock_text_unlocked_layers": 1}, "lock-text-unlocked-layers 1: expected with --lock"),
        ({"momentum": 0.5}, "momentum 0.5: expected with --opt lars or sgd, got --opt ada"),
        ({"lr_cooldown": 9}, "lr-cooldown 9: expected with --lr-scheduler const-cooldown or wsd"),
        ({"infonce_margin": 0.1}, "infonce-margin 0.1: expected with --loss infonce, got --lo"),
        ({"hard_negatives": 2}, "hard-negatives 2: expected 0 with --loss clip"),
        ({"decode": "late"}, "workers 0: expected at least 1 with --decode late"),
        ({"csv_img_key": "a", "csv_query_key": "b"}, "csv-query-key b: expected without --"),
        ({**INFONCE, "duplicates": "positives"}, "duplicates positives: expected negatives or ign"),
        ({"loss": "m:Loss", "duplicates": "ignored"}, "duplicates ignored: expected negatives wi"),
        ({"label_smoothing": 0.1, "duplicates": "ignored"}, "label-smoothing 0.1: expected 0"),
        ({"lock_image": True, "lock_text": True}, "lock-image --lock-text: both towers locked"),
        ({**INFONCE, "lock_text": True}, "hard-negatives 1: expected 0 with --lock-text"),
        ({"init_logit_scale": 10.0}, "init-logit-scale 10.0: expected 0 to 4.61, log of"),
    ],
)
def test_what_is_refused(settings: dict[str, Any], reason: str) -> None:
    try:
        (found,) = problems(make(TrainConfig, settings))
    except UsageError as error:
        found = str(error)
    assert found.startswith(f"--{reason}")


def test_all_reasons_come_at_once() -> None:
    reasons = problems(TrainConfig(momentum=0.5, decode="late"), "model", "train_data")
    needed = "needed, as an option or in a --config"
    assert reasons[:2] == [f"--model: {needed}", f"--train-data: {needed}"]
    assert len(reasons) == 4


@pytest.mark.parametrize("value", ["positives", "ignored"])
def test_help_names_the_losses_that_treat_duplicates_so(value: str) -> None:
    names = [name for name, loss in TRAINABLE.items() if value in loss.duplicates]
    text = TrainConfig.__pydantic_fields__["duplicates"].description.replace("\n", " ")
    assert f"{value}: {', '.join(names[:-1])} and {names[-1]} only" in text


def test_a_schedule_has_to_fit_into_the_run() -> None:
    short = replace(TrainConfig(), warmup=20, lr_cooldown=20, lr_scheduler="wsd")
    assert schedule_problems(short, 40) == schedule_problems(TrainConfig(), 1) == []
    reason = "--warmup 20 and --lr-cooldown 20: the run has only 39 steps"
    assert schedule_problems(short, 39) == [reason]
    (reason,) = schedule_problems(TrainConfig(warmup=20), 1)
    assert reason.endswith("the run has only 1 step")


@pytest.mark.parametrize("fast", [True, False])
def test_auto_precision_is_one_that_the_device_multiplies_fast(
    fast: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megabatch.torch_internals.cpu_multiplies_bf16", lambda: fast)
    assert with_precision(TrainConfig(), "cuda").precision == "bf16"
    assert with_precision(TrainConfig(), "cpu").precision == ("bf16" if fast else "fp32")
    for given in (TrainConfig(precision="bf16"), TrainConfig(precision="fp16")):
        assert with_precision(given, "cpu") == given


def test_a_device_is_one_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolve_device("auto").type == ("cuda" if torch.cuda.is_available() else "cpu")
    assert resolve_device("cpu", 3) == torch.device("cpu")
    with pytest.raises(UsageError, match=r"--device cuda:99: this machine has \d+ CUDA devices?"):
        resolve_device("cuda:99")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    assert resolve_device("auto", 3) == torch.device("cuda", 3)
    assert resolve_device("cuda", 0) == torch.device("cuda", 0)
    with pytest.raises(UsageError, match="cuda:1: expected cuda or auto, as each process takes"):
        resolve_device("cuda:1", 1)
    with pytest.raises(UsageError, match="--device cuda: this machine has 4 CUDA devices"):
        resolve_device("cuda", 4)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)  # as srun --gpus-per-task=1 shows it
    assert resolve_device("cuda", 3) == torch.device("cuda", 0)
