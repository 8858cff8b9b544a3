"""A tokenizer that fits nothing: what a text is made of, hashed into a fixed number of buckets."""

from __future__ import annotations

import re
import zlib
from dataclasses import dataclass

import torch
from torch import Tensor

_WORD = re.compile(r"[^\W\d_]+|\d|[^\w\s-]")  # letters together; each digit and sign alone


@dataclass(frozen=True)
class HashingTokenizer:
    """Words, pairs of neighbouring words, and trigrams of letters, each a bucket's number.

    A name never seen in training still has its known words and pieces of words; pairs carry the
    order that a bag of words loses. Stateless: the same text gives the same tokens everywhere.

    num_buckets: tokens are 1 to num_buckets - 1; 0 is padding.
    context_length: tokens a text; where a long text has more, trigrams go first, then pairs.
        64 hold all of 98% of the glyphs' names (36 on average).
    """

    num_buckets: int = 16_384
    context_length: int = 64

    def __call__(self, texts: str | list[str]) -> Tensor:
        """Return the texts' tokens, int64 (n, context_length), zeros after the last."""
        batch = [texts] if isinstance(texts, str) else texts
        rows = [self._encode(text) for text in batch]
        return torch.tensor(rows, dtype=torch.int64).reshape(len(batch), self.context_length)

    def _encode(self, text: str) -> list[int]:
        found = features(text)[: self.context_length]
        buckets = [zlib.crc32(f.encode()) % (self.num_buckets - 1) + 1 for f in found]
        return buckets + [0] * (self.context_length - len(buckets))


def features(text: str) -> list[str]:
    """The features of a text, the most telling first; each kind is spelt so that none collide."""
    words: list[str] = _WORD.findall(text.lower())
    pairs = [f"{a} {b}" for a, b in zip(["^", *words], [*words, "$"], strict=True)]
    framed = [f"^{word}$" for word in words if len(word) > 1]
    trigrams = [f"<{word[i : i + 3]}" for word in framed for i in range(len(word) - 2)]
    return words + pairs + trigrams
