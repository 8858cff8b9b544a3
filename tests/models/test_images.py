"""Images: bytes and their normalisation, patches as a product, crops by torch."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import open_clip
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from torch import nn
from torchvision import transforms as tv

from megabatch.models import create
from megabatch.models.images import (
    PatchConvolution,
    PixelNormalization,
    TorchResize,
    multiply_patches,
    with_bytes,
)
from megabatch.planning.towers import counted
from tests.models.tiny import TINY


def picture(mode: str = "RGB") -> Image.Image:
    pixels = torch.randint(0, 256, (40, 50, 3), dtype=torch.uint8)
    return Image.fromarray(pixels.numpy()).convert(mode)


@pytest.mark.parametrize("mode", ["RGB", "L", "RGBA", "P", "CMYK"])
def test_features_are_those_of_normalised_images_bit_for_bit(mode: str) -> None:
    towers = create(TINY)
    theirs, train, evaluation = open_clip.create_model_and_transforms(TINY)
    theirs.load_state_dict(towers.module.state_dict())
    theirs.eval()  # patches are dropped in training
    towers.module.eval()
    for own, expected in ((towers.train_transform, train), (towers.eval_transform, evaluation)):
        torch.manual_seed(1)  # of the picture and its crop
        pixels = torch.stack([own(picture(mode))])
        torch.manual_seed(1)
        normalised = torch.stack([expected(picture(mode))])
        assert pixels.dtype == torch.uint8
        assert pixels.shape == normalised.shape
        features = theirs.encode_image(normalised)
        assert torch.equal(towers.module.encode_image(pixels), features)
        assert torch.equal(towers.module.encode_image(normalised), features)


def test_the_order_of_bytes_in_memory_changes_nothing() -> None:
    normalize = PixelNormalization([0.1, 0.2, 0.3], [0.4, 0.5, 0.6])
    pixels = torch.randint(256, (2, 3, 5, 4), dtype=torch.uint8)
    last = normalize(pixels.to(memory_format=torch.channels_last))
    assert last.is_contiguous()
    assert torch.equal(last, normalize(pixels))


def test_normalising_takes_one_tensor_and_leaves_the_pixels() -> None:
    normalize = PixelNormalization([0.1, 0.2, 0.3], [0.4, 0.5, 0.6])
    for dtype in (torch.uint8, torch.float32):
        with counted() as counter:
            before = counter.start() + torch.empty((64, 3, 32, 32), dtype=dtype).nbytes
            normalize(torch.empty((64, 3, 32, 32), dtype=dtype))
        assert counter.peak - before == 64 * 3 * 32 * 32 * 4
    pixels = torch.rand(2, 3, 5, 4)
    copied = pixels.clone()
    expected = (pixels / 255 - normalize.mean) / normalize.std
    assert torch.equal(normalize(pixels), expected)
    assert torch.equal(pixels, copied)


def test_names_initial_weights_and_copies_stay() -> None:
    modules = []
    for make in (lambda: create(TINY).module, lambda: open_clip.create_model(TINY)):
        torch.manual_seed(3)
        modules.append(make().eval())
    module, theirs = modules
    torch.testing.assert_close(module.state_dict(), theirs.state_dict(), rtol=0, atol=0)
    assert isinstance(module.visual, type(theirs.visual))
    pixels = torch.randint(0, 256, (2, 3, 32, 32), dtype=torch.uint8)
    with torch.autocast("cpu", torch.bfloat16):
        copied = copy.deepcopy(module).encode_image(pixels)
        assert torch.equal(copied, module.encode_image(pixels))
    assert type(copy.deepcopy(module.visual.conv1)) is PatchConvolution


def test_other_transforms_stay_as_they_are() -> None:
    tower = nn.Identity()
    transforms = tuple(
        tv.Compose([tv.Resize(8), tv.ToTensor(), tv.Normalize(0, 1), last]) for last in "ab"
    )
    assert with_bytes(tower, *transforms) == transforms
    pixels = torch.ones(1, 3, 2, 2, dtype=torch.uint8)
    assert tower(pixels) is pixels


def changed(layer: nn.Module) -> Any:
    """A copy of a layer of which `multiply_patches` was told."""
    model = nn.Sequential(copy.deepcopy(layer))
    multiply_patches(model)
    return model[0]


@given(
    n=st.integers(0, 3),
    channels=st.integers(1, 4),
    width=st.integers(1, 9),
    kernel=st.tuples(st.integers(8, 11), st.integers(8, 11)),
    size=st.tuples(st.integers(11, 40), st.integers(11, 40)),
    bias=st.booleans(),
)
@settings(max_examples=40)
def test_the_product_is_the_convolution(
    n: int, channels: int, width: int, kernel: tuple[int, int], size: tuple[int, int], bias: bool
) -> None:
    ours = changed(nn.Conv2d(channels, width, kernel, kernel, bias=bias, dtype=torch.bfloat16))
    assert isinstance(ours, PatchConvolution)
    for parameter in ours.parameters():  # few integers, of which bfloat16 has all sums and products
        parameter.data = torch.randint(-1, 2, parameter.shape, dtype=torch.bfloat16)
    exact = copy.deepcopy(ours).double()
    images = (torch.rand(n, channels, *size) < 0.1).bfloat16().requires_grad_()
    outputs = ours(images), exact(images.double())
    assert outputs[0].dtype == torch.bfloat16
    assert torch.equal(outputs[0].double(), outputs[1])
    upstream = (torch.rand(outputs[0].shape) < 0.1).double()
    for found, expected in zip(
        torch.autograd.grad(outputs[0], (images, *ours.parameters()), upstream.bfloat16()),
        torch.autograd.grad(outputs[1], (images, *exact.parameters()), upstream),
        strict=True,
    ):
        assert torch.equal(found.double(), expected.double())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_as_exact_as_a_convolution(dtype: torch.dtype) -> None:
    own = nn.Conv2d(3, 64, 16, 16)
    ours = changed(own)
    images = torch.randn(5, 3, 64, 80)
    assert torch.equal(ours(images), own(images))  # float32: torch's own convolution
    with torch.autocast("cpu", dtype):
        features, theirs = ours(images), own(images)
        exact = copy.deepcopy(ours).double()(images.double())
    assert (features.dtype, exact.dtype) == (dtype, torch.float64)
    assert features.flatten(2).transpose(1, 2).is_contiguous()
    error, usual = ((found - exact).square().mean() for found in (features, theirs))
    assert error <= 1.1 * usual


@pytest.mark.parametrize(
    "layer",
    [
        nn.Conv2d(3, 8, 4, 4),
        nn.Conv2d(3, 8, 8, 4),
        nn.Conv2d(3, 8, 8, (8, 4)),
        nn.Conv2d(3, 8, 8, 8, padding=1),
        nn.Conv2d(3, 8, 8, 8, dilation=2),
        nn.Conv2d(4, 8, 8, 8, groups=2),
        nn.ConvTranspose2d(3, 8, 8, 8),
    ],
)
def test_other_convolutions_stay(layer: nn.Module) -> None:
    assert type(changed(layer)) is type(layer)


SIDE = 48
TRANSFORMS = [open_clip.image_transform(SIDE, is_train=train) for train in (True, False)]
ORIGINAL = with_bytes(nn.Identity(), *TRANSFORMS)[0]


def photograph(seed: int, size: tuple[int, int], mode: str = "RGB") -> Image.Image:
    """Smooth, with some noise, as photographs are."""
    random = np.random.default_rng(seed)
    coarse = Image.fromarray(random.integers(0, 256, (12, 16, 3), dtype=np.uint8))
    smooth = np.asarray(coarse.resize(size, Image.Resampling.BICUBIC))
    noise = random.normal(0, 4, (size[1], size[0], 1))
    return Image.fromarray((smooth + noise).clip(0, 255).astype(np.uint8)).convert(mode)


def both(image: Image.Image, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(seed)
    expected = ORIGINAL(image)
    torch.manual_seed(seed)
    return TorchResize(ORIGINAL)(image), expected


@pytest.mark.parametrize("size", [(160, 120), (90, 200), (40, 30)])
def test_crops_are_openclips_and_pixels_almost(size: tuple[int, int]) -> None:
    for seed in range(5):
        own, expected = both(photograph(seed, size), seed)
        assert own.dtype == torch.uint8
        assert own.shape == expected.shape == (3, SIDE, SIDE)
        difference = (own.int() - expected.int()).abs()
        assert difference.max() <= 3
        assert (both(photograph(seed, size), seed + 9)[0] - expected).any()
        # Of smaller images the same weights, with a few bits, stand for more of the pixels.
        assert (difference > 0).float().mean() < (0.05 if min(size) > SIDE else 0.5)


def test_other_images_go_through_the_original_and_other_transforms_are_refused() -> None:
    for mode in ("L", "RGBA", "P", "CMYK"):
        assert torch.equal(*both(photograph(1, (160, 120), mode), 1))
    crop: Any = ORIGINAL.transforms[0]  # type: ignore[attr-defined]
    for steps in ([], [tv.CenterCrop(8)], [crop], [crop, tv.ColorJitter()]):
        with pytest.raises(ValueError, match=r"(?s)original: .*; expected OpenCLIP's transform"):
            TorchResize(tv.Compose([*steps, tv.PILToTensor()]))
