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
from megabatch.models import ModelOptions, Towers, TwoTowers, available, create


def test_names_are_open_clips_and_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert available() == ["glyph-small", *open_clip.list_models()]
    assert main(["models"]) == 0
    listed = capsys.readouterr().out.split()
    captioning = {n for n in open_clip.list_models() if "coca" in n}  # which cannot be trained
    assert set(available()) - set(listed) == captioning
    assert listed[-3:] == ["local-dir:PATH", "hf:PATH", "module:function"]


@pytest.mark.parametrize(
    ("name", "pretrained", "message"),
    [
        ("glyph_small", None, "glyph_small.*did you mean.*glyph-small"),
        ("vit-b-32", None, "vit-b-32.*did you mean.*ViT-B-32"),
        ("qqqqqqqq", None, "'qqqqqqqq' is not known"),
        ("hf-hub:timm/ViT-B-16-SigLIP", None, "not known; nothing is downloaded"),
        ("glyph-small", "weights.npz", r"weights\.npz has no tensors that can be read"),
        ("glyph-small", "absent.safetensors", r"no file .*absent\.safetensors"),
        ("glyph-small", "half.safetensors", r"half\.safetensors has no tensors that can be read"),
        ("ViT-B-32", "laion2b_s34b_b79k", "no file laion2b_s34b_b79k .nothing is downloaded"),
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


def without_scale() -> Any:
    return replace(towers(), module=nn.Linear(2, 2))


@pytest.fixture(autouse=True)
def _path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))


def test_own_towers_have_the_options_the_references_name_and_the_weights(tmp_path: Path) -> None:
    made = create(f"{__name__}:towers", options=ModelOptions(init_logit_scale=1.25))
    assert made.name == f"{__name__}:towers"
    assert made.module.logit_scale.item() == 1.25
    assert made.module.training
    state = {name: value + 1 for name, value in towers().module.state_dict().items()}
    save_file(state, tmp_path / "weights.safetensors")
    made = create(f"{__name__}:plain", pretrained=tmp_path / "weights.safetensors")
    torch.testing.assert_close(made.module.state_dict(), state, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("plain", {"force_image_size": 8}, "a function without the parameter options, has no such"),
        ("number", {}, r"to return megabatch\.models\.Towers, got int"),
        ("without_scale", {}, r"module\.logit_scale: expected a parameter with one element"),
    ],
)
def test_own_towers_that_cannot_be_used(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=rf"--model {__name__}:{name}.*{message}"):
        create(f"{__name__}:{name}", options=ModelOptions(**options))
