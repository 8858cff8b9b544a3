"""Images as sequences of patches, for towers of timm's NaFlexVit.

An image keeps its aspect ratio and is resized to about as many patches as are allowed (Dehghani et
al. 2023, NaViT, arXiv 2307.06304). A batch is a mapping of tensors, as timm's own collator makes
it: `patches`, uint8 (n, length, height * width * 3), `patch_coord`, int64 (n, length, 2), their
rows and columns, and `patch_valid`, bool (n, length), False for padding.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch
from PIL import Image
from timm.data import create_transform
from timm.data.naflex_dataset import NaFlexCollator
from timm.models.naflexvit import NaFlexVit
from torch import Tensor

from megabatch.errors import UsageError
from megabatch.models.images import normalize_on_device

_PIECE = 64  # images that the collator, which makes float32 of them, gets at a time


def with_patches(tower: Any, length: int, name: str) -> tuple[PatchTransform, PatchTransform]:
    """Let an image tower of OpenCLIP take patches; returns transforms for training and evaluation.

    Augmentation is that of OpenCLIP's NaFlex models: a crop of 90% to 100% of the area.

    Args:
        tower: of open_clip, changed in place: it takes pixels as bytes.
        length: the most patches of an image.
        name: of the model, for messages.

    Raises:
        UsageError: the tower does not take patches, or its features would depend on padding.
    """
    trunk = getattr(tower, "trunk", None)
    if not isinstance(trunk, NaFlexVit) or not getattr(trunk.embeds, "channels_last", True):
        raise UsageError(
            f"--image-seq-len {length}: the image tower of {name} takes images of one size; "
            'expected "timm_model_name": "naflexvit_..." among the vision_cfg of its configuration'
        )
    if any("PatchDropout" in type(part).__name__ for part in trunk.modules()):
        raise UsageError(
            f"--image-seq-len {length}: {name} drops patches in training, padding or not; expected "
            "--force-patch-dropout 0"
        )
    pixels = tower.preprocess_cfg
    patch = trunk.embeds.patch_size
    repeated = patch[0] * patch[1]
    normalize_on_device(tower, pixels["mean"] * repeated, pixels["std"] * repeated, shape=(-1,))
    made = functools.partial(PatchTransform, patch, length, pixels["interpolation"])
    return made(training=True), made(training=False)


def valid_patches(images: Mapping[str, Tensor]) -> Tensor:
    """The number of patches of each image of a batch, int64 (n,)."""
    return images["patch_valid"].sum(1)


class PatchTransform:
    """timm's transform of an image into patches of bytes, and its collator of a batch.

    Args:
        patch: height and width. length: the most patches. interpolation: a filter's name.
        training: whether to crop at random.
    """

    def __init__(
        self, patch: tuple[int, int], length: int, interpolation: str, *, training: bool
    ) -> None:
        augmentation: Any = {"scale": (0.9, 1.0), "hflip": 0.0, "color_jitter": None}
        self._transform = create_transform(
            **augmentation,
            is_training=training,
            interpolation=interpolation,
            normalize=False,
            naflex=True,
            patchify=True,
            patch_size=patch,
            max_seq_len=length,
        )
        self._collate = NaFlexCollator(length)

    def __call__(self, image: Image.Image) -> dict[str, Tensor]:
        """The patches of an image, uint8 (length, height * width * 3), coordinates and validity."""
        patches: dict[str, Tensor] = self._transform(image.convert("RGB"))
        return patches

    def collate(self, images: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        """A batch of images, padded to the most patches that one may have."""
        parts = []
        for start in range(0, len(images), _PIECE):
            some = images[start : start + _PIECE]
            batch, _ = self._collate([(image, 0) for image in some])
            parts.append({name: batch[name].to(some[0][name].dtype) for name in some[0]})
        return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
