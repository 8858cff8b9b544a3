from __future__ import annotations

from pathlib import Path

import pytest

from megabatch.errors import UsageError
from megabatch.evaluation.config import EvalConfig, check, choose_device

RUN = {"run": Path("runs/a")}
MODEL = {"model": "ViT-B-32", "output": Path("out"), "val_data": "a.csv"}


CLASSES = {**RUN, "class_data": "d", "templates": "simple"}


@pytest.mark.parametrize("settings", [RUN, MODEL, CLASSES])
def test_what_can_be_done_is_let_pass(settings: dict) -> None:
    check(EvalConfig(**settings))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "expected either a run's folder or --model NAME"),
        ({**RUN, **MODEL}, "expected either a run's folder or --model NAME"),
        ({**RUN, "pretrained": Path("a.pt")}, "--pretrained: only with --model"),
        ({**MODEL, "output": None}, "--output: needed with --model"),
        ({**MODEL, "val_data": None}, "--val-data or --class-data: needed with --model"),
        ({**MODEL, "weights": "ema"}, "--weights: chooses between a run's"),
        ({**RUN, "templates": "simple"}, "--templates: only with --class-data"),
        ({**RUN, "csv_img_key": "a"}, "--csv-img-key: only with --val-data"),
    ],
)
def test_what_cannot_be_is_named(settings: dict, message: str) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        check(EvalConfig(**settings))
    assert "\n" not in str(caught.value)


def test_a_device_is_chosen_for_each_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    assert choose_device("auto") == "cpu"
    monkeypatch.setattr("torch.cuda.device_count", lambda: 4)
    monkeypatch.setenv("LOCAL_RANK", "2")
    assert choose_device("auto") == "cuda"  # the current one
    assert choose_device("auto", several=True) == "cuda:2"
    assert choose_device("cpu", several=True) == "cpu"
