"""The first layer of image transformers, as a matrix product of their patches."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

_SMALLEST = 8  # smaller ones begin convolutional networks, whose next layers want channels first


def multiply_patches(module: nn.Module) -> None:
    """Let a model's convolutions of patches that do not overlap become `PatchConvolution`s.

    Args:
        module: the model, changed in place; its names, weights and random state stay.
    """
    for layer in module.modules():
        if type(layer) is nn.Conv2d and _divides(layer):
            # Another class rather than another module: names of weights and hooks stay.
            layer.__class__ = PatchConvolution


class PatchConvolution(nn.Conv2d):
    """A convolution of patches that do not overlap; in half precision, a matrix product.

    On an H200 the forward and backward pass of 2,048 images' patches of 32 x 32 pixels take 34.1 ms
    as a convolution in bfloat16 (28 TFLOP/s) and 2.24 ms as a product, the patches' copy included
    (benchmarks/results/patches.json). In float32 convolutions may use TF32 where products do not.
    """

    def forward(self, images: Tensor) -> Tensor:
        """The features of each patch.

        Args:
            images: (n, channels, height, width). Pixels beyond the last whole patch are ignored.

        Returns:
            (n, width, rows of patches, columns of patches).
        """
        dtype = _dtype_of_products(images)
        half = dtype in (torch.bfloat16, torch.float16)
        return self.product(images, dtype) if half and images.ndim == 4 else super().forward(images)

    def product(self, images: Tensor, dtype: torch.dtype) -> Tensor:
        """As `forward`, by a product of the patches' copy, in this dtype, and the weights.

        `flatten(2).transpose(1, 2)` of it, by which transformers go on, is contiguous.
        """
        (high, wide), (height, width) = self.kernel_size, images.shape[2:]
        rows, columns = height // high, width // wide
        whole = images[:, :, : rows * high, : columns * wide]
        divided = whole.unflatten(3, (columns, wide)).unflatten(2, (rows, high))
        patches = divided.permute(0, 2, 4, 1, 3, 5)  # (n, rows, columns, channels, high, wide)
        copied = patches.to(dtype, memory_format=torch.contiguous_format)  # rounded on the way
        features = F.linear(copied.flatten(3), self.weight.flatten(1), self.bias)
        return features.permute(0, 3, 1, 2)


def _divides(layer: nn.Conv2d) -> bool:
    """Whether a convolution's kernels cover its input without overlaps, gaps or borders."""
    return (
        layer.stride == layer.kernel_size
        and min(layer.kernel_size) >= _SMALLEST
        and layer.padding in ((0, 0), "valid")
        and layer.dilation == (1, 1)
        and layer.groups == 1
    )


def _dtype_of_products(images: Tensor) -> torch.dtype:
    """The dtype in which a product of these images with weights is computed."""
    device = images.device.type
    if torch.is_autocast_enabled(device) and images.dtype != torch.float64:  # which it leaves alone
        return torch.get_autocast_dtype(device)
    return images.dtype
