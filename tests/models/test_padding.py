"""Texts without their padding: the same features from every tower that says so, in float64."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from open_clip.model import CLIP, CustomTextCLIP
from torch import Tensor, nn

from megabatch.models import create
from megabatch.models.glyph import LENGTHS, HashingTokenizer, TextFeatureTower
from megabatch.models.huggingface import TextEncoder
from megabatch.models.openclip import accept_short_texts
from megabatch.models.padding import (
    MASKED_KINDS,
    Lengths,
    Pooling,
    pool,
    up_to_first,
    up_to_largest,
    without_padding,
)
from tests.export.runs import change_json
from tests.models.tiny import TINY, TINY_UNMASKED
from tests.models.tiny_clip import save_tiny_clip
from tests.process_state import changed

CONTEXT, END = 16, 40  # END is the largest token
SIZES = (5, 1, 7, 2, 6)  # of the texts, without the end


def texts(pad: int = 0, context: int = CONTEXT, end: int = END) -> Tensor:
    """Tokens (5, context) below the end, an end, and padding."""
    torch.manual_seed(2)
    rows = torch.full((len(SIZES), context), pad)
    for row, length in zip(rows, SIZES, strict=True):
        row[:length] = torch.randint(4, end, (length,))
        row[length] = end
    return rows


@pytest.fixture(autouse=True)
def _float64() -> Iterator[None]:
    """Older releases of transformers make masks of the default dtype."""
    with changed("default dtype", torch.float64):
        yield


def check(module: nn.Module, encode: Callable[[Tensor], Tensor], lengths: Lengths, tokens: Tensor):
    """Features and gradients without padding are those with it."""
    module.double().eval()
    longest = int(lengths(tokens).max())
    assert longest < tokens.shape[1]
    gradients = []
    features = []
    for width in (tokens.shape[1], longest):
        module.zero_grad()
        features.append(encode(tokens[:, :width]))
        features[-1].square().sum().add(features[-1].sum()).backward()
        gradients.append({n: p.grad for n, p in module.named_parameters() if p.grad is not None})
    torch.testing.assert_close(features[1], features[0], atol=1e-12, rtol=1e-12)
    assert gradients[0]
    torch.testing.assert_close(gradients[1], gradients[0], atol=1e-11, rtol=1e-11)


def clip(kind: type[nn.Module] = CLIP, **text: Any) -> Any:
    torch.manual_seed(0)
    sizes = {"context_length": CONTEXT, "vocab_size": 41, "width": 16, "heads": 2, "layers": 2}
    vision = {"image_size": 8, "patch_size": 8, "width": 8, "layers": 1, "head_width": 8}
    return kind(embed_dim=8, vision_cfg=vision, text_cfg={**sizes, **text})


@pytest.mark.parametrize("kind", [CLIP, CustomTextCLIP])
@pytest.mark.parametrize("pooling", [{}, {"pool_type": "eos", "eos_id": END}])
def test_open_clips_causal_towers(kind: type[nn.Module], pooling: dict[str, Any]) -> None:
    module = clip(kind, **pooling)
    before = module.encode_text(texts())
    lengths = accept_short_texts(module)
    assert lengths is not None
    assert lengths(texts()).tolist() == [length + 1 for length in SIZES]
    assert torch.equal(module.encode_text(texts()), before)
    check(module, module.encode_text, lengths, texts())
    check(module, lambda tokens: module(text=tokens)[1], lengths, texts())
    assert isinstance(module, kind)


def test_other_releases_encode_short_texts_too_or_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    module, own = clip(), CLIP.encode_text
    lengths, positions = accept_short_texts(module), module.positional_embedding
    assert lengths is not None
    # As in the main branch of 2026, `forward` does not call `encode_text`.
    monkeypatch.setattr(CLIP, "forward", lambda self, image, text: own(self, text, True))
    check(module, lambda tokens: module(text=tokens), lengths, texts())
    monkeypatch.setattr(CLIP, "encode_text", lambda self, t, _: self.token_embedding(t) + positions)
    module.encode_text(texts())
    with pytest.raises(RuntimeError, match="must match the size"):
        module.encode_text(texts()[:, :8])


@pytest.mark.parametrize("kind", [CLIP, CustomTextCLIP])
def test_open_clips_other_towers_are_left_alone(kind: type[nn.Module]) -> None:
    for text in ({"no_causal_mask": True}, {"pool_type": "last"}, {"pool_type": "first"}):
        module = clip(kind, **text)
        assert accept_short_texts(module) is None
        assert type(module) is kind
    assert accept_short_texts(clip(CustomTextCLIP, embed_cls=True)) is None
    assert accept_short_texts(clip(type("Other", (CLIP,), {}))) is None
    assert create(TINY).lengths.keys() - create(TINY_UNMASKED).lengths.keys() == {"text"}


def test_our_own_towers() -> None:
    tower = TextFeatureTower(8, buckets=64, width=8)
    check(tower, tower, LENGTHS, HashingTokenizer(64, 32)(["one two", "a"]))
    assert create("glyph-small").lengths == {"text": LENGTHS}


def tiny_config(kind: str) -> Any:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    sizes |= {"intermediate_size": 32, "max_position_embeddings": 32, "vocab_size": END + 1}
    pad = 1 if kind in ("camembert", "mpnet", "roberta", "xlm-roberta") else 0
    special = {"pad_token_id": pad, "bos_token_id": 2, "eos_token_id": 3}
    special |= {"cls_token_id": 2, "sep_token_id": 3} if kind == "modernbert" else {}
    return transformers.AutoConfig.for_model(kind, **sizes, **special)


@pytest.mark.parametrize("kind", sorted(MASKED_KINDS))
def test_transformers_encoders_with_masked_padding(kind: str) -> None:
    transformers = pytest.importorskip("transformers")
    config = tiny_config(kind)
    torch.manual_seed(1)
    encoder = transformers.AutoModel.from_config(config)
    pad = config.pad_token_id
    lengths = functools.partial(without_padding, pad=pad)
    assert lengths(texts(pad)).tolist() == [length + 1 for length in SIZES]
    for pooling in ("mean", "cls", "last"):
        tower = TextEncoder(encoder, pad=pad, pooling=pooling)  # type: ignore[arg-type]
        check(tower, tower, lengths, texts(pad))


@pytest.mark.parametrize("end", [3, 2])  # of newer and of older folders
def test_transformers_clip(tmp_path: Path, end: int) -> None:
    folder = save_tiny_clip(tmp_path, "clip")
    text = json.loads((folder / "config.json").read_text())["text_config"]
    change_json(folder / "config.json", text_config={**text, "eos_token_id": end})
    towers = create(f"hf:{folder}")
    module: Any = towers.module
    tokens = texts(context=12, end=11) if end == 2 else towers.tokenizer(["a b c", "d", "e f g h"])
    assert (towers.lengths["text"] is up_to_largest) == (end == 2)
    check(module, module.encode_text, towers.lengths["text"], tokens)


def test_lengths() -> None:
    tokens = torch.tensor([[5, 9, 9, 0], [0, 0, 0, 0], [7, 0, 3, 0], [2, 1, 4, 9]])
    assert up_to_largest(tokens).tolist() == [2, 1, 1, 4]
    assert up_to_first(tokens, 9).tolist() == [2, 1, 1, 4]
    # Without any token a text is all padding to attention; padding may be inside and before a text.
    assert without_padding(tokens, pad=0).tolist() == [3, 4, 3, 4]
    assert without_padding(tokens.flip(1), pad=0).tolist() == [4, 4, 4, 4]
    none = tokens[:0]
    for lengths in (up_to_largest(none), up_to_first(none, 9), without_padding(none, 0)):
        assert lengths.shape == (0,)


def test_pooling_with_padding_before_a_text_or_alone() -> None:
    states, mask = torch.randn(2, 5, 3), torch.tensor([[0, 0, 1, 1, 1], [0, 0, 0, 0, 0]])
    text = states[0, 2:]
    expected: dict[Pooling, Tensor] = {"mean": text.mean(0), "cls": text[0], "last": text[-1]}
    for pooling, feature in expected.items():
        found = pool(states, mask, pooling)
        torch.testing.assert_close(found[0], feature)
        assert found[1].isfinite().all()
