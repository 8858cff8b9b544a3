"""Pairs of texts with encoders from a folder: pooling, padding, sharing, training."""

from __future__ import annotations

import contextlib
import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from megabatch.errors import UsageError
from megabatch.models import ModelOptions, create
from megabatch.models.towers import lock, locked_towers
from tests.export.runs import change_json, reports
from tests.models.tiny_bert import made, save_tiny_bert


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_bert(tmp_path_factory.mktemp("bert"))


def test_both_texts_go_the_same_way(folder: Path) -> None:
    towers = made(folder)
    assert towers.first == "text"
    first = torch.stack([towers.train_transform(text) for text in ("a b c", "d")])
    second = towers.tokenizer(["a b c", "d"])
    assert torch.equal(first, second)
    assert second.tolist() == [[2, 4, 5, 6, 3, *[0] * 7], [2, 7, 3, *[0] * 9]]
    assert towers.tokenizer([]).shape == (0, 12)
    shorter = made(folder, force_context_length=4).tokenizer
    assert shorter(["a b c", "d"]).tolist() == [[2, 4, 5, 3], [2, 7, 3, 0]]
    outputs = towers.module(first, second)
    assert outputs.keys() == {"image_features", "text_features", "logit_scale"}
    assert outputs["text_features"].shape == (2, towers.embed_dim) == (2, 16)
    assert torch.equal(outputs["image_features"], outputs["text_features"])
    torch.testing.assert_close(outputs["text_features"].norm(dim=-1), torch.ones(2))
    assert outputs["logit_scale"].item() == pytest.approx(20)
    assert towers.lengths.keys() == {"image", "text"}
    outputs["image_features"].sum().mul(outputs["logit_scale"]).backward()
    assert all(p.grad is not None for p in towers.module.parameters())  # DDP would wait for them
    for part in (towers.train_transform, towers.tokenizer):
        pickle.loads(pickle.dumps(part))


@pytest.mark.parametrize(
    ("saved", "more", "own"),
    [
        ({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}, (), "cls"),
        ({"pooling_mode": "lasttoken", "include_prompt": True}, (), "last"),
        ({"pooling_mode_max_tokens": True, "pooling_mode_cls_token": True}, (), None),
        ({"pooling_mode_mean_tokens": True}, ("Dense",), None),
    ],
)
def test_the_pooling_of_a_folder_of_sentence_transformers(
    tmp_path: Path, saved: dict[str, object], more: tuple[str, ...], own: str | None
) -> None:
    folder = save_tiny_bert(tmp_path / "bert")
    modules = ["Transformer", "Pooling", *more, "Normalize"]
    listed = [{"type": f"sentence_transformers.models.{m}", "path": m} for m in modules]
    (folder / "modules.json").write_text(json.dumps(listed))
    (folder / "Pooling").mkdir()
    (folder / "Pooling" / "config.json").write_text(json.dumps(saved))
    assert made(folder, hf_pooling="last").module.visual.pooling == "last"
    if own is not None:
        assert made(folder).module.visual.pooling == own
        return
    named = "Pooling, Dense, Normalize" if more else "pooling_mode_max_tokens, pooling_mode_cls"
    with pytest.raises(UsageError, match=f"{named}.*, expected one pooling of mean, cls, last"):
        made(folder)


def test_one_encoder_or_two(folder: Path) -> None:
    one, two = made(folder).module, made(folder, hf_share=False).module
    counts = [sum(p.numel() for p in module.parameters()) - 1 for module in (one, two)]
    assert counts[1] == 2 * counts[0]
    tokens = torch.tensor([[2, 4, 3]])
    torch.testing.assert_close(two.encode_image(tokens), two.encode_text(tokens))  # start alike
    with pytest.raises(UsageError, match="--lock-image: one encoder serves both sides"):
        lock(one, "image")
    lock(two, "image")
    lock(two, "text")
    assert locked_towers(two) == {"image", "text"}


def test_weights_of_a_run(folder: Path, tmp_path: Path) -> None:
    state = {name: value + 1 for name, value in made(folder).module.state_dict().items()}
    save_file(state, tmp_path / "model.safetensors")
    name = f"hf:{folder}"
    again = create(name, pretrained=tmp_path).module.state_dict()
    torch.testing.assert_close(again, state, rtol=0, atol=0)
    with pytest.raises(UsageError, match="does not hold the weights of hf:"):
        create(name, pretrained=tmp_path, options=ModelOptions(hf_share=False))


@pytest.mark.parametrize(
    ("change", "options", "message"),
    [
        (None, {"force_context_length": 13}, "--force-context-length 13: .* positions for 12"),
        (None, {"force_image_size": 32}, "--force-image-size: hf:.* has no such option"),
        (("config.json", {"model_type": "of no kind"}), {}, "cannot be read: ValueError: "),
        (("tokenizer.json", None), {}, r"the tokenizer of .* is missing"),
        (
            ("tokenizer_config.json", {"pad_token": "[SEP]"}),
            {},
            "into each text, where it",
        ),
    ],
)
def test_what_cannot_be_is_refused(
    tmp_path: Path, change: Any, options: dict[str, Any], message: str
) -> None:
    folder = save_tiny_bert(tmp_path)
    if change:
        name, values = change
        change_json(folder / name, **values) if values else (folder / name).unlink()
    with pytest.raises(UsageError, match=message):
        made(folder, **options)


@pytest.mark.parametrize(
    ("without", "message"),
    [("pooler.", ""), ("query.", r"lacks 4 tensors of its model.*0\.attention\.self\.query\.bias")],
)
def test_weights_may_lack_the_pooler_alone(tmp_path: Path, without: str, message: str) -> None:
    file = save_tiny_bert(tmp_path) / "model.safetensors"
    left = {name: value for name, value in load_file(file).items() if without not in name}
    save_file(left, file, {"format": "pt"})
    refused = pytest.raises(UsageError, match=message) if message else contextlib.nullcontext()
    with reports() as logged, refused:
        made(tmp_path)
    assert not logged  # by transformers
