"""Real texts without a download: WordNet's words and their definitions, which come with timm."""

from __future__ import annotations

import importlib.util
import random
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor


def words_and_definitions() -> list[tuple[str, str]]:
    """40,744 words with their definitions, in a random order that is the same each time."""
    words, definitions = (_table(name) for name in ("lemma", "definition"))
    pairs = [(word, definitions[key]) for key in words for word in words[key].split(", ")]
    random.Random(0).shuffle(pairs)
    return pairs


def captions(count: int) -> list[str]:
    """So many definitions, in a random order; beyond the 21,844 that there are they repeat.

    In CLIP's tokens they are as long as captions: 15.5 on average, the median is 14.
    """
    texts = list(_table("definition").values())
    random.Random(0).shuffle(texts)
    return [texts[i % len(texts)] for i in range(count)]


def length_statistics(lengths: Tensor) -> dict[str, float]:
    """The mean of texts' lengths in tokens, and quantiles."""
    values = lengths.double()
    shares = {"p10": 0.1, "median": 0.5, "p90": 0.9, "p99": 0.99, "max": 1.0}
    found = {name: values.quantile(share).item() for name, share in shares.items()}
    return {"mean": round(values.mean().item(), 2), **found}


def tokenized(tokenizer: Callable[[Sequence[str]], Tensor], texts: Sequence[str]) -> Tensor:
    """Tokens of texts, int64 (n, context), a thousand at a time."""
    return torch.cat([tokenizer(texts[i : i + 1000]) for i in range(0, len(texts), 1000)])


def _table(name: str) -> dict[str, str]:
    """One of timm's tables of WordNet, by synset; timm itself is not imported."""
    timm = importlib.util.find_spec("timm")
    assert timm is not None
    assert timm.origin is not None
    file = Path(timm.origin).parent / "data" / "_info" / f"imagenet_synset_to_{name}.txt"
    return dict(line.split("\t") for line in file.read_text().splitlines())
