"""Launch configurations of the kernels, by generation of GPUs and rows of the features.

No call tunes anything; `benchmarks/tune.py` searches for faster ones on a GPU.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

import torch

from megabatch.similarity.backends import capability

#: With fewer rows, programs must take fewer tiles each, so that all multiprocessors get some.
FEW_ROWS = 8192


@dataclass(frozen=True)
class Config:
    """The launch configuration of one kernel."""

    rows: int = 1  #: row tiles per program of the forward pass, one after another
    group: int = 8  #: programs' row tiles that stay in the L2 cache while columns pass
    bk: int = 64  #: features per step of a tile's product
    warps: int = 4
    stages: int = 3


#: (kernel, generation of GPUs, whether rows are many) of packaged configurations; 0: any. The first
#: line that fits holds. Other GPUs than Hopper's (9) have not been measured.
PACKAGED = (
    (("forward", 0, 1), Config(rows=8, group=2)),
    (("forward", 0, 0), Config(rows=4, group=4)),
    (("backward", 9, 0), Config(group=32)),
    (("backward", 0, 0), Config()),
    (("sigmoid", 9, 0), Config(group=32)),
    (("sigmoid", 0, 0), Config()),
    # The accumulators of two tiles take the registers of eight warps.
    (("soft_targets", 9, 0), Config(group=32, warps=8)),
    (("soft_targets_backward", 9, 0), Config(group=32, warps=8, stages=4)),
    (("soft_targets", 0, 0), Config(group=32, warps=8, bk=32)),  # 99 KiB of shared memory
    (("soft_targets_backward", 0, 0), Config(group=32, warps=8, bk=32)),
)


#: Configurations by kernel that come before the packaged ones, for tests and `benchmarks/tune.py`.
overrides: dict[str, Config] = {}


def launch_config(kernel: str, x: torch.Tensor) -> Config:
    """Configuration of a kernel, as `PACKAGED` names it, for features like x (m, d)."""
    if kernel in overrides:
        return overrides[kernel]
    generation = capability(x.device)[0] if x.is_cuda else 0
    return _packaged(kernel, generation, x.shape[0] >= FEW_ROWS, x.element_size())


@functools.cache  # a search of the table would take as long as the launch
def _packaged(kernel: str, generation: int, many: bool, item: int) -> Config:
    config = next(
        config
        for (name, gpus, many_rows), config in PACKAGED
        if name == kernel and gpus in (0, generation) and many >= many_rows
    )
    if generation != 9:
        # Compiled for sm_80 and sm_89, 4 warps spill 0.5 to 1 kB a thread.
        config = replace(config, stages=2, warps=8 if generation < 9 else config.warps)
    # float32 takes twice the shared memory per feature.
    return config if item < 4 else replace(config, bk=config.bk // 2)
