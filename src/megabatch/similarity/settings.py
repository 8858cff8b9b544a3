"""Process-wide settings, and the snapshot of them that each call works with.

A call reads the settings once (`of_call`) and passes them to its operators as integers. Its
backward pass therefore uses the settings of its forward pass, even if they were changed in between
(`applied`).
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megabatch.torch_internals import constant_in_graphs

#: Bytes. On a GPU they hold a block of dS of 16,384 x 16,384 in half precision: larger ones are not
#: faster.
DEFAULT_WORKSPACE = {"cpu": 256 << 20, "cuda": 512 << 20}
#: Bytes of features of all ranks that are gathered in one round: 262,144 rows of 768 bfloat16
#: numbers. Their gradients in float32 take twice as much.
DEFAULT_GATHER = 384 << 20

#: Precisions of float32 products.
PRECISIONS = ("ieee", "tf32", "bf16")
EXACT = PRECISIONS[0]


class Settings(NamedTuple):
    """Settings as integers, since operators take these."""

    workspace: int  #: bytes that a block of the matrix may take; 0: the device's default
    precision: int  #: of float32 products, an index into `PRECISIONS`; of a call alone
    gather: int  #: bytes of features of all ranks that are gathered at once
    grid: int  #: ranks that share rows; 0: none do; -1: as the hosts suggest


class _Call(threading.local):
    settings: Settings | None = None  #: of the call that runs on this thread


_call = _Call()
_chosen = Settings(0, 0, DEFAULT_GATHER, -1)  #: of the process


def current() -> Settings:
    """The settings of the call that runs on this thread, if there is one, or the process's."""
    return _call.settings or _chosen


def workspace(x: Tensor) -> int:
    """Bytes that a block of the matrix may take for features like x."""
    default = DEFAULT_WORKSPACE.get(x.device.type, DEFAULT_WORKSPACE["cuda"])
    return current().workspace or default


def products(x: Tensor) -> str:
    """Precision of products of features like x, one of `PRECISIONS`; "" if no setting applies."""
    if not _has_float32_products(x):
        return ""
    call = _call.settings
    return PRECISIONS[precision(x.device.type) if call is None else call.precision]


def of_call(x: Tensor) -> Settings:
    """The current settings, for a call with features like x."""
    products, chosen = precision(x.device.type) if _has_float32_products(x) else 0, current()
    # Not `_replace`, which torch.compile of torch 2.11 cannot take.
    return Settings(workspace(x), products, chosen.gather, chosen.grid)


class applied:
    """Apply the settings that a call with features like x was made with, without autocast.

    A class, since a generator's context manager takes several times as long.
    """

    def __init__(self, settings: Sequence[int], x: Tensor) -> None:
        self._call, self._x = Settings(*settings), x

    def __enter__(self) -> None:
        x, self._outer = self._x, _call.settings
        self._before = self._call.precision
        if _has_float32_products(x):
            self._before = precision(x.device.type)
        self._autocast = without_autocast(x)
        _call.settings = self._call
        self._set(self._call.precision)
        self._autocast.__enter__()

    def __exit__(self, *error: object) -> None:
        self._autocast.__exit__(None, None, None)
        _call.settings = self._outer
        self._set(self._before)

    def _set(self, products: int) -> None:
        if self._before != self._call.precision:
            _matmul(self._x.device.type).fp32_precision = PRECISIONS[products]


def without_autocast(x: Tensor) -> AbstractContextManager[Any]:
    """Disable autocast, which remains on inside operators, for features like x."""
    kind = x.device.type
    if not torch.is_autocast_enabled(kind):  # entering costs 10 us
        return nullcontext()
    return torch.autocast(kind, enabled=False)


# --- float32 products -----------------------------------------------------------------------------


def _has_float32_products(x: Tensor) -> bool:
    """Whether torch multiplies features like x in float32, whose precision is a setting."""
    return x.dtype == torch.float32 or (x.element_size() == 2 and not x.is_cuda)


@functools.cache  # every call needs it
def _matmul(kind: str) -> Any:
    """The object that holds the precision of a device's products."""
    return (torch.backends.mkldnn if kind == "cpu" else torch.backends.cuda).matmul


# A constant for torch.compile, which cannot trace it. Switching TF32 on or off recompiles a
# compiled function.
@constant_in_graphs
def precision(kind: str) -> int:
    """The precision of a device's float32 products: an index into `PRECISIONS`."""
    # torch.get_float32_matmul_precision raises if only this newer setting was used.
    name = _matmul(kind).fp32_precision
    return 0 if name == "none" else PRECISIONS.index(name)


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
    return _set("workspace", "size", size, 0, 64 << 10, "bytes") or None


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
    return _set("gather", "size", size, DEFAULT_GATHER, 0, "bytes")


def set_grid(columns: int | None) -> int | None:
    """Set whether the default group is arranged as a grid of ranks; returns the previous setting.

    In a grid of rows and columns of ranks, the ranks of one row share the rows of their matrix, and
    the ranks of one column its columns (docs/distributed.md). None, the default: on several hosts
    with equally many consecutive ranks, the default group is a grid of rows of whole hosts. 0:
    never a grid. A number that divides its size: it is a grid with that many columns. Other groups
    never are grids, and x against itself takes none.

    Results are the same up to rounding. All ranks must set the same value. It applies to all later
    calls and their backward passes.

    Raises:
        TypeError: `columns` is neither None nor an integer.
        ValueError: `columns` is negative.
    """
    before = _set("grid", "columns", columns, -1, 0, "ranks")
    return None if before < 0 else before


def _set(
    setting: str, name: str, value: Any, default: int = 0, least: int = 0, unit: str = ""
) -> int:
    """Change a setting to a whole number, or the default for None; returns its previous value."""
    global _chosen
    if value is None:
        value = default
    elif not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{name}: expected a number of {unit}, got {type(value).__name__}")
    elif value < least:
        raise ValueError(f"{name}: expected at least {least} {unit}, got {value}")
    before: int = getattr(_chosen, setting)
    _chosen = _chosen._replace(**{setting: value})
    return before
