"""Models by name, and those of a user's own function."""

from __future__ import annotations

import contextlib
import json
import sys
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
from tests.export.runs import change_json
from tests.models.tiny import CONFIG, TINY
from tests.models.tiny_bert import save_tiny_bert
from tests.own_parts import writing_when_imported


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
        ("ViT-B-32", "laion2b_s34b_b79k", "no file laion2b_s34b_b79k .nothing is downloaded"),
    ],
)
def test_what_is_not_there_is_named(name: str, pretrained: str | None, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        create(name, pretrained=pretrained)


@pytest.mark.parametrize("part", ["encoder", "text tower", "tokenizer"])
def test_code_of_a_folder_is_not_run_even_if_the_user_would_agree(
    part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save_tiny_bert(tmp_path / "folder")
    (folder / "evil.py").write_text(writing_when_imported(tmp_path / "it-ran"))
    config = json.loads(CONFIG.read_text())
    if part == "tokenizer":
        kwargs = {"trust_remote_code": True}
        config["text_cfg"] |= {"hf_tokenizer_name": "any", "tokenizer_kwargs": kwargs}
        auto_map: Any = {"AutoTokenizer": [None, "evil.Tokenizer"]}
        file, changes = "tokenizer_config.json", {"tokenizer_class": "Tokenizer"}
    else:
        config["text_cfg"] = {"hf_model_name": str(folder)}
        auto_map = {"AutoConfig": "evil.Config"}
        file, changes = "config.json", {"model_type": "evil"}
    change_json(folder / file, auto_map=auto_map, **changes)
    (folder / "open_clip_config.json").write_text(json.dumps({"model_cfg": config}))
    save_file(create(TINY).module.state_dict(), folder / "open_clip_model.safetensors")
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", tmp_path / "cache")
    with contextlib.suppress(UsageError):  # transformers takes another class if it knows one
        create(f"{'hf' if part == 'encoder' else 'local-dir'}:{folder}")
    assert not (tmp_path / "it-ran").exists()


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
        ("tokenize", {}, r"it needs texts; expected parameters with a default, or options"),
        ("number", {}, r"to return megabatch\.models\.Towers, got int"),
    ],
)
def test_own_towers_that_cannot_be_used(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=rf"--model {__name__}:{name}.*{message}"):
        create(f"{__name__}:{name}", options=ModelOptions(**options))
