"""What is done to images before the first block: bytes, normalisation, patches, crops.

Pixels travel as bytes and are normalised on the device: a quarter of the traffic and memory. The
first layer of image transformers is a matrix product of their patches.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional as F

Transform = Callable[[Any], Tensor]


def with_bytes(tower: nn.Module, train: Any, evaluation: Any) -> tuple[Transform, Transform]:
    """Move the normalisation from two transforms into an image tower.

    The transforms returned end at uint8 images (c, h, w), which the tower takes from now on, and
    normalised ones too. Transforms that do not end in `ToTensor` and `Normalize`, as open_clip's
    do, stay as they are, and so does the tower.
    """
    from torchvision.transforms import Compose, Normalize, PILToTensor, ToTensor

    both = train, evaluation
    for *_, convert, normalize in (transform.transforms for transform in both):
        if not (isinstance(convert, ToTensor) and isinstance(normalize, Normalize)):
            return both
    normalize_on_device(tower, normalize.mean, normalize.std)
    train, evaluation = (Compose([*one.transforms[:-2], PILToTensor()]) for one in both)
    return train, evaluation


def normalize_on_device(
    tower: nn.Module, mean: Sequence[float], std: Sequence[float], shape: Sequence[int] = (-1, 1, 1)
) -> None:
    """Let a tower normalise pixels that it gets as bytes, by a mean and std of this shape."""
    tower.pixel_normalization = PixelNormalization(mean, std, shape)
    # A hook rather than a module around the tower: names of weights stay.
    tower.register_forward_pre_hook(_normalize_bytes)


class PixelNormalization(nn.Module):
    """It computes torchvision's ToTensor and Normalize; a module, so that it can be compiled.

    As four kernels, which read and write 29 bytes for each number, it takes 3.27 ms for 2,048
    images of 224 x 224 pixels on an H200; compiled, as one kernel, 0.38 ms.
    """

    mean: Tensor
    std: Tensor

    def __init__(
        self, mean: Sequence[float], std: Sequence[float], shape: Sequence[int] = (-1, 1, 1)
    ) -> None:
        super().__init__()
        self.register_buffer("mean", torch.tensor(mean).view(*shape), persistent=False)
        self.register_buffer("std", torch.tensor(std).view(*shape), persistent=False)

    def forward(self, images: Tensor) -> Tensor:
        """Normalised images of the buffers' dtype, from uint8 ones (n, c, h, w), or patches.

        They are contiguous: with channels last, as in the loader, convolutions would round
        differently.
        """
        # In place: three such tensors would set the peak memory of a pass without gradients.
        pixels = images.to(self.mean.dtype, memory_format=torch.contiguous_format, copy=True)
        return pixels.div_(255).sub_(self.mean).div_(self.std)


def _normalize_bytes(tower: Any, inputs: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """Normalise a tower's uint8 images or patches; others are normalised already."""
    images, *others = inputs
    if isinstance(images, Mapping):
        made = _normalize_bytes(tower, (images["patches"],))
        return None if made is None else ({**images, "patches": made[0]}, *others)
    return (tower.pixel_normalization(images), *others) if images.dtype == torch.uint8 else None


_SMALLEST = 8  # smaller ones begin convolutional networks, whose next layers want channels first


def multiply_patches(module: nn.Module) -> None:
    """Let a model's convolutions of patches that do not overlap become `PatchConvolution`s.

    Args:
        module: the model, changed in place; its names, weights and random state stay.
    """
    for layer in module.modules():
        if (
            type(layer) is nn.Conv2d
            and layer.stride == layer.kernel_size
            and min(layer.kernel_size) >= _SMALLEST
            and layer.padding in ((0, 0), "valid")
            and layer.dilation == (1, 1)
            and layer.groups == 1
        ):
            # Another class rather than another module: names of weights and hooks stay.
            layer.__class__ = PatchConvolution


class PatchConvolution(nn.Conv2d):
    """A convolution of patches that do not overlap; in half precision, a matrix product.

    On an H200 the forward and backward pass of 2,048 images' patches of 32 x 32 pixels take 34.1 ms
    as a convolution in bfloat16 (28 TFLOP/s) and 2.24 ms as a product, the patches' copy included.
    In float32 convolutions may use TF32 where products do not.
    """

    def forward(self, images: Tensor) -> Tensor:
        """The features of each patch.

        Args:
            images: (n, channels, height, width). Pixels beyond the last whole patch are ignored.

        Returns:
            (n, width, rows of patches, columns of patches), of which `flatten(2).transpose(1, 2)`,
            by which transformers go on, is contiguous in half precision.
        """
        dtype, device = images.dtype, images.device.type
        if torch.is_autocast_enabled(device) and dtype != torch.float64:  # which it leaves alone
            dtype = torch.get_autocast_dtype(device)
        if dtype not in (torch.bfloat16, torch.float16) or images.ndim != 4:
            return super().forward(images)
        high, wide = self.kernel_size
        patches = images.unfold(2, high, high).unfold(3, wide, wide)
        patches = patches.permute(0, 2, 3, 1, 4, 5)  # (n, rows, columns, channels, high, wide)
        copied = patches.to(dtype, memory_format=torch.contiguous_format)  # rounded on the way
        features = F.linear(copied.flatten(3), self.weight.flatten(1), self.bias)
        return features.permute(0, 3, 1, 2)


class TorchResize:
    """OpenCLIP's transform for training with PyTorch's resize of bytes instead of Pillow's.

    Crops are the same. The weights of PyTorch's resize have fewer bits than Pillow's: values differ
    by at most 3 of 255, fewer than one in 20 where the image is larger than the result (a test
    holds both). Images that are not RGB go through the original transform.
    """

    def __init__(self, original: Any) -> None:
        """Take the transform up to bytes (see `with_bytes`).

        Raises:
            ValueError: `original` is another transform.
        """
        from torchvision.transforms import PILToTensor, RandomResizedCrop

        steps = getattr(original, "transforms", [])
        conversions = [s for s in steps if s.__module__ == "open_clip.transform"]
        others = [type(step) for step in steps if step not in conversions]
        if len(conversions) != 1 or others != [RandomResizedCrop, PILToTensor]:
            raise ValueError(
                f"original: {original}; expected OpenCLIP's transform for training: "
                "RandomResizedCrop, a conversion to RGB, PILToTensor"
            )
        self._original, self._crop = original, steps[0]

    def __call__(self, image: Image.Image) -> Tensor:
        """Return the cropped image, uint8 (3, height, width)."""
        return self.pixels(np.asarray(image)) if image.mode == "RGB" else self._original(image)

    def pixels(self, pixels: np.ndarray) -> Tensor:
        """The same of an RGB image, uint8 (height, width, 3)."""
        crop = self._crop
        size = torch.empty((3, *pixels.shape[:2]), device="meta")  # as torchvision has images
        top, left, height, width = crop.get_params(size, crop.scale, crop.ratio)
        # A copy: torch warns of memory that cannot be written to, and a resize of dense pixels in
        # their own order, channels last, is the fastest.
        cropped = torch.from_numpy(np.array(pixels[top : top + height, left : left + width]))
        rows = cropped[None].permute(0, 3, 1, 2)
        mode = crop.interpolation.value
        return F.interpolate(rows, crop.size, mode=mode, antialias=True)[0]
