"""open_clip's models with their own tokenizers and transforms."""

from __future__ import annotations

import open_clip
import pytest
import torch
from PIL import Image

from megabatch.errors import UsageError
from megabatch.models import ModelOptions, create
from tests.models.tiny import TINY, changed


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
    outputs = towers.module(images, texts)
    assert outputs.keys() == {"image_features", "text_features", "logit_scale"}
    assert outputs["image_features"].shape == outputs["text_features"].shape == (2, 16)
    assert towers.embed_dim == 16
    assert create(TINY).tokenizer is towers.tokenizer  # made once for each configuration
    shorter = create(TINY, options=ModelOptions(force_context_length=12)).tokenizer
    assert [t("a picture").shape for t in (towers.tokenizer, shorter)] == [(1, 16), (1, 12)]


def test_patch_dropout_without_patches_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    name = changed(monkeypatch, {"vision_cfg": {"layers": [1, 1, 1, 1], "width": 8}})
    create(name, options=ModelOptions(force_patch_dropout=0.0))
    with pytest.raises(UsageError, match="--force-patch-dropout: the image tower of changed drops"):
        create(name, options=ModelOptions(force_patch_dropout=0.5))


def test_what_open_clip_cannot_make_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="CoCa"):
        create("coca_ViT-B-32")
    sounds = {"embed_dim": 8, "audio_cfg": {}, "text_cfg": {}}  # as newer versions have
    monkeypatch.setitem(open_clip.factory._MODEL_CONFIGS, "sounds", sounds)
    with pytest.raises(UsageError, match="sounds has no image tower, expected an image and a text"):
        create("sounds")

    def fail(*args: object, **kwargs: object) -> None:
        raise RuntimeError("Please install\n the library")

    monkeypatch.setattr(open_clip, "get_tokenizer", fail)
    new = ModelOptions(force_context_length=13)  # no other test made its tokenizer
    message = "RuntimeError: Please install the library"
    with pytest.raises(UsageError, match=f"the tokenizer of {TINY}: {message}"):
        create(TINY, options=new)
    monkeypatch.setattr(open_clip, "create_model_and_transforms", fail)
    with pytest.raises(UsageError, match=f"cannot build {TINY} here: {message}"):
        create(TINY)
