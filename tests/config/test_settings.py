"""Settings that are refused, each with its reason and all at once."""

from __future__ import annotations

import ast
import re
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch

import megabatch
from megabatch.cli import main
from megabatch.config.problems import problems
from megabatch.config.settings import resolve_device
from megabatch.training import TrainConfig


def test_the_defaults_are_possible() -> None:
    assert problems(TrainConfig()) == []


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("global_batch_size", 0),
        ("micro_batch_size", 0),
        ("micro_batch_size", -5),
        ("epochs", 0),
        ("steps", 0),
        ("steps", -1),
        ("lr", 0.0),
        ("lr", -1e-3),
        ("lr", float("nan")),
        ("lr", float("inf")),
        ("beta1", 1.0),
        ("beta2", -0.1),
        ("eps", 0.0),
        ("wd", -0.1),
        ("warmup", -1),
        ("grad_clip_norm", 0.0),
        ("max_logit_scale", 0.5),
        ("seed", -1),
        ("seed", 2**32),
        ("workers", -1),
        ("log_every", 0),
        ("checkpoint_every", -1),
        ("keep_checkpoints", 0),
        ("device", "tpu:0"),
        ("device", "cuda:99"),
        ("device", "gpu"),
    ],
)
def test_an_impossible_number_is_refused_by_name(name: str, value: Any) -> None:
    (reason,) = problems(replace(TrainConfig(), **{name: value}))
    assert reason.startswith(f"--{name.replace('_', '-')} {value}: ")


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("precision", "int8", "'fp32' or 'bf16' or 'fp16'"),
        ("hf_pooling", "max", "'mean' or 'cls' or 'last'"),
        ("matryoshka_dims", (8, 0.5), "a list, each a whole number"),
        ("global_batch_size", 4096.0, "a whole number"),
        ("micro_batch_size", 1.5, "a whole number or 'auto'"),
        ("micro_batch_size", "large", "a whole number or 'auto'"),
        ("workers", True, "a whole number"),
        ("lr", "fast", "a number"),
        ("resume", "yes", "true or false"),
        ("output", "runs", "a path"),
        ("model", 3, "a text"),
    ],
)
def test_a_value_of_the_wrong_type_is_refused(name: str, value: Any, expected: str) -> None:
    assert problems(replace(TrainConfig(), **{name: value})) == [
        f"--{name.replace('_', '-')} {value!r}: expected {expected}"
    ]


def test_whole_numbers_will_do_where_any_number_goes() -> None:
    assert problems(TrainConfig(lr=1, grad_clip_norm=1)) == []


def test_all_reasons_come_at_once() -> None:
    reasons = problems(TrainConfig(micro_batch_size=0, lr=-1.0, device="tpu"))
    assert [reason.split()[0] for reason in reasons] == ["--micro-batch-size", "--lr", "--device"]


def test_epochs_do_not_matter_where_steps_are_given() -> None:
    assert problems(TrainConfig(epochs=0, steps=5)) == []


def test_a_micro_batch_larger_than_the_batch_is_possible() -> None:
    assert problems(TrainConfig(global_batch_size=4, micro_batch_size=512)) == []


def test_every_setting_is_explained(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--help-all"]) == 0
    lines = capsys.readouterr().out.splitlines()
    for field in fields(TrainConfig):
        name = f"  --{field.name.replace('_', '-')}"
        at = next(i for i, line in enumerate(lines) if re.match(rf"{name}( |,|$)", line))
        assert lines[at + 1].startswith("      "), name


def test_auto_takes_what_there_is() -> None:
    assert resolve_device("auto").type == ("cuda" if torch.cuda.is_available() else "cpu")
    assert resolve_device("cpu") == torch.device("cpu")


def test_every_reason_names_its_setting_as_it_is_typed() -> None:
    for name in (field.name for field in fields(TrainConfig)):
        (reason,) = problems(replace(TrainConfig(), **{name: object()}))
        assert reason.startswith(f"--{name.replace('_', '-')} <object")


@pytest.mark.parametrize("package", ["config", "training", "planning", "models", "data"])
def test_no_message_begins_with_a_settings_name_as_files_have_it(package: str) -> None:
    names = "|".join(field.name for field in fields(TrainConfig))
    begins = re.compile(rf"({names})(, ({names}))*(: |=| = )")
    for source in (Path(megabatch.__file__).parent / package).glob("*.py"):
        tree = ast.parse(source.read_text())
        raised = (node.exc for node in ast.walk(tree) if isinstance(node, ast.Raise))
        for made in (call for call in raised if isinstance(call, ast.Call)):
            if getattr(made.func, "id", "") == "UsageError":
                texts = [n.value for n in ast.walk(made) if isinstance(n, ast.Constant)]
                assert not [t for t in texts if isinstance(t, str) and begins.match(t)], source
