"""Triton's interpreter for the tests: right in its older versions, and a third faster."""

from __future__ import annotations

import contextlib
import functools
import inspect
from typing import Any

with contextlib.suppress(ImportError):
    import triton
    import triton.language as tl
    from triton.runtime import interpreter


def mend() -> None:
    """Change it for this process; without Triton there is nothing to change."""
    if "interpreter" not in globals():
        return
    interpreter._patch_builtin = _patch_builtin
    # That of torch 2.9 asks for strides that are multiples of 16 elements, not bytes.
    if triton.__version__.startswith("3.5."):
        interpreter.TensorDescHandle.validate = _validate


def _patch_builtin(package: Any, *rest: Any) -> None:
    """As Triton's, which looks for a package's functions at each call of a device function."""
    for name in _builtins(package):
        if tl.core.is_builtin(member := getattr(package, name)):
            interpreter._patch_attr(package, name, member, *rest)


@functools.cache
def _builtins(package: Any) -> list[str]:
    return [name for name, member in inspect.getmembers(package) if tl.core.is_builtin(member)]


def _validate(self: Any) -> None:
    size = self.base.dtype.element_ty.primitive_bitwidth // 8
    assert self.base.data.item() % 16 == 0, "base must be 16-byte aligned"
    assert len(self.strides) == len(self.block_shape) == self.ndim
    assert all(stride.data.item() * size % 16 == 0 for stride in self.strides[:-1])
    assert self.strides[-1].data.item() == 1, "last dim must be contiguous"
