"""Triton's interpreter for the tests: right in its older versions, and faster."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

with contextlib.suppress(ImportError):
    import numpy as np
    import triton
    import triton.language as tl
    from triton.runtime import interpreter

    _block_type = tl.core.block_type.__init__


def mend() -> None:
    """Change it for this process; without Triton there is nothing to change."""
    if "interpreter" not in globals():
        return
    interpreter._patch_builtin = _patch_builtin
    interpreter._patch_lang = functools.partial(_patch_once, interpreter._patch_lang)
    interpreter._get_np_dtype = functools.partial(
        _numpy_dtype, functools.cache(interpreter._get_np_dtype)
    )
    semantic = type(interpreter.interpreter_semantic)
    semantic.broadcast_impl_value = _broadcast_of(semantic.broadcast_impl_value)
    interpreter.ReduceOps.generic_reduce = _reduce
    tl.core.tensor.__init__ = _init_tensor
    tl.core.block_type.__init__ = _init_block_type
    # Overflows are looked for at each sum of integers, but told with `debug` only, which is off.
    builder = interpreter.interpreter_builder
    assert not builder.options.debug
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)
    # That of torch 2.9 asks for strides that are multiples of 16 elements, not bytes.
    if triton.__version__.startswith("3.5."):
        interpreter.TensorDescHandle.validate = _validate
    # Those of torch 2.9 to 2.11 make integers of arrays of one element, which NumPy 2.4 refuses.
    if triton.__version__ < "3.7":
        interpreter._patch_lang_tensor = functools.partial(
            _patch_tensor, interpreter._patch_lang_tensor
        )


def _patch_once(patch_lang: Callable[[Any], Any], function: Any) -> Any:
    """As Triton's, which patches its language once more at each call of a device function.

    A kernel's call patches what any device function may use, so these find it done.
    """
    if not tl.core.is_builtin(tl.core.load):
        return interpreter._LangPatchScope() if hasattr(interpreter, "_LangPatchScope") else None
    return patch_lang(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))


def _patch_tensor(patch_tensor: Callable[..., Any], tensor: Any, *scope: Any) -> None:
    patch_tensor(tensor, *scope)
    tensor.__index__ = lambda self: int(self.handle.data.item())


def _broadcast_of(broadcast: Callable[..., Any]) -> Callable[..., Any]:
    """Triton's, which broadcasts tensors of the same shape, too."""

    def broadcast_impl_value(self: Any, lhs: Any, rhs: Any) -> Any:
        same = lhs.handle.data.shape == rhs.handle.data.shape
        both = lhs.type.is_block() == rhs.type.is_block()
        return (lhs, rhs) if same and both else broadcast(self, lhs, rhs)

    return broadcast_impl_value


def _reduce(self: Any, input: Any) -> list[Any]:
    """As Triton's, which combines one pair of numbers at a time; here all along an axis at once."""
    (given,) = input
    assert self.axis is not None
    assert not self.keep_dims
    found, *others = (
        self.to_tensor(part, given.dtype) for part in np.moveaxis(given.handle.data, self.axis, 0)
    )
    return [functools.reduce(self.combine_fn.fn, others, found)]


def _init_tensor(self: Any, handle: Any, type: Any) -> None:
    """As Triton's, which makes constants of a shape for each tensor."""
    self.handle, self.type, self.dtype = handle, type, type.scalar
    self.shape, self.numel = _constants(*type.shape) if type.is_block() else _constants()


@functools.cache
def _constants(*shape: int) -> tuple[Any, Any]:
    return tl.tuple([tl.constexpr(s) for s in shape]), tl.constexpr(math.prod(shape))


def _init_block_type(self: Any, element_ty: Any, shape: Any) -> None:
    """As Triton's, which checks and writes out the shape for each type."""
    self.element_ty = element_ty
    self.shape, self.numel, words = _block(*(getattr(size, "value", size) for size in shape))
    self.name = f"<{words}, {element_ty}>"


@functools.cache
def _block(*shape: int) -> tuple[Any, int, str]:
    block = object.__new__(tl.core.block_type)
    _block_type(block, tl.int32, list(shape))
    return block.shape, block.numel, str(block.shape)


def _numpy_dtype(of_scalar: Callable[[Any], Any], dtype: Any) -> Any:
    """As Triton's, which makes its table of dtypes at each call."""
    return np.dtype(np.uint64) if dtype.scalar.is_ptr() else of_scalar(dtype.scalar)


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
