"""Models by name, and those of a user's own function."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import open_clip
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from megabatch.cli import main
from megabatch.errors import UsageError
from megabatch.models import ModelOptions, Towers, TwoTowers, available, create, names


def test_every_open_clip_architecture_is_available() -> None:
    assert available() == ["glyph-small", *open_clip.list_models()]
    assert list(names.OWN) == available()[:1]


def test_the_same_names_are_found_without_importing_open_clip(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    known = names.openclip_names()
    own = [name for name in known if not name.startswith("megabatch-test")]  # of other tests
    monkeypatch.delitem(sys.modules, "open_clip")
    assert names.openclip_names() == own
    assert "open_clip" not in sys.modules
    assert main(["models"]) == 0
    listed = capsys.readouterr().out.split()
    captioning = {n for n in own if "multimodal_cfg" in open_clip.get_model_config(n)}
    assert set(own) - set(listed) == captioning  # which cannot be trained
    assert {"glyph-small", "hf:PATH", "local-dir:PATH"} <= set(listed)


@pytest.mark.parametrize(
    ("name", "meant"), [("glyph_small", "glyph-small"), ("vit-b-32", "ViT-B-32"), ("RN-50", "RN50")]
)
def test_an_unknown_name_is_refused_with_names_close_to_it(name: str, meant: str) -> None:
    with pytest.raises(UsageError, match=f"{name}.*did you mean.*{meant}"):
        create(name)


@pytest.mark.parametrize(
    ("name", "pretrained", "message"),
    [
        ("qqqqqqqq", None, "'qqqqqqqq' is not known"),
        ("hf-hub:timm/ViT-B-16-SigLIP", None, "not known, and nothing is downloaded"),
        ("glyph-small", "weights.npz", r"expected a local \.safetensors or \.pt"),
        ("glyph-small", "absent.safetensors", r"no file .*absent\.safetensors"),
        ("glyph-small", "half.safetensors", r"half\.safetensors is damaged"),
        ("ViT-B-32", "laion2b_s34b_b79k", "nothing is downloaded"),
    ],
)
def test_what_is_not_there_is_named(
    name: str,
    pretrained: str | None,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    save_file({"a": torch.zeros(1000)}, "half.safetensors")
    os.truncate("half.safetensors", 2000)
    Path("weights.npz").touch()
    with pytest.raises(UsageError, match=message):
        create(name, pretrained=pretrained)


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
        UsageError, match=r"^--force-image-size: --model tests\.models\.test_registry:plain takes"
    ):
        create(f"{__name__}:plain", options=ModelOptions(force_image_size=8))


class OneTower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.logit_scale = nn.Parameter(torch.zeros(()))

    def encode_image(self) -> None: ...


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"module": 3}, "module: expected a torch.nn.Module, got 3 (int)"),
        ({"module": OneTower()}, "module.encode_text: expected a function, got None (NoneType)"),
        (
            {"module": nn.Linear(2, 2)},
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
