"""Process-wide settings, and the snapshot of them that each call works with.

A call reads the settings once (`of_call`) and passes them to its operators as integers. Its
backward pass therefore uses the settings of its forward pass, even if they were changed in between
(`AppliedSettings`).
"""

from __future__ import annotations

import functools
import threading
import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megabatch.torch_internals import constant_in_graphs

#: Bytes. On a GPU they hold a block of dS of 16,384 x 16,384 in half precision: larger ones are not
#: faster.
DEFAULT_WORKSPACE = {"cpu": 256 << 20, "cuda": 512 << 20}
#: Bytes of features of all ranks that are gathered in one round: 262,144 rows of 768 bfloat16
#: numbers (on 4 H200s 183.1 ms, 183.6 in two rounds, 184.1 in four, 185.8 in eight:
#: benchmarks/results/hiding-4gpu.json). Their gradients in fp32 take twice as much.
DEFAULT_GATHER = 384 << 20

#: Precisions of float32 products, and what torch before 2.9 calls them.
PRECISIONS, LEGACY = ("ieee", "tf32", "bf16"), ("highest", "high", "medium")

EXACT = PRECISIONS[0]

_workspace: int | None = None
_gather = DEFAULT_GATHER
_overlap = True
_grid = -1


class Settings(NamedTuple):
    """The settings of one call, as integers, since operators take these."""

    workspace: int  #: bytes that a block of the matrix may take
    precision: int  #: of float32 products, an index into `PRECISIONS`
    gather: int  #: bytes of features of all ranks that are gathered at once
    overlap: int  #: whether transfers overlap computation
    grid: int  #: ranks that share rows; 0: none do; -1: as the hosts suggest


class _ThreadLocal(threading.local):
    settings: Settings | None = None


_thread = _ThreadLocal()


def of_call(x: Tensor) -> Settings:
    """The current settings, for a call with features like x."""
    products = precision(x.device.type) if _has_float32_products(x) else 0
    return Settings(_limit(x), products, _gather, int(_overlap), _grid)


# The functions below return the settings of the call that runs on this thread, if there is one, or
# else the current ones.


def workspace(x: Tensor) -> int:
    """Bytes that a block of the matrix may take for features like x."""
    return _limit(x) if _thread.settings is None else _thread.settings.workspace


def _limit(x: Tensor) -> int:
    if _workspace is not None:
        return _workspace
    return DEFAULT_WORKSPACE.get(x.device.type, DEFAULT_WORKSPACE["cuda"])


def products(x: Tensor) -> str:
    """Precision of products of features like x, one of `PRECISIONS`; "" if no setting applies."""
    if not _has_float32_products(x):
        return ""
    applied = _thread.settings
    return PRECISIONS[precision(x.device.type) if applied is None else applied.precision]


def gather() -> int:
    """Bytes of features of all ranks that may be gathered at once."""
    return _gather if _thread.settings is None else _thread.settings.gather


def overlap() -> bool:
    """Whether transfers overlap computation."""
    return _overlap if _thread.settings is None else bool(_thread.settings.overlap)


def grid() -> int:
    """Number of ranks that share rows, 0: none do, or -1: as the hosts suggest."""
    return _grid if _thread.settings is None else _thread.settings.grid


class AppliedSettings:
    """Context manager: apply the settings that a call with features like x was made with."""

    def __init__(self, settings: Sequence[int], x: Tensor) -> None:
        own = settings if isinstance(settings, Settings) else Settings(*settings)
        self.settings, self.kind = own, x.device.type
        self.products = _has_float32_products(x)
        self.outer: Settings | None = None
        self.precision: int | None = None

    def __enter__(self) -> None:
        self.outer, _thread.settings = _thread.settings, self.settings
        if self.products and (current := precision(self.kind)) != self.settings.precision:
            self.precision = current
            _set_precision(self.kind, self.settings.precision)

    def __exit__(self, *_: object) -> None:
        _thread.settings = self.outer
        if self.precision is not None:
            _set_precision(self.kind, self.precision)


# --- float32 products -----------------------------------------------------------------------------


def _has_float32_products(x: Tensor) -> bool:
    """Whether torch multiplies features like x in float32, whose precision is a setting."""
    return x.dtype == torch.float32 or (x.element_size() == 2 and not x.is_cuda)


@functools.cache  # every call needs it
def _matmul(kind: str) -> Any:
    """The object that holds the precision of a device's products; None before torch 2.9."""
    backend = torch.backends.mkldnn if kind == "cpu" else torch.backends.cuda
    matmul = getattr(backend, "matmul", None)
    return matmul if hasattr(matmul, "fp32_precision") else None


# A constant for torch.compile, which cannot trace it. Switching TF32 on or off recompiles a
# compiled function.
@constant_in_graphs
def precision(kind: str) -> int:
    """The precision of a device's float32 products: an index into `PRECISIONS`."""
    matmul = _matmul(kind)
    if matmul is None:
        return LEGACY.index(torch.get_float32_matmul_precision())
    # torch.get_float32_matmul_precision raises if only this newer setting was used.
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
    """Limit the memory of a block of the matrix, in bytes; returns the previous limit.

    The limit applies to all later calls of this process and their backward passes. Smaller blocks
    are slower. On the CPU, memory that the blocks do not need saves logits for the backward pass
    (`softmax.saved_logits`). None, the default, is 256 MiB on the CPU and 512 MiB on a GPU.

    Raises:
        TypeError: `size` is neither None nor an integer.
        ValueError: `size` is below 64 KiB.
    """
    global _workspace
    _check_bytes(size, 64 << 10)
    before, _workspace = _workspace, size
    return before


def set_chunk(size: int | None) -> None:
    """Deprecated, without effect: no transfer is divided into chunks but by `set_gather`."""
    warnings.warn(
        "set_chunk has no effect any more: the ring, whose chunks it sized, has gone; set_gather "
        "bounds what is gathered at once",
        DeprecationWarning,
        stacklevel=2,
    )


def set_gather(size: int | None) -> int:
    """Limit the features of all ranks that are gathered at once, in bytes; returns the previous
    limit.

    If the features of all ranks together take more, they are gathered in rounds of a quarter of the
    limit. It also decides whether ranks share rows, and whether features are saved for the backward
    pass. All ranks must set the same value. It applies to all later calls and their backward
    passes. None is the default, 384 MiB.

    Raises:
        TypeError: `size` is neither None nor an integer.
        ValueError: `size` is negative.
    """
    global _gather
    _check_bytes(size, 0)
    before, _gather = _gather, DEFAULT_GATHER if size is None else size
    return before


def set_overlap(on: bool) -> bool:
    """Set whether transfers overlap computation (default: yes); returns the previous setting.

    Turning it off measures the benefit of the overlap: each step then waits for its transfers
    before it computes. Results do not change. All ranks must set the same value. It applies to all
    later calls and their backward passes.
    """
    global _overlap
    before, _overlap = _overlap, bool(on)
    return before


def set_grid(columns: int | None) -> int | None:
    """Set whether the default group is arranged as a grid of ranks; returns the previous setting.

    In a grid of rows and columns of ranks, those of one row share the rows of their matrix, and
    those of one column its columns (docs/distributed.md). None, the default: on several hosts with
    equally many ranks, the default group is a grid whose rows are whole hosts. 0: it is never a
    grid. A number that divides its size: it is a grid with that many columns. A two-dimensional
    DeviceMesh is a grid of its own shape, whatever is set; other groups never are grids.

    Results are the same up to rounding. All ranks must set the same value. It applies to all later
    calls and their backward passes.

    Raises:
        TypeError: `columns` is neither None nor an integer.
        ValueError: `columns` is negative.
    """
    global _grid
    if columns is not None and (not isinstance(columns, int) or isinstance(columns, bool)):
        raise TypeError(f"columns: expected a number of ranks, got {type(columns).__name__}")
    if columns is not None and columns < 0:
        raise ValueError(f"columns: expected at least 0, got {columns}")
    before, _grid = _grid, -1 if columns is None else columns
    return None if before < 0 else before


def _check_bytes(size: Any, least: int) -> None:
    if size is not None and (not isinstance(size, int) or isinstance(size, bool)):
        raise TypeError(f"size: expected a number of bytes, got {type(size).__name__}")
    if size is not None and size < least:
        raise ValueError(
            f"size: expected at least {least} {'byte' if least == 1 else 'bytes'}, got {size}"
        )
