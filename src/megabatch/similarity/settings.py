"""Settings of this process, and those that one call was made with.

A call reads them once (`of_call`) and hands them to its operators as integers, so that its backward
pass works with those of its forward pass, whatever is set in between (`Holding`).
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megabatch.torch_internals import constant_in_graphs

#: Bytes. A GPU's blocks of dS, 16,384 a side in half precision, make products as fast as they get.
DEFAULT_WORKSPACE = {"cpu": 256 << 20, "cuda": 512 << 20}
#: Bytes of features of a piece: 32,768 rows of 768 bfloat16 numbers, whose products are as fast as
#: larger ones. Two pieces of features and three of fp32 gradients are in memory at once.
DEFAULT_PIECE = 48 << 20
#: Bytes of features of all ranks that are gathered in one round: 262,144 rows of 768 bfloat16
#: numbers (on 4 H200s 183.1 ms, 183.6 in two rounds, 184.1 in four, 185.8 in eight:
#: benchmarks/results/hiding-4gpu.json). Their gradients in fp32 take twice as much.
DEFAULT_GATHER = 384 << 20

#: Precisions of float32 products, and what torch before 2.9 calls them.
PRECISIONS, LEGACY = ("ieee", "tf32", "bf16"), ("highest", "high", "medium")

EXACT = PRECISIONS[0]

_workspace: int | None = None
_piece = DEFAULT_PIECE
_gather = DEFAULT_GATHER
_overlap = True


class Settings(NamedTuple):
    """What a call is made with; integers, as operators take them."""

    workspace: int  #: bytes that a block of the matrix may take
    precision: int  #: of float32 products, an index into `PRECISIONS`
    piece: int  #: bytes of features that travel at once
    gather: int  #: bytes of features of all ranks that are gathered at once
    overlap: int  #: whether transfers overlap computation


class _Held(threading.local):
    settings: Settings | None = None


_held = _Held()


def of_call(x: Tensor) -> Settings:
    """The settings of a call with features like x that is made now."""
    products = precision(x.device.type) if _has_float32_products(x) else 0
    return Settings(_limit(x), products, _piece, _gather, int(_overlap))


# Of the call under way on this thread; else of one that is made now.


def workspace(x: Tensor) -> int:
    """Bytes that a block of the matrix may take for features like x."""
    return _limit(x) if _held.settings is None else _held.settings.workspace


def _limit(x: Tensor) -> int:
    if _workspace is not None:
        return _workspace
    return DEFAULT_WORKSPACE.get(x.device.type, DEFAULT_WORKSPACE["cuda"])


def products(x: Tensor) -> str:
    """How features like x are multiplied, one of `PRECISIONS`; "" where no setting says so."""
    if not _has_float32_products(x):
        return ""
    held = _held.settings
    return PRECISIONS[precision(x.device.type) if held is None else held.precision]


def piece() -> int:
    """Bytes of features that travel at once."""
    return _piece if _held.settings is None else _held.settings.piece


def gather() -> int:
    """Bytes of features of all ranks that may be gathered at once."""
    return _gather if _held.settings is None else _held.settings.gather


def overlap() -> bool:
    """Whether transfers overlap computation."""
    return _overlap if _held.settings is None else bool(_held.settings.overlap)


class Holding:
    """Work with the settings that a call with features like x was made with."""

    def __init__(self, settings: Sequence[int], x: Tensor) -> None:
        own = settings if isinstance(settings, Settings) else Settings(*settings)
        self.settings, self.kind = own, x.device.type
        self.products = _has_float32_products(x)
        self.outer: Settings | None = None
        self.precision: int | None = None

    def __enter__(self) -> None:
        self.outer, _held.settings = _held.settings, self.settings
        if self.products and (current := precision(self.kind)) != self.settings.precision:
            self.precision = current
            _set_precision(self.kind, self.settings.precision)

    def __exit__(self, *_: object) -> None:
        _held.settings = self.outer
        if self.precision is not None:
            _set_precision(self.kind, self.precision)


# --- float32 products -----------------------------------------------------------------------------


def _has_float32_products(x: Tensor) -> bool:
    """Whether torch multiplies features like x in float32, which takes a setting to know how."""
    return x.dtype == torch.float32 or (x.element_size() == 2 and not x.is_cuda)


@functools.cache  # asked at each call
def _matmul(kind: str) -> Any:
    """Where torch keeps the precision of such a device's products; None before torch 2.9."""
    backend = torch.backends.mkldnn if kind == "cpu" else torch.backends.cuda
    matmul = getattr(backend, "matmul", None)
    return matmul if hasattr(matmul, "fp32_precision") else None


# As a constant for torch.compile, which cannot trace it. A compiled function is compiled anew where
# TF32 is switched on or off.
@constant_in_graphs
def precision(kind: str) -> int:
    """How such a device multiplies float32: an index into `PRECISIONS`."""
    matmul = _matmul(kind)
    if matmul is None:
        return LEGACY.index(torch.get_float32_matmul_precision())
    # torch.get_float32_matmul_precision raises where only this newer setting was used.
    name = matmul.fp32_precision
    return 0 if name == "none" else PRECISIONS.index(name)


def _set_precision(kind: str, precision: int) -> None:
    matmul = _matmul(kind)
    if matmul is None:
        torch.set_float32_matmul_precision(LEGACY[precision])
    else:
        matmul.fp32_precision = PRECISIONS[precision]


# --- what users set -------------------------------------------------------------------------------


def set_workspace(size: int | None) -> int | None:
    """Bound the memory that a block of the matrix may take, in bytes; returns the bound before.

    It holds for all calls that this process makes from now on, each with its backward pass. Smaller
    blocks are slower. On the CPU, what the blocks leave of it holds logits from the forward to the
    backward pass (`sweep.kept_size`). None, the bound at the start, stands for 256 MiB on the CPU
    and 512 MiB on a GPU.

    Raises:
        TypeError: `size` is neither None nor an integer.
        ValueError: `size` is below 64 KiB.
    """
    global _workspace
    _check_bytes(size, 64 << 10)
    before, _workspace = _workspace, size
    return before


def set_piece(size: int | None) -> int:
    """Bound the features that travel at once, in bytes; returns the bound before.

    All ranks must set the same, for all calls from now on, each with its backward pass. None is the
    bound at the start, 48 MiB.

    Raises:
        TypeError: `size` is neither None nor an integer.
        ValueError: `size` is not positive.
    """
    global _piece
    _check_bytes(size, 1)
    before, _piece = _piece, DEFAULT_PIECE if size is None else size
    return before


def set_gather(size: int | None) -> int:
    """Bound the features that all ranks gather at once, in bytes; returns the bound before.

    Where those of all ranks together take more they go in rounds of a quarter of that; where shards
    differ in size, pieces travel the ring instead; 0: always. All ranks must set the same, for all
    calls from now on, each with its backward pass. None is the bound at the start, 384 MiB.

    Raises:
        TypeError: `size` is neither None nor an integer.
        ValueError: `size` is negative.
    """
    global _gather
    _check_bytes(size, 0)
    before, _gather = _gather, DEFAULT_GATHER if size is None else size
    return before


def set_overlap(on: bool) -> bool:
    """Whether transfers overlap computation (they do at the start); returns how it was before.

    For measuring what overlap is worth: off, each exchange is waited for before its step's
    computation. It changes no result. All ranks must set the same, for all calls from now on, each
    with its backward pass.
    """
    global _overlap
    before, _overlap = _overlap, bool(on)
    return before


def _check_bytes(size: Any, least: int) -> None:
    if size is not None and (not isinstance(size, int) or isinstance(size, bool)):
        raise TypeError(f"size: expected a number of bytes, got {type(size).__name__}")
    if size is not None and size < least:
        raise ValueError(
            f"size: expected at least {least} {'byte' if least == 1 else 'bytes'}, got {size}"
        )
