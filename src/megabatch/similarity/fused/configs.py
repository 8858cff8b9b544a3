"""Tile shapes a kernel is compiled for, by GPU kind and width of the features."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

#: Rows and columns of every tile: pairs (i, i) then fall into whole tiles on both sides.
TILE = 128


@dataclass(frozen=True)
class Config:
    """How one kernel is launched."""

    rows: int = 1  #: row tiles one program takes, one after another: a power of two up to 16
    group: int = 8  #: programs' rows that stay in the L2 cache while columns pass
    split: int = 1  #: pieces in which dS is stored: more take less shared memory
    bk: int = 64  #: features a step
    warps: int = 4
    stages: int = 3


def forward_config(x: torch.Tensor) -> Config:
    """Launch of the forward kernels for features like x (m, d)."""
    # Few rows: fewer to a program, so that all multiprocessors get some.
    config = Config(rows=8, group=2) if len(x) >= 8192 else Config(rows=4, group=4)
    if _generation(x) == 9:
        return _narrow(config, x)
    return _narrow(replace(config, stages=2), x)


def backward_config(x: torch.Tensor) -> Config:
    """Launch of the backward kernels for features like x (m, d)."""
    if _generation(x) == 9:
        # The whole loss on one H200, b = 65,536: 30.3 against 30.7 ms at d = 512, 47.3 against
        # 46.4 ms at d = 768.
        wide = x.shape[1] > 640
        return _narrow(Config(group=32) if wide else Config(rows=8, group=2, split=2), x)
    return _narrow(Config(stages=2), x)


def _generation(x: torch.Tensor) -> int:
    return torch.cuda.get_device_capability(x.device)[0] if x.is_cuda else 0


def _narrow(config: Config, x: torch.Tensor) -> Config:
    """float32 takes twice the shared memory a feature."""
    return config if x.element_size() < 4 else replace(config, bk=config.bk // 2)
