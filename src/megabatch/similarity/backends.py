"""Backends that compute tiles of the matrix: torch operations (`eager`) or Triton kernels."""

from __future__ import annotations

import functools
import importlib.util
import warnings

import torch
from torch import Tensor

from megabatch.similarity import settings
from megabatch.torch_internals import constant_in_graphs

#: Whether `warn_of_float32` has warned.
_warned = False


def kernels_available(x: Tensor) -> bool:
    """Whether Triton's kernels run on the device of x."""
    return x.is_cuda and _kernels_on(x.device)


def uses_kernels(x: Tensor) -> bool:
    """Whether the Triton kernels take features like x, or torch operations do.

    The kernels multiply float32 in TF32, so they take it if torch would multiply it so too.
    """
    if not kernels_available(x):
        return False
    if x.dtype == torch.float32:
        return settings.products(x) != settings.EXACT
    return x.element_size() == 2


def described(x: Tensor) -> str:
    """Description of features like x and of their products, on which all ranks must agree."""
    dtype, products = str(x.dtype).removeprefix("torch."), settings.products(x)
    kernels = f"{'fused' if uses_kernels(x) else 'torch'} kernels"
    words = f"width {' x '.join(map(str, x.shape[1:]))}, {dtype}, {x.device.type}, {kernels}"
    return f"{words}, float32 products: {products}" if products else words


@functools.cache  # torch queries the driver each time, and a step needs it ten times
def capability(device: torch.device) -> tuple[int, int]:
    """Compute capability of a GPU."""
    return torch.cuda.get_device_capability(device)


@functools.cache  # needed several times a step
def _kernels_on(device: torch.device) -> bool:
    installed = importlib.util.find_spec("triton") is not None
    return device.type == "cuda" and installed and capability(device) >= (8, 0)


def warn_of_float32(x: Tensor) -> None:
    """Warn, once, of features that the kernels would take if torch's precision allowed TF32."""
    if x.dtype == torch.float32 and x.is_cuda:
        _warn_of_float32(x.device)


# A constant for torch.compile, so that compiling a program warns.
@constant_in_graphs
def _warn_of_float32(device: torch.device) -> None:
    global _warned
    if _warned or settings.precision(device.type) != 0 or not _kernels_on(device):
        return
    _warned = True
    warnings.warn(
        "megabatch: float32 features on a GPU, at torch's default float32 matmul precision "
        "('highest'), cannot use the fused kernels, which multiply float32 in TF32; torch "
        "operations compute them block by block, which takes longer. To use the kernels: "
        "bfloat16 features (autocast), or torch.set_float32_matmul_precision('high')",
        stacklevel=2,
    )
