"""Models of the user's own, made by a function of theirs."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from megabatch.errors import UsageError
from megabatch.models import ModelOptions, Towers, TwoTowers, create


def tokenize(texts: list[str]) -> Tensor:
    return torch.tensor([[len(text)] for text in texts])


def towers(options: ModelOptions | None = None) -> Towers:
    text = nn.Sequential(nn.EmbeddingBag(9, 4), nn.Linear(4, 3))
    module = TwoTowers(nn.Sequential(nn.Flatten(), nn.Linear(4, 3)), text, options)
    return Towers("any", module.eval(), torch.zeros_like, torch.zeros_like, tokenize, 3)


def plain() -> Towers:
    return towers()


def number() -> int:
    return 3


@pytest.fixture(autouse=True)
def _path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))


def test_towers_have_the_options_and_the_references_name() -> None:
    made = create(f"{__name__}:towers", options=ModelOptions(init_logit_scale=1.25))
    assert made.name == f"{__name__}:towers"
    assert made.module.logit_scale.item() == 1.25
    assert made.module.training


def test_weights_are_loaded(tmp_path: Path) -> None:
    state = {name: value + 1 for name, value in towers().module.state_dict().items()}
    save_file(state, tmp_path / "weights.safetensors")
    made = create(f"{__name__}:plain", pretrained=tmp_path / "weights.safetensors")
    for name, value in made.module.state_dict().items():
        assert torch.equal(value, state[name])


def test_options_that_the_function_does_not_take() -> None:
    with pytest.raises(
        UsageError, match=r"^--force-image-size: --model tests\.models\.test_own:plain takes"
    ):
        create(f"{__name__}:plain", options=ModelOptions(force_image_size=8))


class OneTower(nn.Module):
    def encode_image(self) -> None: ...


class WithoutScale(OneTower):
    def encode_text(self) -> None: ...


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"module": 3}, "module: expected a torch.nn.Module, got 3 (int)"),
        ({"module": OneTower()}, "module: expected a method encode_text, as TwoTowers has"),
        (
            {"module": WithoutScale()},
            "module.logit_scale: expected a parameter with one element, got None (NoneType)",
        ),
        ({"train_transform": None}, "train_transform: expected a function, got None (NoneType)"),
        ({"embed_dim": 2.5}, "embed_dim: expected a whole number above 0, got 2.5 (float)"),
        ({"first": "sound"}, "first: expected 'image' or 'text', got 'sound' (str)"),
        (
            {"tokenizer": lambda texts: texts},
            "tokenizer: expected int64 (n, context_length) for n texts, got ['a', 'b'] (list)",
        ),
        (
            {"tokenizer": lambda texts: torch.zeros(2, 5)},
            "tokenizer: expected int64 (n, context_length) for n texts, got (torch.float32, (",
        ),
        ({"tokenizer": lambda texts: texts[5]}, "tokenizer: IndexError: list index out of range"),
    ],
)
def test_parts_that_cannot_be_used_say_why(
    changes: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    changed = replace(towers(), **changes)
    monkeypatch.setattr(sys.modules[__name__], "towers", lambda: changed)
    with pytest.raises(UsageError) as caught:
        create(f"{__name__}:towers")
    assert str(caught.value).startswith(f"--model {__name__}:towers: {message}")


def test_another_type() -> None:
    with pytest.raises(UsageError, match=r"to return megabatch\.models\.Towers, got 3 \(int\)"):
        create(f"{__name__}:number")
