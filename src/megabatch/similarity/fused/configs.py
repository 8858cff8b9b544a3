"""Tile shapes a kernel is compiled for, by GPU kind and width of the features."""

from __future__ import annotations

from dataclasses import dataclass

import torch

#: Rows and columns of every tile: pairs (i, i) then fall into whole tiles on both sides.
TILE = 128


@dataclass(frozen=True)
class Config:
    """How one kernel is launched."""

    bk: int = 64  #: features a step
    group: int = 8  #: row tiles that stay in the L2 cache while columns pass
    warps: int = 4
    stages: int = 3
    rows: int = 4  #: row tiles one program of the forward kernel takes, one after another


#: Measured on one H200 (sm_90): benchmarks/results holds the comparison of tile shapes.
_FORWARD = {9: Config(group=4, stages=3)}
_BACKWARD = {9: Config(group=16, stages=3)}
#: sm_80 has less shared memory; blocks of 64 KiB for two programs on one multiprocessor.
_FALLBACK = Config(stages=2)


def forward_config(x: torch.Tensor) -> Config:
    """Launch of the forward kernels for features like x."""
    return _narrow(_FORWARD.get(_generation(x), _FALLBACK), x)


def backward_config(x: torch.Tensor) -> Config:
    """Launch of the backward kernels for features like x."""
    return _narrow(_BACKWARD.get(_generation(x), _FALLBACK), x)


def _generation(x: torch.Tensor) -> int:
    return torch.cuda.get_device_capability(x.device)[0] if x.is_cuda else 0


def _narrow(config: Config, x: torch.Tensor) -> Config:
    """float32 takes twice the shared memory a feature."""
    if x.element_size() < 4:
        return config
    return Config(config.bk // 2, config.group, config.warps, config.stages, config.rows)
