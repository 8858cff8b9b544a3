"""A random BERT of two layers with a tokenizer of letters, on disk as users have theirs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megabatch.models import ModelOptions, Towers, create

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *"abcdefgh"]


def save_tiny_bert(path: Path) -> Path:
    """Save model and tokenizer by `save_pretrained`; skip the test without the library."""
    transformers = pytest.importorskip("transformers")
    tokenizers = pytest.importorskip("tokenizers")
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = transformers.BertConfig(
        vocab_size=len(WORDS), intermediate_size=32, max_position_embeddings=12, **sizes
    )
    torch.manual_seed(0)
    transformers.BertModel(config).save_pretrained(path)
    vocabulary = {word: i for i, word in enumerate(WORDS)}
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="[UNK]"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    inner.post_processor = tokenizers.processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]"
    ).save_pretrained(path)
    return path


def made(folder: Path, **options: object) -> Towers:
    """The model of such a folder with these options, without dropout."""
    towers = create(f"hf:{folder}", options=ModelOptions(**options))  # type: ignore[arg-type]
    towers.module.eval()
    return towers
