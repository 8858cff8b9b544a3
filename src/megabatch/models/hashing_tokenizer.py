"""A tokenizer without training: a text's features, hashed into a fixed number of buckets."""

from __future__ import annotations

import functools
import re
import zlib
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

_WORD = re.compile(r"[^\W\d_]+|\d|[^\w\s-]")  # runs of letters; single digits and signs


@dataclass(frozen=True)
class HashingTokenizer:
    """Words, pairs of neighbouring words, and trigrams of letters, each as a bucket's number.

    A name that training has not seen still has known words and parts of words; pairs keep the order
    that a bag of words loses. Stateless: the same text gives the same tokens everywhere.

    num_buckets: tokens are 1 to num_buckets - 1; 0 is padding.
    context_length: tokens per text; a longer text loses trigrams first, then pairs. 64 are enough
        for 98% of the glyphs' names (36 on average).
    """

    num_buckets: int = 16_384
    context_length: int = 64

    def __call__(self, texts: str | list[str]) -> Tensor:
        """Return the texts' tokens, int64 (n, context_length), zeros after the last."""
        batch = [texts] if isinstance(texts, str) else texts
        hashes: list[int] = []  # one list: thousands would burden the garbage collector
        ends = []
        for text in batch:
            hashes += _hashes(text)[: self.context_length]
            ends.append(len(hashes))
        lengths = np.diff(np.array(ends, np.int64), prepend=0)
        filled = np.arange(self.context_length) < lengths[:, None]
        tokens = np.zeros(filled.shape, np.int64)
        tokens[filled] = np.array(hashes, np.int64) % (self.num_buckets - 1) + 1
        return torch.from_numpy(tokens)


def features(text: str) -> list[str]:
    """The features of a text, the most specific first; the notations of the kinds never collide."""
    words: list[str] = _WORD.findall(text.lower())
    pairs = [f"{a} {b}" for a, b in zip(["^", *words], [*words, "$"], strict=True)]
    return words + pairs + [trigram for word in words for trigram in _trigrams(word)]


def _trigrams(word: str) -> list[str]:
    framed = f"^{word}$" if len(word) > 1 else ""
    return [f"<{framed[i : i + 3]}" for i in range(len(framed) - 2)]


class _Word(NamedTuple):
    """CRC-32 of a word and of its trigrams; second: its bytes as the second word of a pair."""

    crc: int
    second: bytes
    trigrams: tuple[int, ...]


_START = zlib.crc32(b"^")


@functools.lru_cache(1 << 15)
def _word(word: str) -> _Word:
    # Words recur: with this cache a text takes a third of the time.
    encoded = word.encode()
    trigrams = tuple(zlib.crc32(trigram.encode()) for trigram in _trigrams(word))
    return _Word(zlib.crc32(encoded), b" " + encoded, trigrams)


def _hashes(text: str) -> list[int]:
    """CRC-32 of each of a text's features, in their order."""
    words = [_word(word) for word in _WORD.findall(text.lower())]
    hashes = [word.crc for word in words]
    before = _START
    for crc, second, _ in words:
        hashes.append(zlib.crc32(second, before))
        before = crc
    hashes.append(zlib.crc32(b" $", before))
    for word in words:
        hashes += word.trigrams
    return hashes
