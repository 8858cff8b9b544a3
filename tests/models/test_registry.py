"""Models by name, and those of a user's own function."""

from __future__ import annotations

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


def test_a_name_close_to_nothing_is_refused_too() -> None:
    with pytest.raises(UsageError, match="'qqqqqqqq' is not known"):
        create("qqqqqqqq")


def test_a_name_on_a_hub_is_not_downloaded() -> None:
    with pytest.raises(UsageError, match="not known"):
        create("hf-hub:timm/ViT-B-16-SigLIP")


def test_a_format_that_is_not_read_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "weights.npz"
    path.write_bytes(b"")
    with pytest.raises(UsageError, match=r"expected a local \.safetensors or \.pt"):
        create("glyph-small", pretrained=path)


def test_a_name_of_published_weights_is_refused() -> None:
    with pytest.raises(UsageError, match="nothing is downloaded"):
        create("ViT-B-32", pretrained="laion2b_s34b_b79k")


def test_missing_weights_are_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"no file .*absent\.safetensors"):
        create("glyph-small", pretrained=tmp_path / "absent.safetensors")


def test_damaged_weights_are_named(tmp_path: Path) -> None:
    path = tmp_path / "half.safetensors"
    save_file({"a": torch.zeros(1000)}, path)
    path.write_bytes(path.read_bytes()[:2000])
    with pytest.raises(UsageError, match=r"half\.safetensors is damaged"):
        create("glyph-small", pretrained=path)


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
