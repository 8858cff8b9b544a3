"""The crops of OpenCLIP's transform, and almost its pixels, by PyTorch's resize."""

from __future__ import annotations

from typing import Any

import numpy as np
import open_clip
import pytest
import torch
from PIL import Image
from torch import nn
from torchvision.transforms import CenterCrop, Compose, PILToTensor

from megabatch.models.pixels import Transform, with_bytes
from megabatch.models.resize import TorchResize

SIDE = 48


@pytest.fixture(scope="module")
def original() -> Transform:
    transforms = (open_clip.image_transform(SIDE, is_train=train) for train in (True, False))
    return with_bytes(nn.Identity(), *transforms)[0]


def picture(seed: int, size: tuple[int, int], mode: str = "RGB") -> Image.Image:
    """Smooth, with some noise, as photographs are."""
    random = np.random.default_rng(seed)
    coarse = Image.fromarray(random.integers(0, 256, (12, 16, 3), dtype=np.uint8))
    smooth = np.asarray(coarse.resize(size, Image.Resampling.BICUBIC))
    noise = random.normal(0, 4, (size[1], size[0], 1))
    return Image.fromarray((smooth + noise).clip(0, 255).astype(np.uint8)).convert(mode)


def both(original: Transform, image: Image.Image, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(seed)
    expected = original(image)
    torch.manual_seed(seed)
    return TorchResize(original)(image), expected


@pytest.mark.parametrize("size", [(160, 120), (90, 200), (40, 30)])
def test_crops_are_openclips_and_pixels_almost(original: Transform, size: tuple[int, int]) -> None:
    for seed in range(5):
        own, expected = both(original, picture(seed, size), seed)
        assert own.dtype == torch.uint8
        assert own.shape == expected.shape == (3, SIDE, SIDE)
        difference = (own.int() - expected.int()).abs()
        assert difference.max() <= 3
        # Of smaller images the same weights, with a few bits, stand for more of the pixels.
        assert (difference > 0).float().mean() < (0.05 if min(size) > SIDE else 0.5)


def test_another_crop_would_be_noticed(original: Transform) -> None:
    image = picture(0, (160, 120))
    own, expected = both(original, image, 0)
    other, _ = both(original, image, 1)
    assert (other.int() - expected.int()).abs().max() > 3
    assert (own.int() - expected.int()).abs().max() <= 3


@pytest.mark.parametrize("mode", ["L", "RGBA", "P", "CMYK"])
def test_other_images_go_through_the_original(original: Transform, mode: str) -> None:
    own, expected = both(original, picture(1, (160, 120), mode), 1)
    assert torch.equal(own, expected)


@pytest.mark.parametrize("transform", [Compose([CenterCrop(8), PILToTensor()]), PILToTensor()])
def test_other_transforms_are_refused(transform: Any) -> None:
    with pytest.raises(ValueError, match=r"(?s)original: .*; expected OpenCLIP's transform"):
        TorchResize(transform)
