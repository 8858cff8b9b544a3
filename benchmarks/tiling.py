"""The time that tiling costs CLIP's loss on one GPU, and what one sweep for both directions saves.

    python benchmarks/tiling.py --output benchmarks/results/tiling.json   # --list: the plan

ClipLoss in workspaces of several sizes, which its blocks of the matrix fill; a loss for each
direction, which sweeps twice; and the dense loss under torch.compile, whose only block is the
matrix. The options are those of single_gpu.py.
"""

from __future__ import annotations

from collections.abc import Iterator

import single_gpu
from machinery.family import TILING
from machinery.group import Group
from single_gpu import beside, case

#: Contenders without the matrix: in each workspace, and in two sweeps.
TILED = tuple(name for name in TILING.contenders if name != "dense-compiled")


def groups() -> Iterator[Group]:
    """The groups to measure, the most important first."""
    for b in (65_536, 16_384):
        yield beside(case(b, loss=TILING.name), (*TILED, "dense-compiled"))
    yield beside(case(65_536, 512, loss=TILING.name), TILED)
    yield beside(case(65_536, 1024, loss=TILING.name), TILED)


def main() -> None:
    single_gpu.main(groups, __file__, __doc__ or "", "benchmarks/results/tiling.json")


if __name__ == "__main__":
    main()
