"""Ranks on one GPU: each row's target is found, and the others held against it, in tiles."""

from __future__ import annotations

from torch import Tensor

from megabatch.similarity.fused.configs import forward_config
from megabatch.similarity.fused.cuts import TILE, cdiv
from megabatch.similarity.fused.ranks import ranks
from megabatch.similarity.fused.sides import aligned, new_descriptor

#: Tiles of columns that a program goes through, and tiles of rows whose programs run together.
PART, GROUP = 8, 16


class FusedScores:
    """The scores of x (m, d) against columns as they come; see `ranking.Scores`."""

    def __init__(self, x: Tensor, ids: Tensor | None) -> None:
        self.x, self.ids = aligned(x), None if ids is None else ids.contiguous()
        self.config = forward_config(x)
        # Masks of a tile's ids spill from 4 warps' registers (sm_90: 168 bytes a thread).
        self.warps = self.config.warps if ids is None else 8

    def find(self, y: Tensor, target: Tensor, score: Tensor) -> None:
        """score[i] = row i's with its target, where `target` (m,) is one of these columns."""
        self._run(y, target, score, None, None, None)

    def count(
        self,
        y: Tensor,
        target: Tensor,
        score: Tensor,
        ids: Tensor | None,
        above: Tensor,
        equal: Tensor,
    ) -> None:
        """Add to `above` and `equal`, int64 (m,), how many columns score so; see `ranks`."""
        self._run(y, target, score, ids, above, equal)

    def _run(
        self,
        y: Tensor,
        target: Tensor,
        score: Tensor,
        ids: Tensor | None,
        above: Tensor | None,
        equal: Tensor | None,
    ) -> None:
        y, config = aligned(y), self.config
        target, ids = target.contiguous(), None if ids is None else ids.contiguous()
        (m, d), n = self.x.shape, len(y)
        if m == 0 or n == 0:
            return
        ranks[(cdiv(m, TILE) * cdiv(n, TILE * PART),)](
            new_descriptor(self.x, config.bk), new_descriptor(y, config.bk), target, score,
            above, equal, None if ids is None else self.ids, ids, m, n, d,
            BM=TILE, BN=TILE, BK=config.bk, PART=PART, GROUP=GROUP, FIND=above is None,
            IDS=ids is not None, num_warps=self.warps, num_stages=config.stages,
        )  # fmt: skip
