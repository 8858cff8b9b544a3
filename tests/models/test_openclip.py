"""open_clip's models with their own tokenizers and transforms."""

from __future__ import annotations

import contextlib
import json
import sys
from pathlib import Path

import open_clip
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

from megabatch.errors import UsageError
from megabatch.models import ModelOptions, create
from tests.export.runs import change_json
from tests.models.tiny import CONFIG, TINY
from tests.models.tiny_bert import save_tiny_bert
from tests.own_parts import writing_when_imported


def test_features_transforms_and_tokenizer_fit_together(
    caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    towers = create(TINY)
    assert not caplog.records  # such as warnings that random weights are random
    assert capfd.readouterr().err == ""
    assert towers.module.training
    picture = Image.new("RGB", (50, 40), (200, 30, 30))
    images = torch.stack([towers.train_transform(picture), towers.eval_transform(picture)])
    texts = towers.tokenizer(["a red picture", "another"])
    towers.module.eval()
    outputs = towers.module(images, texts)
    assert outputs.keys() == {"image_features", "text_features", "logit_scale"}
    assert outputs["image_features"].shape == outputs["text_features"].shape == (2, 16)
    assert towers.embed_dim == 16
    torch.testing.assert_close(
        towers.module.encode_text(texts, normalize=True), outputs["text_features"]
    )
    assert create(TINY).tokenizer is towers.tokenizer  # made once for each configuration
    shorter = create(TINY, options=ModelOptions(force_context_length=12)).tokenizer
    assert [t("a picture").shape for t in (towers.tokenizer, shorter)] == [(1, 16), (1, 12)]


def test_weights_of_another_model_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "weights.safetensors"
    save_file({"other": torch.zeros(2)}, path)
    with pytest.raises(UsageError, match=f"--pretrained {path}: open_clip cannot build {TINY}"):
        create(TINY, pretrained=path)


def test_patch_dropout_without_patches_is_refused(tmp_path: Path) -> None:
    model = {
        "embed_dim": 16,
        "vision_cfg": {"layers": [1, 1, 1, 1], "width": 8, "image_size": 32},
        "text_cfg": {"context_length": 8, "vocab_size": 60, "width": 16, "heads": 2, "layers": 1},
    }
    (tmp_path / "open_clip_config.json").write_text(json.dumps({"model_cfg": model}))
    save_file(open_clip.CLIP(**model).state_dict(), tmp_path / "open_clip_model.safetensors")
    name = f"local-dir:{tmp_path}"
    create(name, options=ModelOptions(force_patch_dropout=0.0))
    with pytest.raises(UsageError, match=r"--force-patch-dropout: the image tower of local-dir:"):
        create(name, options=ModelOptions(force_patch_dropout=0.5))


def test_what_open_clip_cannot_make_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="CoCa"):
        create("coca_ViT-B-32")

    def fail(*args: object, **kwargs: object) -> None:
        raise RuntimeError("Please install\n the library")

    monkeypatch.setattr(open_clip, "get_tokenizer", fail)
    new = ModelOptions(force_context_length=13)  # no other test made its tokenizer
    with pytest.raises(UsageError, match=f"the tokenizer of {TINY}: Please install the library"):
        create(TINY, options=new)
    monkeypatch.setattr(open_clip, "create_model_and_transforms", fail)
    with pytest.raises(UsageError, match=f"cannot build {TINY} here: Please install the library"):
        create(TINY)


@pytest.mark.parametrize("part", ["tokenizer", "text tower"])
def test_code_of_a_folder_is_not_run_even_if_the_user_would_agree(
    part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save_tiny_bert(tmp_path / "folder")
    (folder / "evil.py").write_text(writing_when_imported(tmp_path / "it-ran"))
    config = json.loads(CONFIG.read_text())
    if part == "tokenizer":
        kwargs = {"trust_remote_code": True}
        config["text_cfg"] |= {"hf_tokenizer_name": "any", "tokenizer_kwargs": kwargs}
        asking = {"tokenizer_class": "Tokenizer"}
        asking |= {"auto_map": {"AutoTokenizer": [None, "evil.Tokenizer"]}}
        change_json(folder / "tokenizer_config.json", **asking)
    else:
        config["text_cfg"] = {"hf_model_name": str(folder)}
        auto_map = {"AutoConfig": "evil.Config"}
        change_json(folder / "config.json", model_type="evil", auto_map=auto_map)
    (folder / "open_clip_config.json").write_text(json.dumps({"model_cfg": config}))
    save_file(create(TINY).module.state_dict(), folder / "open_clip_model.safetensors")
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", tmp_path / "cache")
    monkeypatch.setattr(sys, "path", list(sys.path))
    with contextlib.suppress(UsageError):  # transformers takes another class if it knows one
        create(f"local-dir:{folder}")
    assert not (tmp_path / "it-ran").exists()
