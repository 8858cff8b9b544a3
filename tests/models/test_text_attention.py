"""transformers' models with attention of our own against theirs, in Triton's interpreter."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("megabatch.models.text_attention", exc_type=ImportError)
import transformers

from megabatch.models import text_attention
from megabatch.models.blocks import (
    checkpoint_activations,
    compile_blocks,
    use_fast_blocks,
    with_fast_blocks,
)
from megabatch.models.huggingface import TextEncoder
from megabatch.models.text_attention import NAME
from tests.models.test_blocks import Counting
from tests.similarity.triton import DEVICE, GPU

pytestmark = [pytest.mark.gpu] if GPU else []
SIZES = {"vocab_size": 50, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
SIZES |= {"intermediate_size": 64, "max_position_embeddings": 80}


def bert(dropout: float = 0.0, **changes: Any) -> nn.Module:
    rates = dict.fromkeys(("attention_probs_dropout_prob", "hidden_dropout_prob"), dropout)
    config = transformers.BertConfig(**{**SIZES, **rates, **changes})
    torch.manual_seed(0)
    model = transformers.BertModel(config, add_pooling_layer=False)
    return boxed(model)


def boxed(model: Any) -> nn.Module:
    """A module with the interface of `Towers.module`, as far as these functions need it."""
    box = nn.Module()
    box.text = TextEncoder(model, 0, "mean")
    return box.to(DEVICE).train()


def texts(*lengths: int, columns: int | None = None) -> Tensor:
    tokens = torch.zeros(len(lengths), columns or max(lengths), dtype=torch.int64)
    for i, length in enumerate(lengths):
        tokens[i, :length] = torch.arange(length) * (i + 3) % 49 + 1
    return tokens.to(DEVICE)


def fast(box: nn.Module) -> Any:
    made = copy.deepcopy(box)
    use_fast_blocks(made, kernels=True)
    return made


def counted() -> Any:
    """The calls of the kernels."""
    kernels = text_attention.short_attention
    return mock.patch.object(text_attention, "short_attention", side_effect=kernels)


def encode(box: Any, tokens: Tensor) -> Tensor:
    with torch.autocast(DEVICE, torch.float16):
        features: Tensor = box.text(tokens)
    return features.float()


def results(box: Any, tokens: Tensor) -> list[Tensor]:
    """Features and the gradients of all parameters that have one."""
    features = encode(box, tokens)
    weights = torch.linspace(-1, 1, features.numel(), device=DEVICE).view_as(features)
    # Softmax takes away what keys' biases add.
    wanted = [p for name, p in box.named_parameters() if not name.endswith("key.bias")]
    found = torch.autograd.grad((features * weights).sum(), wanted, allow_unused=True)
    return [features, *(gradient for gradient in found if gradient is not None)]


def compare(found: list[Tensor], expected: list[Tensor]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert (one - other).norm() <= 4e-3 * other.norm()


@pytest.mark.parametrize(
    ("tokens", "calls"),
    [
        (texts(9, 4, 1), 2),
        (texts(9, 9), 2),
        (texts(7, 5, 0, columns=8), 2),
        (texts(66, 3), 0),
        (texts(66, 66), 0),
    ],
)
def test_features_and_gradients_are_the_same(tokens: Tensor, calls: int) -> None:
    own = bert()
    with counted() as kernels:
        found = results(fast(own), tokens)
    assert kernels.call_count == calls
    compare(found, results(own, tokens))


def test_float32_and_other_widths_stay_with_transformers() -> None:
    own, tokens = bert(), texts(9, 4)
    with counted() as kernels:
        torch.testing.assert_close(fast(own).text(tokens), own.text(tokens))  # type: ignore[operator]
        narrow = bert(num_attention_heads=4)
        compare(results(fast(narrow), tokens), results(narrow, tokens))
    assert not kernels.called


@pytest.mark.parametrize("tokens", [texts(9, 4), texts(9, 9)], ids=["padded", "whole"])
def test_nothing_is_read_on_the_host(tokens: Tensor) -> None:
    own = bert()
    made = fast(own)
    with mock.patch.object(Tensor, "__bool__", side_effect=ArithmeticError):
        encode(made, tokens)
        with pytest.raises(ArithmeticError):
            encode(own, tokens)


def test_dropout_is_of_the_generators_state() -> None:
    made, tokens = fast(bert(0.2)), texts(9, 4)
    with counted() as kernels:
        passes = []
        for seed in (1, 1, 2):
            torch.manual_seed(seed)
            passes.append(results(made, tokens))
    assert kernels.call_args.args[3] == 0.2
    assert all(map(torch.equal, passes[0], passes[1]))
    assert not torch.equal(passes[0][0], passes[2][0])
    made.eval()
    assert torch.equal(encode(made, tokens), encode(made, tokens))


@pytest.mark.usefixtures("no_graphs")
def test_texts_of_all_lengths_share_a_graph() -> None:
    made, graphs = fast(bert(0.1)), Counting()
    compile_blocks(made, {"text"}, backend=graphs)
    for tokens in (texts(9, 4, 7), texts(16, 1), texts(24, 24, 3, 5), texts(64, 2)):
        encode(made, tokens)
    assert len(graphs) == 1


@pytest.mark.usefixtures("no_graphs")
def test_compiled_and_computed_again() -> None:
    made, tokens = fast(bert(0.2)), texts(9, 4)
    torch.manual_seed(1)
    expected = results(made, tokens)
    checkpoint_activations(made)
    compile_blocks(made, {"text"}, backend="aot_eager")
    torch.manual_seed(1)
    with torch.no_grad():
        features = encode(made, tokens)
    torch.manual_seed(1)
    found = results(made, tokens)
    assert torch.equal(features, found[0])
    compare(found, expected)


def decoders() -> list[Any]:
    gpt = transformers.GPT2Config(vocab_size=50, n_positions=32, n_embd=64, n_layer=2, n_head=2)
    llama = transformers.LlamaConfig(**{**SIZES, "num_key_value_heads": 1})
    return [gpt, llama, transformers.LlamaConfig(**SIZES)]


@pytest.mark.parametrize("config", decoders(), ids=["gpt2", "llama, grouped", "llama"])
@pytest.mark.parametrize("tokens", [texts(9, 4), texts(9, 9)], ids=["padded", "whole"])
def test_decoders_stay_causal(config: Any, tokens: Tensor) -> None:
    own = boxed(transformers.AutoModel.from_config(config)).eval()
    made = fast(own)
    assert made.text.encoder.config._attn_implementation == NAME
    with counted() as kernels:
        assert torch.equal(encode(made, tokens), encode(own, tokens))
        without_mask = [box.text.encoder(input_ids=tokens).last_hidden_state for box in (made, own)]
        assert torch.equal(*without_mask)
    assert not kernels.called


def test_choices_of_the_user_stay() -> None:
    eager = bert(attn_implementation="eager")
    assert fast(eager).text.encoder.config._attn_implementation == "eager"
    plain = bert()
    use_fast_blocks(plain, kernels=False)
    assert plain.text.encoder.config._attn_implementation == "sdpa"


def test_a_copy_for_plans() -> None:
    own: Any = bert()
    made: Any = with_fast_blocks(own, kernels=True)
    kinds = [box.text.encoder.config._attn_implementation for box in (own, made)]
    assert kinds == ["sdpa", NAME]
    assert next(made.parameters()) is next(own.parameters())


def test_images_take_the_kernels_too() -> None:
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    vision = {**sizes, "intermediate_size": 64, "image_size": 16, "patch_size": 8}
    text = {**sizes, "intermediate_size": 64, "vocab_size": 50, "max_position_embeddings": 16}
    config = transformers.CLIPConfig(text_config=text, vision_config=vision, projection_dim=8)
    own = nn.Module()
    own.model = transformers.CLIPModel(config).to(DEVICE).eval()
    made = fast(own)
    given = {
        "input_ids": texts(9, 4),
        "attention_mask": (texts(9, 4) != 0).long(),
        "pixel_values": torch.linspace(-1, 1, 2 * 3 * 256, device=DEVICE).view(2, 3, 16, 16),
    }
    with counted() as kernels, torch.autocast(DEVICE, torch.float16):
        found, expected = made.model(**given), own.model(**given)
    assert kernels.call_count == 2
    assert torch.equal(found.text_embeds, expected.text_embeds)
    compare([found.image_embeds], [expected.image_embeds])


def test_a_saved_config_has_no_word_of_it(tmp_path: Path) -> None:
    own = bert()
    for name, box in (("own", own), ("made", fast(own))):
        box.text.encoder.save_pretrained(tmp_path / name)  # type: ignore[union-attr]
    saved = [json.loads((tmp_path / n / "config.json").read_text()) for n in ("own", "made")]
    assert saved[0] == saved[1]
    assert NAME not in json.dumps(saved)
    loaded = transformers.AutoModel.from_pretrained(tmp_path / "made", local_files_only=True)
    assert loaded.config._attn_implementation == "sdpa"
