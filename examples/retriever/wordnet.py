"""Names and definitions of WordNet's synsets, and a small text encoder for them."""

from __future__ import annotations

import importlib.util
import random
from pathlib import Path

from tokenizers import BertWordPieceTokenizer
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast


def glosses() -> tuple[list[str], list[str]]:
    """Names and definitions of 21,844 synsets, in a random order that is the same each time."""
    timm = importlib.util.find_spec("timm")
    if timm is None or timm.origin is None:
        raise ImportError("the data come with timm: pip install timm")
    folder = Path(timm.origin).parent / "data" / "_info"
    names, definitions = (
        dict(line.split("\t") for line in file.read_text().splitlines())
        for file in (
            folder / "imagenet_synset_to_lemma.txt",
            folder / "imagenet_synset_to_definition.txt",
        )
    )
    synsets = sorted(names)
    random.Random(0).shuffle(synsets)
    return [names[s] for s in synsets], [definitions[s] for s in synsets]


def save_tiny_bert(texts: list[str], folder: Path) -> None:
    """Write a random BERT of one layer with a tokenizer of these texts, as `save_pretrained`."""
    tokenizer = BertWordPieceTokenizer()
    tokenizer.train_from_iterator(texts, vocab_size=8000, show_progress=False)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "words.json"))
    PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "words.json"), pad_token="[PAD]", unk_token="[UNK]"
    ).save_pretrained(folder)
    config = BertConfig(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=64,
        num_hidden_layers=1,
        num_attention_heads=4,
        intermediate_size=256,
        max_position_embeddings=32,
    )
    BertModel(config).save_pretrained(folder)
