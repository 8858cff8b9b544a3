"""glyph-small: two towers small enough to learn the glyphs on two CPU cores in minutes.

Sizes and features were chosen by recall@1 on two held-out faces after 230 steps of 4,096 pairs at a
learning rate of 1e-3 (one seed, one split). These towers reach 85.0%. Words alone, without pairs
and trigrams, give 3.7 points less; a layer for each word with its position 2.5 less; twice the
image channels 2.0 more, for twice the time; training images shifted by up to a pixel 5.2 less (0.4
more in a run of twice the length).
"""

from __future__ import annotations

import functools
import re
import zlib
from dataclasses import dataclass

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor, nn

from megabatch.models.names import GLYPH
from megabatch.models.padding import without_padding
from megabatch.models.towers import OF_IMAGES, ModelOptions, Towers, TwoTowers

EMBED_DIM = 256
IMAGE_SIZE = 32  # pixels per side
_MEAN, _STD = 0.1, 0.27  # of the glyphs' pixels, black 0 to white 1

#: The tokens that count for `TextFeatureTower`.
LENGTHS = functools.partial(without_padding, pad=0)


def create(options: ModelOptions) -> Towers:
    """Build glyph-small, 5.1M parameters, with random weights.

    Raises:
        UsageError: this model lacks an option.
    """
    options.refuse(GLYPH, "hf_pooling", "hf_share", *OF_IMAGES)
    visual, text = GlyphImageTower(EMBED_DIM), TextFeatureTower(EMBED_DIM)
    module = TwoTowers(visual, text, options)
    tokenizer = HashingTokenizer(text.buckets.num_embeddings, options.force_context_length or 64)
    transform = GlyphTransform()
    return Towers(
        GLYPH, module, transform, transform, tokenizer, EMBED_DIM, lengths={"text": LENGTHS}
    )


class GlyphImageTower(nn.Module):
    """Three convolutions, each halving the sides: 1x32x32, 32x16x16, 64x8x8, 128x4x4.

    GroupNorm and not BatchNorm: statistics over a micro-batch would make gradient caching inexact.
    """

    def __init__(self, embed_dim: int) -> None:
        super().__init__()
        self.stem = _convolution(1, 32, kernel=5)
        self.middle = _convolution(32, 64, kernel=3)
        self.top = _convolution(64, 128, kernel=3)
        self.projection = nn.Linear(128 * 4 * 4, embed_dim)

    def forward(self, image: Tensor) -> Tensor:
        """Features (n, embed_dim), not normalised, of uint8 images (n, 1, 32, 32)."""
        # Reshaped through one dimension: PyTorch takes the strides of a contiguous batch with one
        # channel for channels-last, where GroupNorm is ten times slower on the CPU.
        x = image.flatten(1).unflatten(1, (1, IMAGE_SIZE, IMAGE_SIZE))
        x = (x.float() / 255 - _MEAN) / _STD
        return self.projection(self.top(self.middle(self.stem(x))).flatten(1))


def _convolution(inputs: int, outputs: int, kernel: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, kernel, stride=2, padding=kernel // 2),
        nn.GroupNorm(8, outputs),
        nn.GELU(),
    )


class TextFeatureTower(nn.Module):
    """The normalised sum of the features' embeddings, then an MLP plus a linear layer."""

    def __init__(self, embed_dim: int, buckets: int = 16_384, width: int = 256) -> None:
        super().__init__()
        self.buckets = nn.EmbeddingBag(buckets, width, mode="sum", padding_idx=0)
        nn.init.normal_(self.buckets.weight, std=width**-0.5)
        self.norm = nn.LayerNorm(width)
        self.linear = nn.Linear(width, embed_dim, bias=False)
        self.hidden = nn.Sequential(
            nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, embed_dim)
        )

    def forward(self, text: Tensor) -> Tensor:
        """Features (n, embed_dim), not normalised, of tokens, int64 (n, context_length)."""
        x = self.norm(self.buckets(text))
        return self.linear(x) + self.hidden(x)


class GlyphTransform:
    """Images of any mode and size to uint8 (1, 32, 32), white on black like the glyphs.

    Images of another size are scaled to fit, keeping their aspect ratio, and padded with black. The
    tower itself converts bytes to floats, so that a batch is small until it is on the device.
    """

    def __call__(self, image: Image.Image) -> Tensor:
        """Transform one image."""
        grey = image if image.mode == "L" else image.convert("L")
        if grey.size != (IMAGE_SIZE, IMAGE_SIZE):
            grey = ImageOps.pad(grey, (IMAGE_SIZE, IMAGE_SIZE), Image.Resampling.BICUBIC)
        pixels = torch.frombuffer(bytearray(grey.tobytes()), dtype=torch.uint8)
        return pixels.view(1, IMAGE_SIZE, IMAGE_SIZE)

    def batch(self, images: Tensor, seeds: Tensor) -> Tensor:
        """Transform uint8 images (n, channels, height, width) of one size; nothing is random."""
        if images.shape[1:] == (1, IMAGE_SIZE, IMAGE_SIZE):
            return images
        rows = images.permute(0, 2, 3, 1)
        return torch.stack([self(Image.fromarray(row.squeeze(-1).numpy())) for row in rows])


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
        hashes = [np.zeros(0, np.int64), *(_hashes(text)[: self.context_length] for text in batch)]
        lengths = np.array([len(of_text) for of_text in hashes[1:]], np.int64)
        filled = np.arange(self.context_length) < lengths[:, None]
        tokens = np.zeros(filled.shape, np.int64)
        tokens[filled] = np.concatenate(hashes) % (self.num_buckets - 1) + 1
        return torch.from_numpy(tokens)


def features(text: str) -> list[str]:
    """The features of a text, the most specific first; the notations of the kinds never collide."""
    words: list[str] = _WORD.findall(text.lower())
    pairs = [f"{a} {b}" for a, b in zip(["^", *words], [*words, "$"], strict=True)]
    return words + pairs + [trigram for word in words for trigram in _trigrams(word)]


def _trigrams(word: str) -> list[str]:
    framed = f"^{word}$" if len(word) > 1 else ""
    return [f"<{framed[i : i + 3]}" for i in range(len(framed) - 2)]


@functools.lru_cache(1 << 15)  # texts recur in each epoch
def _hashes(text: str) -> np.ndarray:
    """CRC-32 of each of a text's features, in their order, int64 (features,)."""
    return np.array([zlib.crc32(feature.encode()) for feature in features(text)], np.int64)
