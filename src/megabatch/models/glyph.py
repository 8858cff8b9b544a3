"""glyph-small: two towers small enough to learn the glyphs on two CPU cores in minutes.

Sizes and features were chosen by recall@1 on two held-out faces after 230 steps of 4,096 pairs at a
learning rate of 1e-3 (one seed, one split; our towers 85.0%): words alone 3.7 points fewer than
words, pairs and trigrams; a layer for each word with its position 2.5 fewer; twice the image
channels 2.0 more for twice the time; training images shifted by up to a pixel 5.2 fewer (0.4 more
in a run of twice the length).
"""

from __future__ import annotations

import math
from pathlib import Path

import torch
import torch.nn.functional as F
from PIL import Image, ImageOps
from torch import Tensor, nn

from megabatch.errors import UsageError
from megabatch.models import weights as files
from megabatch.models.hashing_tokenizer import HashingTokenizer
from megabatch.models.options import ModelOptions
from megabatch.models.towers import Towers, outputs

NAME = "glyph-small"
EMBED_DIM = 256
IMAGE_SIZE = 32  # pixels a side
_MEAN, _STD = 0.1, 0.27  # of the glyphs' pixels, black 0 to white 1


def create(weights: Path | None, options: ModelOptions) -> Towers:
    """Build glyph-small; `weights`: a file that `weights.find` gave, or None for a fresh start.

    Raises:
        UsageError: the file holds another model's weights, or an option that this model has not.
    """
    absent = ("force_patch_dropout", "force_image_size", "hf_pooling", "hf_share")
    if given := options.given(*absent):
        raise UsageError(f"{', '.join(given)}: {NAME} has no such option")
    start, bias = options.init_logit_scale, options.init_logit_bias
    state = None if weights is None else files.load(weights)
    if state is not None and "logit_bias" in state and bias is None:
        bias = 0.0  # the file's comes over it
    module = GlyphSmall(math.log(1 / 0.07) if start is None else start, bias)
    if state is not None:
        try:
            module.load_state_dict(module.state_dict() | state if bias is not None else state)
        except RuntimeError as error:
            raise UsageError(
                f"pretrained: {weights} does not hold the weights of {NAME}"
            ) from error
    length = options.force_context_length
    tokenizer = HashingTokenizer(module.text.buckets.num_embeddings, length or 64)
    transform = GlyphTransform()
    return Towers(NAME, module, transform, transform, tokenizer, EMBED_DIM)


class GlyphSmall(nn.Module):
    """A convolution for small grey images and a bag of hashed text features, 5.1M parameters."""

    def __init__(
        self, init_logit_scale: float = math.log(1 / 0.07), init_logit_bias: float | None = None
    ) -> None:
        super().__init__()
        self.visual = GlyphImageTower(EMBED_DIM)
        self.text = TextFeatureTower(EMBED_DIM)
        self.logit_scale = nn.Parameter(torch.tensor(init_logit_scale))  # as in OpenCLIP
        bias = None if init_logit_bias is None else nn.Parameter(torch.tensor(init_logit_bias))
        self.logit_bias: nn.Parameter | None
        self.register_parameter("logit_bias", bias)

    def encode_image(self, image: Tensor, normalize: bool = False) -> Tensor:
        """Features (n, 256) of images, uint8 (n, 1, 32, 32)."""
        features = self.visual(image)
        return F.normalize(features, dim=-1) if normalize else features

    def encode_text(self, text: Tensor, normalize: bool = False) -> Tensor:
        """Features (n, 256) of tokens, int64 (n, context_length)."""
        features = self.text(text)
        return F.normalize(features, dim=-1) if normalize else features

    def forward(
        self, image: Tensor | None = None, text: Tensor | None = None
    ) -> dict[str, Tensor | None]:
        """Normalised features of both, and the scale; see `Towers`."""
        return outputs(self, image, text)

    def lock_image_tower(self, unlocked_groups: int = 0, freeze_bn_stats: bool = False) -> None:
        """Train the image tower no further, as open_clip's models have it."""
        _lock(self.visual, unlocked_groups)

    def lock_text_tower(self, unlocked_layers: int = 0) -> None:
        """Train the text tower no further."""
        _lock(self.text, unlocked_layers)


def _lock(tower: nn.Module, unlocked: int) -> None:
    if unlocked:
        raise ValueError(f"{NAME} can be locked whole only, got {unlocked} unlocked")
    tower.requires_grad_(False)


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
        # Through one dimension: a batch with the strides of one image after the other would be
        # taken for channels-last, where GroupNorm is ten times slower on the CPU.
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
    """The sum of the features' vectors, normalised, then one hidden layer beside a linear path."""

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
    """Pictures of any mode and size to uint8 (1, 32, 32), white ink on black as the glyphs have it.

    Larger and smaller pictures are scaled to fit, keeping their proportions, with black around.
    The tower itself turns bytes into numbers, so that a batch stays small on its way there.
    """

    def __call__(self, image: Image.Image) -> Tensor:
        """Transform one picture."""
        grey = image if image.mode == "L" else image.convert("L")
        if grey.size != (IMAGE_SIZE, IMAGE_SIZE):
            grey = ImageOps.pad(grey, (IMAGE_SIZE, IMAGE_SIZE), Image.Resampling.BICUBIC)
        pixels = torch.frombuffer(bytearray(grey.tobytes()), dtype=torch.uint8)
        return pixels.view(1, IMAGE_SIZE, IMAGE_SIZE)

    def batch(self, images: Tensor, seeds: Tensor) -> Tensor:
        """Transform uint8 images (n, channels, height, width) of one size; nothing is random."""
        if images.shape[1:] == (1, IMAGE_SIZE, IMAGE_SIZE):
            return images
        pictures = (Image.fromarray(i.squeeze(-1).numpy()) for i in images.permute(0, 2, 3, 1))
        return torch.stack([self(picture) for picture in pictures])
