"""Launch configurations of the kernels, by GPU, dtype and width of the features.

In this order: the configuration that `megabatch tune` found on this machine and wrote to the tuning
cache, a JSON file; the one measured on such a GPU, which is written here; one that runs everywhere.
No call tunes anything.
"""

from __future__ import annotations

import functools
import json
import os
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from megabatch.files import default_cache_dir, replacing
from megabatch.similarity.backends import capability

FORMAT = 1
#: With fewer rows, programs must take fewer tiles each, so that all multiprocessors get some.
FEW_ROWS = 8192


@dataclass(frozen=True)
class Config:
    """The launch configuration of one kernel."""

    rows: int = 1  #: row tiles per program, one after another
    group: int = 8  #: programs' row tiles that stay in the L2 cache while columns pass
    split: int = 1  #: pieces in which a tile of dS is stored: two take less shared memory
    bk: int = 64  #: features per step of a tile's product
    warps: int = 4
    stages: int = 3


#: Allowed values of each field of a `Config`.
VALUES: dict[str, tuple[int, ...]] = {
    "rows": (1, 2, 4, 8, 16),
    "group": (1, 2, 4, 8, 16, 32, 64),
    "split": (1, 2),
    "bk": (16, 32, 64, 128),
    "warps": (4, 8),
    "stages": (1, 2, 3, 4, 5),
}


@dataclass(frozen=True)
class Key:
    """The case that a tuned configuration is for."""

    kernel: str  #: as in `PACKAGED`
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


#: (kernel, generation of GPUs, whether rows are many, least width) of packaged configurations; 0:
#: any. The first line that fits holds. Other GPUs than Hopper's (9) have not been measured.
PACKAGED = (
    (("forward", 0, 1, 0), Config(rows=8, group=2)),
    (("forward", 0, 0, 0), Config(rows=4, group=4)),
    # The whole loss on one H200 at b = 65,536 with this and the next line: 46.4 against 47.3 ms at
    # d = 768, 30.7 against 30.3 ms at d = 512.
    (("backward", 9, 0, 641), Config(group=32)),
    (("backward", 9, 0, 0), Config(rows=8, group=2, split=2)),
    (("backward", 0, 0, 0), Config()),
    (("sigmoid", 9, 0, 0), Config(group=32)),
    (("sigmoid", 0, 0, 0), Config()),
    # The accumulators of two tiles take the registers of eight warps.
    (("soft_targets", 9, 0, 0), Config(group=32, warps=8)),
    (("soft_targets_backward", 9, 0, 0), Config(group=32, warps=8, stages=4)),
    (("soft_targets", 0, 0, 0), Config(group=32, warps=8, bk=32)),  # 99 KiB of shared memory
    (("soft_targets_backward", 0, 0, 0), Config(group=32, warps=8, bk=32)),
)


def launch_config(kernel: str, x: torch.Tensor) -> Config:
    """Configuration of a kernel, as `Key` names it, for features like x (m, d)."""
    if kernel in _overrides:
        return _overrides[kernel]
    table = _table() if x.is_cuda else {}
    return (table.get(Key.of(kernel, x)) if table else None) or packaged(kernel, x)


def packaged(kernel: str, x: torch.Tensor) -> Config:
    """`launch_config` without the tuning cache."""
    generation = capability(x.device)[0] if x.is_cuda else 0
    return _packaged(kernel, generation, x.shape[0] >= FEW_ROWS, x.shape[1], x.element_size())


@functools.cache  # a search of the table would take as long as the launch
def _packaged(kernel: str, generation: int, many: bool, width: int, item: int) -> Config:
    config = next(
        config
        for (name, gpus, many_rows, least_width), config in PACKAGED
        if name == kernel and gpus in (0, generation) and many >= many_rows and width >= least_width
    )
    if generation != 9:
        # Compiled for sm_80 and sm_89, 4 warps spill 0.5 to 1 kB a thread.
        config = replace(config, stages=2, warps=8 if generation < 9 else config.warps)
    # float32 takes twice the shared memory per feature.
    return config if item < 4 else replace(config, bk=config.bk // 2)


_overrides: dict[str, Config] = {}


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
    with replacing(file, file.with_name(f"{file.name}.{os.getpid()}.partial")) as partial:
        partial.write_text(json.dumps({"format": FORMAT, "kernels": entries}, indent=1))
    _table.cache_clear()


def _entry(entry: dict[str, Any]) -> tuple[Key, Config]:
    config = Config(**entry.pop("config"))
    for name, allowed in VALUES.items():
        if (value := getattr(config, name)) not in allowed:
            raise ValueError(f"{name}: expected one of {allowed}, got {value!r}")
    return Key(**entry), config


@functools.cache
def _gpu_name(index: int) -> str:
    return torch.cuda.get_device_name(index)


@functools.cache
def _triton_version() -> str:
    import triton  # here: this module is imported without Triton, too

    return str(triton.__version__)
