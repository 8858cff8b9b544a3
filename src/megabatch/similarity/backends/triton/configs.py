"""Tile shapes a kernel is compiled for, by GPU kind and width of the features.

First what `megabatch tune` found on this machine, then what was measured on such a GPU and is
written here, else what runs everywhere. Nothing is tuned on the way.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from megabatch.similarity.backends.triton import tuned
from megabatch.similarity.backends.triton.tuned import FEW_ROWS, Config
from megabatch.similarity.sweep import capability

#: Forward. Few rows: fewer to a program, so that all multiprocessors get some.
MANY, FEW = Config(rows=8, group=2), Config(rows=4, group=4)
#: Backward, by the features' width. The whole loss on one H200, b = 65,536: 46.4 against 47.3 ms at
#: d = 768, 30.7 against 30.3 ms at d = 512.
WIDE, NARROW = Config(group=32), Config(rows=8, group=2, split=2)


def forward_config(x: torch.Tensor) -> Config:
    """Launch of the forward kernels for features like x (m, d)."""
    return tuned.lookup("forward", x) or packaged_forward(x)


def backward_config(x: torch.Tensor) -> Config:
    """Launch of the backward kernels for features like x (m, d)."""
    return tuned.lookup("backward", x) or packaged_backward(x)


def packaged_forward(x: torch.Tensor) -> Config:
    """That of the forward kernels without anything tuned."""
    config = MANY if x.shape[0] >= FEW_ROWS else FEW
    if _generation(x) == 9:
        return _narrow(config, x)
    return _narrow(_elsewhere(config, x), x)


def packaged_backward(x: torch.Tensor) -> Config:
    """That of the backward kernels without anything tuned."""
    if _generation(x) == 9:
        return _narrow(WIDE if x.shape[1] > 640 else NARROW, x)
    return _narrow(_elsewhere(Config(), x), x)


def _elsewhere(config: Config, x: torch.Tensor) -> Config:
    """Not measured: compiled for sm_80 and sm_89, 4 warps spill 0.5 to 1 kB a thread, 8 hardly."""
    return replace(config, stages=2, warps=8 if _generation(x) < 9 else config.warps)


def _generation(x: torch.Tensor) -> int:
    return capability(x.device)[0] if x.is_cuda else 0


def _narrow(config: Config, x: torch.Tensor) -> Config:
    """float32 takes twice the shared memory a feature."""
    return config if x.element_size() < 4 else replace(config, bk=config.bk // 2)
