"""icon-small: a small vision transformer for drawings of 64 pixels, and a bag of text features.

Pixels are bytes until they are on the device, and jitter is applied there: a batch of 32,768 is a
transfer of 134 MB (1.6 GB as three channels of floats), and no worker decodes or resizes. The text
tower is glyph-small's with more buckets: in icons' names words matter, and their order hardly does.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from PIL import Image, ImageOps
from torch import Tensor, nn

from megabatch.errors import UsageError
from megabatch.models.glyph import LENGTHS, HashingTokenizer, TextFeatureTower
from megabatch.models.towers import ModelOptions, Towers, TwoTowers

NAME = "machinery.icon_towers:icon_small"
EMBED_DIM = 256
IMAGE_SIZE = 64  # pixels per side
PATCH = 8
_WIDTH, _DEPTH, _HEADS = 256, 6, 4
_BUCKETS = 65_536  # of words, pairs of words and trigrams
_MEAN, _STD = 0.27, 0.41  # of the icons' ink, white 0 to black 1
_SHIFT, _SCALE = 0.08, 0.15  # maximum jitter in training, relative to the image's side


def icon_small(options: ModelOptions) -> Towers:
    """Build icon-small, 22M parameters, 17M of them the buckets of text features.

    Raises:
        UsageError: `force_image_size` is no multiple of 8, or this model lacks an option.
    """
    options.refuse("icon-small", "hf_pooling", "hf_share")
    size = options.force_image_size or IMAGE_SIZE
    if size < PATCH or size % PATCH:
        raise UsageError(f"--force-image-size {size}: icon-small takes multiples of {PATCH}")
    visual = VisionTower(EMBED_DIM, size, patch_dropout=options.force_patch_dropout or 0.0)
    module = TwoTowers(visual, TextFeatureTower(EMBED_DIM, _BUCKETS), options)
    tokenizer = HashingTokenizer(_BUCKETS, options.force_context_length or 64)
    transform = GreyTransform(size)
    return Towers(
        NAME, module, transform, transform, tokenizer, EMBED_DIM, lengths={"text": LENGTHS}
    )


class VisionTower(nn.Module):
    """A vision transformer (Dosovitskiy et al. 2021, arXiv 2010.11929) for grey images.

    It has pre-norm blocks and learnt positions; its feature is the mean over patches. In training
    images are slightly shifted and scaled, and the fraction `patch_dropout` of the patches is
    dropped (Li et al. 2022, arXiv 2212.00794); both use torch's generator of the images' device.

    Attributes:
        jitter: whether images are shifted and scaled in training.
    """

    def __init__(self, embed_dim: int, image_size: int, *, patch_dropout: float = 0.0) -> None:
        super().__init__()
        patches = (image_size // PATCH) ** 2
        self.kept = max(1, round(patches * (1 - patch_dropout)))
        self.jitter = True
        self.patch_embed = nn.Linear(PATCH**2, _WIDTH)
        self.pos_embed = nn.Parameter(torch.randn(patches, _WIDTH) * 0.02)
        self.blocks = nn.Sequential(*(Block(_WIDTH, _HEADS) for _ in range(_DEPTH)))
        self.norm = nn.LayerNorm(_WIDTH)
        self.head = nn.Linear(_WIDTH, embed_dim, bias=False)

    def forward(self, image: Tensor) -> Tensor:
        """Features (n, embed_dim), not normalised, of uint8 images (n, 1, side, side)."""
        ink = 1 - image.float() / 255
        if self.training and self.jitter:
            ink = jittered(ink)
        x = self.patch_embed(_patches((ink - _MEAN) / _STD))
        x = x + self.pos_embed.to(x.dtype)  # in fp32 it would be twice the memory traffic
        if self.training and self.kept < x.shape[1]:
            x = _random_patches(x, self.kept)
        return self.head(self.norm(self.blocks(x)).mean(1))


class Block(nn.Module):
    """Attention and a hidden layer, both with residual connections."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        """(n, patches, width) to the same."""
        qkv = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1))
        x = x + self.proj(_attention(qkv).flatten(2))
        return x + self.mlp(self.norm2(x))


def _attention(qkv: Tensor) -> Tensor:
    """Attention (n, patches, heads, width of a head) of (n, patches, 3, heads, width)."""
    if qkv.is_cuda and qkv.element_size() == 2:
        from megabatch.models.short_attention import LONGEST, short_attention

        if qkv.shape[1] <= LONGEST:
            return short_attention(qkv, False)
    query, key, value = qkv.permute(2, 0, 3, 1, 4)
    return F.scaled_dot_product_attention(query, key, value).transpose(1, 2)


def _patches(images: Tensor) -> Tensor:
    """(n, 1, side, side) to (n, patches, pixels of a patch), row by row."""
    blocks = images.squeeze(1).unflatten(1, (-1, PATCH)).unflatten(3, (-1, PATCH))
    return blocks.transpose(2, 3).flatten(3).flatten(1, 2)


def jittered(ink: Tensor) -> Tensor:
    """Shift and scale each image of (n, c, side, side) at random, padding with zero."""
    n, side = len(ink), ink.shape[-1]
    right, down, grow = (torch.rand(3, n, 1, device=ink.device) * 2 - 1).unbind()
    # Centres of pixels, in coordinates from -1 to 1. Autocast would apply to affine_grid's product,
    # and is too coarse for coordinates.
    centres = (torch.arange(side, device=ink.device) * 2 + 1) / side - 1
    centres = centres * (1 + _SCALE * grow)
    across = (centres + 2 * _SHIFT * right)[:, None, :].expand(n, side, side)
    along = (centres + 2 * _SHIFT * down)[:, :, None].expand(n, side, side)
    return F.grid_sample(ink, torch.stack([across, along], dim=-1), align_corners=False)


def _random_patches(x: Tensor, kept: int) -> Tensor:
    """Choose `kept` random patches of each image, from (n, patches, width)."""
    chosen = torch.rand(x.shape[:2], device=x.device).topk(kept, dim=1).indices
    return x.gather(1, chosen.unsqueeze(-1).expand(-1, -1, x.shape[2]))


@dataclass(frozen=True)
class GreyTransform:
    """Images of any mode and size to uint8 (1, size, size), padded with white."""

    size: int = IMAGE_SIZE

    def __call__(self, image: Image.Image) -> Tensor:
        """Transform one image; transparent pixels become white."""
        grey = image if image.mode == "L" else _on_white(image).convert("L")
        side = (self.size, self.size)
        if grey.size != side:
            grey = ImageOps.pad(grey, side, Image.Resampling.BICUBIC, color=255)
        pixels = torch.frombuffer(bytearray(grey.tobytes()), dtype=torch.uint8)
        return pixels.view(1, *side)

    def batch(self, images: Tensor, seeds: Tensor) -> Tensor:
        """Transform uint8 images (n, channels, height, width) of one size; nothing is random."""
        if images.shape[1:] == (1, self.size, self.size):
            return images
        rows = images.permute(0, 2, 3, 1)
        return torch.stack([self(Image.fromarray(row.squeeze(-1).numpy())) for row in rows])


def _on_white(image: Image.Image) -> Image.Image:
    if image.mode not in ("RGBA", "LA", "PA") and "transparency" not in image.info:
        return image
    coloured = image.convert("RGBA")
    return Image.alpha_composite(Image.new("RGBA", image.size, "white"), coloured)
