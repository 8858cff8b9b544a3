"""Launches that `megabatch tune` found best on this machine, read from the user's cache.

A JSON file with a list of entries, one for each kernel, GPU, Triton, dtype, width and class of
sizes. An entry that does not fit the GPU at hand is not looked at; a file that cannot be understood
is left aside with a warning.
"""

from __future__ import annotations

import functools
import json
import os
import tempfile
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch

from megabatch.paths import default_cache_dir

FORMAT = 1
#: Below so many rows another launch is best: few programs must feed all multiprocessors.
FEW_ROWS = 8192


@dataclass(frozen=True)
class Config:
    """How one kernel is launched."""

    rows: int = 1  #: row tiles one program takes, one after another: a power of two up to 16
    group: int = 8  #: programs' rows that stay in the L2 cache while columns pass
    split: int = 1  #: pieces in which dS is stored: more take less shared memory
    bk: int = 64  #: features a step
    warps: int = 4
    stages: int = 3


#: What each field of a `Config` may be.
VALUES: dict[str, tuple[int, ...]] = {
    "rows": (1, 2, 4, 8, 16),
    "group": (1, 2, 4, 8, 16, 32, 64),
    "split": (1, 2, 4),
    "bk": (16, 32, 64, 128),
    "warps": (4, 8),
    "stages": (1, 2, 3, 4, 5),
}


@dataclass(frozen=True)
class Key:
    """What a tuned launch is for."""

    kernel: str  #: "forward" or "backward"
    gpu: str
    triton: str  #: version: another one compiles to another kernel
    dtype: str
    width: int  #: of the features
    few: bool  #: fewer than `FEW_ROWS` rows

    @classmethod
    def of(cls, kernel: str, x: torch.Tensor) -> Key:
        """For features like x (m, d) on a GPU."""
        gpu = _gpu_name(x.device.index or 0)
        dtype = str(x.dtype).removeprefix("torch.")
        return cls(kernel, gpu, _triton_version(), dtype, x.shape[1], len(x) < FEW_ROWS)


_tried: dict[str, Config] = {}


def lookup(kernel: str, x: torch.Tensor) -> Config | None:
    """The tuned launch for features like x, if there is one."""
    if kernel in _tried:
        return _tried[kernel]
    table = _table() if x.is_cuda else {}
    return table.get(Key.of(kernel, x)) if table else None


@contextmanager
def trying(configs: Mapping[str, Config]) -> Iterator[None]:
    """Launch these kernels so, whatever was tuned."""
    before = dict(_tried)
    _tried.update(configs)
    try:
        yield
    finally:
        _tried.clear()
        _tried.update(before)


def path() -> Path:
    """Of the file."""
    return default_cache_dir() / "kernels.json"


@functools.cache
def _table() -> dict[Key, Config]:
    return read(path())  # once in a process


def read(file: Path) -> dict[Key, Config]:
    """What a file holds; nothing where there is none, or none that can be understood."""
    try:
        content = json.loads(file.read_text())
        if content["format"] != FORMAT:
            raise ValueError(f"format: expected {FORMAT}, got {content['format']}")
        return dict(_entry(entry) for entry in content["kernels"])
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = f"{type(error).__name__}: {error}"
        warnings.warn(f"{file}: tuned kernels are not used: {reason}", stacklevel=2)
        return {}


def write(file: Path, found: Mapping[Key, Config]) -> None:
    """Add to what a file holds, whole or not at all.

    Raises:
        OSError: it cannot be written.
    """
    table = {**read(file), **found}
    entries = [{**asdict(key), "config": asdict(config)} for key, config in table.items()]
    file.parent.mkdir(parents=True, exist_ok=True)
    handle, partial = tempfile.mkstemp(dir=file.parent, prefix=file.stem, suffix=".partial")
    try:
        with os.fdopen(handle, "w") as out:
            json.dump({"format": FORMAT, "kernels": entries}, out, indent=1)
        os.replace(partial, file)
    except OSError:
        Path(partial).unlink(missing_ok=True)
        raise
    _table.cache_clear()


def _entry(entry: dict[str, Any]) -> tuple[Key, Config]:
    config = Config(**entry["config"])
    for name, allowed in VALUES.items():
        value = getattr(config, name)
        if value not in allowed:
            raise ValueError(f"{name}: expected {_either(allowed)}, got {value!r}")
    return Key(**{field.name: entry[field.name] for field in fields(Key)}), config


def _either(values: Sequence[int]) -> str:
    return f"{', '.join(map(str, values[:-1]))} or {values[-1]}"


@functools.cache
def _gpu_name(index: int) -> str:
    return torch.cuda.get_device_name(index)


@functools.cache
def _triton_version() -> str:
    import triton  # here: this module is read where there is none, too

    return str(triton.__version__)
