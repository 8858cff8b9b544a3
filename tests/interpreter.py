"""Triton's interpreter as its newer versions have it."""

from __future__ import annotations

import contextlib
from typing import Any


def mend() -> None:
    """Let a descriptor's strides be multiples of 16 bytes, as compiled kernels do.

    Triton 3.4's interpreter, which comes with torch 2.8, asks for multiples of 16 elements.
    """
    with contextlib.suppress(ImportError):
        import triton
        from triton.runtime import interpreter

        if triton.__version__.startswith("3.4."):
            interpreter.TensorDescHandle.validate = _validate


def _validate(self: Any) -> None:
    size = self.base.dtype.element_ty.primitive_bitwidth // 8
    assert self.base.data.item() % 16 == 0, "base must be 16-byte aligned"
    assert len(self.strides) == len(self.block_shape) == self.ndim
    assert all(stride.data.item() * size % 16 == 0 for stride in self.strides[:-1])
    assert self.strides[-1].data.item() == 1, "last dim must be contiguous"
