"""Launch configurations of the kernels, by GPU, dtype and width of the features.

In this order: the configuration that `megabatch tune` found on this machine and wrote to the tuning
cache; the one measured on such a GPU, which is written here; one that runs everywhere. No call
tunes anything.

The cache is a JSON file with one entry for each kernel, GPU, Triton version, dtype, width and class
of sizes. Entries for other GPUs are ignored. If the file cannot be read, a warning says so, and it
is not used.
"""

from __future__ import annotations

import functools
import json
import os
import tempfile
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch

from megabatch.files import default_cache_dir
from megabatch.similarity.backends import capability

FORMAT = 1
#: Below this number of rows another configuration is best: few programs must occupy all
#: multiprocessors.
FEW_ROWS = 8192


@dataclass(frozen=True)
class Config:
    """The launch configuration of one kernel."""

    rows: int = 1  #: row tiles per program, one after another: a power of two up to 16
    group: int = 8  #: programs' row tiles that stay in the L2 cache while columns pass
    split: int = 1  #: pieces in which a tile of dS is stored: more of them take less shared memory
    bk: int = 64  #: features per step of a tile's product
    warps: int = 4
    stages: int = 3


#: Allowed values of each field of a `Config`.
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
    """The case that a tuned configuration is for."""

    kernel: str  #: "forward", "backward" or "sigmoid"
    gpu: str
    triton: str  #: version: another one compiles another kernel
    dtype: str
    width: int  #: of the features
    few: bool  #: fewer than `FEW_ROWS` rows

    @classmethod
    def of(cls, kernel: str, x: torch.Tensor) -> Key:
        """For features like x (m, d) on a GPU."""
        gpu = _gpu_name(x.device.index or 0)
        dtype = str(x.dtype).removeprefix("torch.")
        return cls(kernel, gpu, _triton_version(), dtype, x.shape[1], len(x) < FEW_ROWS)


#: Forward, for many rows and for few: with fewer per program all multiprocessors get some.
MANY, FEW = Config(rows=8, group=2), Config(rows=4, group=4)
#: Backward, for wide features and for narrow ones. The whole loss on one H200 at b = 65,536: 46.4
#: against 47.3 ms at d = 768, 30.7 against 30.3 ms at d = 512.
WIDE, NARROW = Config(group=32), Config(rows=8, group=2, split=2)


def forward_config(x: torch.Tensor) -> Config:
    """Configuration of the forward kernels for features like x (m, d)."""
    return lookup("forward", x) or packaged_forward(x)


def backward_config(x: torch.Tensor) -> Config:
    """Configuration of the backward kernels for features like x (m, d)."""
    return lookup("backward", x) or packaged_backward(x)


def packaged_forward(x: torch.Tensor) -> Config:
    """Configuration of the forward kernels without the tuning cache."""
    config = MANY if x.shape[0] >= FEW_ROWS else FEW
    if _generation(x) == 9:
        return _narrow(config, x)
    return _narrow(_elsewhere(config, x), x)


def packaged_backward(x: torch.Tensor) -> Config:
    """Configuration of the backward kernels without the tuning cache."""
    if _generation(x) == 9:
        return _narrow(WIDE if x.shape[1] > 640 else NARROW, x)
    return _narrow(_elsewhere(Config(), x), x)


def sigmoid_config(x: torch.Tensor) -> Config:
    """Configuration of the sigmoid loss's kernels for features like x; `tune` searches for none."""
    found = lookup("sigmoid", x)
    if found is not None:
        return found
    # One row tile per program: with more, registers spill.
    base = packaged_backward(x)
    return base if base.rows == 1 else replace(base, rows=1, split=1, group=32)


def _elsewhere(config: Config, x: torch.Tensor) -> Config:
    """For GPUs not measured: compiled for sm_80 and sm_89, 4 warps spill 0.5 to 1 kB a thread."""
    return replace(config, stages=2, warps=8 if _generation(x) < 9 else config.warps)


def _generation(x: torch.Tensor) -> int:
    return capability(x.device)[0] if x.is_cuda else 0


def _narrow(config: Config, x: torch.Tensor) -> Config:
    """float32 takes twice the shared memory per feature."""
    return config if x.element_size() < 4 else replace(config, bk=config.bk // 2)


_overrides: dict[str, Config] = {}


def lookup(kernel: str, x: torch.Tensor) -> Config | None:
    """The tuned configuration for features like x, if there is one."""
    if kernel in _overrides:
        return _overrides[kernel]
    table = _table() if x.is_cuda else {}
    return table.get(Key.of(kernel, x)) if table else None


@contextmanager
def override(configs: Mapping[str, Config]) -> Iterator[None]:
    """Use these configurations, by kernel, before any others."""
    before = dict(_overrides)
    _overrides.update(configs)
    try:
        yield
    finally:
        _overrides.clear()
        _overrides.update(before)


def path() -> Path:
    """Path of the tuning cache."""
    return default_cache_dir() / "kernels.json"


@functools.cache
def _table() -> dict[Key, Config]:
    return read(path())  # once in a process


def read(file: Path) -> dict[Key, Config]:
    """The entries of a file; none if it is missing or cannot be read."""
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
    """Add entries to a file, atomically.

    Raises:
        OSError: the file cannot be written.
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
    import triton  # here: this module is imported without Triton, too

    return str(triton.__version__)
