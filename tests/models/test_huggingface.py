"""Pairs of texts with encoders from a folder: pooling, padding, sharing, training."""

from __future__ import annotations

import contextlib
import json
import pickle
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from megabatch.errors import UsageError
from megabatch.models import ModelOptions, Towers, create
from megabatch.models.padding import pool
from megabatch.models.towers import lock, locked_towers
from tests.export.runs import change_json, reports
from tests.models.tiny_bert import save_tiny_bert
from tests.own_parts import writing_when_imported


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_bert(tmp_path_factory.mktemp("bert"))


def made(folder: Path, **options: object) -> Towers:
    towers = create(f"hf:{folder}", options=ModelOptions(**options))  # type: ignore[arg-type]
    towers.module.eval()  # no dropout
    return towers


def test_both_texts_go_the_same_way(folder: Path) -> None:
    towers = made(folder)
    assert towers.first == "text"
    first = torch.stack([towers.train_transform(text) for text in ("a b c", "d")])
    second = towers.tokenizer(["a b c", "d"])
    assert torch.equal(first, second)
    assert second.tolist() == [[2, 4, 5, 6, 3, *[0] * 7], [2, 7, 3, *[0] * 9]]
    outputs = towers.module(first, second)
    assert outputs.keys() == {"image_features", "text_features", "logit_scale"}
    assert outputs["text_features"].shape == (2, towers.embed_dim) == (2, 16)
    assert torch.equal(outputs["image_features"], outputs["text_features"])
    torch.testing.assert_close(outputs["text_features"].norm(dim=-1), torch.ones(2))
    assert outputs["logit_scale"].item() == pytest.approx(20)
    assert towers.lengths.keys() == {"image", "text"}
    assert torch.equal(towers.train_transform.texts(["a b c", "d"]), first)  # type: ignore[attr-defined]
    outputs["image_features"].sum().mul(outputs["logit_scale"]).backward()
    assert all(p.grad is not None for p in towers.module.parameters())  # DDP would wait for them
    for part in (towers.train_transform, towers.tokenizer):
        pickle.loads(pickle.dumps(part))


@pytest.mark.parametrize("pooling", ["mean", "cls", "last"])
def test_pooling_is_what_it_says_and_knows_no_padding(folder: Path, pooling: str) -> None:
    towers = made(folder, hf_pooling=pooling)
    tokens = towers.tokenizer("a b c")
    encoder = towers.module.visual.encoder
    states: Tensor = encoder(input_ids=tokens[:, :5]).last_hidden_state  # without the padding
    expected = {"mean": states.mean(1), "cls": states[:, 0], "last": states[:, 4]}[pooling]
    torch.testing.assert_close(towers.module.encode_text(tokens), expected)
    before = torch.cat([torch.zeros_like(states), states], dim=1)  # padding before the text
    mask = torch.arange(10).unsqueeze(0) >= 5
    torch.testing.assert_close(pool(before, mask, pooling), expected)  # type: ignore[arg-type]
    assert towers.module.encode_text(torch.zeros_like(tokens)).isfinite().all()  # padding alone


@pytest.mark.parametrize(
    ("saved", "more", "own"),
    [
        ({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}, (), "cls"),
        ({"pooling_mode": "lasttoken", "include_prompt": True}, (), "last"),
        ({"pooling_mode": "mean"}, (), "mean"),
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


def test_weights_come_from_a_run_the_folder_or_chance(folder: Path, tmp_path: Path) -> None:
    towers = made(folder)
    with torch.no_grad():
        towers.module.logit_scale.fill_(1.5)
    path = tmp_path / "model.safetensors"
    save_file(towers.module.state_dict(), path)
    assert create(f"hf:{folder}", pretrained=path).module.logit_scale.item() == 1.5
    with pytest.raises(UsageError, match="does not hold the weights of hf:"):
        create(f"hf:{folder}", pretrained=path, options=ModelOptions(hf_share=False))
    path.unlink()
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_text((folder / name).read_text())
    torch.manual_seed(5)
    stored, fresh = made(folder).module.state_dict(), made(tmp_path).module.state_dict()
    assert stored.keys() == fresh.keys()
    name = "visual.encoder.embeddings.word_embeddings.weight"
    assert not torch.equal(stored[name], fresh[name])


def test_context_length(folder: Path) -> None:
    assert made(folder, force_context_length=5).tokenizer("a b c d e f").tolist() == [
        [2, 4, 5, 6, 3]
    ]
    assert made(folder).tokenizer([]).shape == (0, 12)
    with pytest.raises(UsageError, match=r"--force-context-length 13: .* positions for 12"):
        made(folder, force_context_length=13)


def test_what_cannot_be_is_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"--force-image-size: hf:.* has no such option"):
        made(folder, force_image_size=32)
    with pytest.raises(UsageError, match=r"there is no .*config\.json"):
        create(f"hf:{tmp_path}")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "of no kind"}))
    with pytest.raises(UsageError, match="cannot be read"):
        create(f"hf:{tmp_path}")
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    with pytest.raises(UsageError, match=r"the tokenizer of .* is missing"):
        create(f"hf:{tmp_path}")


def test_padding_that_ends_each_text_is_refused_as_it_would_be_masked(tmp_path: Path) -> None:
    folder = save_tiny_bert(tmp_path / "bert")
    change_json(folder / "tokenizer_config.json", pad_token="[SEP]")
    with pytest.raises(UsageError, match=r"its padding token, \[SEP\], into each text"):
        create(f"hf:{folder}")


def test_code_of_a_folder_is_not_run_even_if_the_user_would_agree(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save_tiny_bert(tmp_path / "bert")
    (folder / "evil.py").write_text(writing_when_imported(tmp_path / "it-ran"))
    auto_map = {"AutoConfig": "evil.Config"}
    change_json(folder / "config.json", model_type="evil", auto_map=auto_map)
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", tmp_path / "cache")
    monkeypatch.setattr(sys, "path", list(sys.path))
    with contextlib.suppress(UsageError):  # transformers takes another class if it knows one
        create(f"hf:{folder}")
    assert not (tmp_path / "it-ran").exists()


@pytest.mark.parametrize(
    ("without", "missing"), [("pooler.", None), ("query.", "layer.0.attention.self.query.bias")]
)
def test_weights_may_lack_the_pooler_alone(
    tmp_path: Path, without: str, missing: str | None
) -> None:
    file = save_tiny_bert(tmp_path / "bert") / "model.safetensors"
    save_file(
        {n: t for n, t in load_file(file).items() if without not in n}, file, {"format": "pt"}
    )
    with reports() as logged:
        if missing is None:
            made(file.parent)
        else:
            with pytest.raises(UsageError, match=rf"lacks 4 tensors of its model.*{missing}"):
                made(file.parent)
    assert not logged  # by transformers
