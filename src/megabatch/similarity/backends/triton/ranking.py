"""Ranks and the best columns on one GPU, in tiles.

Ranks: each row's target is found, and the others held against it. The best: a block of scores is
written with the largest of each 128 columns, and only the k chunks that have the largest of those
are selected from. torch's selection goes over all that it is given several times.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from megabatch.similarity import sweep
from megabatch.similarity.backends.triton.configs import forward_config
from megabatch.similarity.backends.triton.cuts import TILE, cdiv, parts
from megabatch.similarity.backends.triton.ranks import ranks, scores
from megabatch.similarity.backends.triton.sides import aligned, new_descriptor

#: Tiles of columns that a program goes through, and tiles of rows whose programs run together.
PART, GROUP = 8, 16
#: Columns of a block of scores: the more, the smaller the share of them that is selected from.
WIDEST = 65_536


class FusedScores:
    """The scores of x (m, d) against columns as they come; see `ranking.Scores`."""

    def __init__(self, x: Tensor, ids: Tensor | None) -> None:
        self.x, self.ids = aligned(x), None if ids is None else ids.contiguous()
        self.config = forward_config(x)
        # Masks of a tile's ids spill from 4 warps' registers (sm_90: 150 bytes a thread).
        self.warps = self.config.warps if ids is None else 8

    def find(self, y: Tensor, target: Tensor, score: Tensor) -> None:
        """score[i] = row i's with its target, where `target` (m,) is one of these columns."""
        self.count(y, target, score, None, None, None)

    def count(
        self,
        y: Tensor,
        target: Tensor,
        score: Tensor,
        ids: Tensor | None,
        above: Tensor | None,
        equal: Tensor | None,
    ) -> None:
        """Add to `above` and `equal`, int64 (m,), how many columns score so; see `ranks`.

        Both None: `find`, by the same kernel.
        """
        y, config = aligned(y), self.config
        target, ids = target.contiguous(), None if ids is None else ids.contiguous()
        (m, d), n = self.x.shape, len(y)
        if m == 0 or n == 0:
            return
        ranks.launch(
            cdiv(m, TILE) * cdiv(n, TILE * PART),
            x=new_descriptor(self.x, config.bk), y=new_descriptor(y, config.bk),
            target=target, score=score, above=above, equal=equal,
            row_ids=None if ids is None else self.ids, column_ids=ids, m=m, n=n, d=d,
            BM=TILE, BN=TILE, BK=config.bk, PART=PART, GROUP=GROUP, FIND=above is None,
            IDS=ids is not None, num_warps=self.warps, num_stages=config.stages,
        )  # fmt: skip

    def best(self, y: Tensor, ids: Tensor | None, k: int) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """Part after part: its rows, the best scores and whose they are; see `ranking.Scores`."""
        y, config = aligned(y), self.config
        ids = None if ids is None else ids.contiguous()
        (m, d), n = self.x.shape, len(y)
        if m == 0 or n == 0:
            return
        out = self.x.new_empty(_block(m, n, sweep.workspace(self.x)), dtype=torch.float32)
        tops = out.new_empty(len(out), out.shape[1] // TILE)
        xd, yd = new_descriptor(self.x, config.bk), new_descriptor(y, config.bk)
        for i in parts(m, len(out)):
            for j in parts(n, out.shape[1]):
                rows, columns = i.stop - i.start, j.stop - j.start
                tiles = cdiv(columns, TILE)
                scores.launch(
                    cdiv(rows, TILE) * tiles, x=xd, y=yd, out=out, tops=tops,
                    row_ids=None if ids is None else self.ids, column_ids=ids,
                    row_start=i.start, column_start=j.start, m=rows, n=columns, d=d,
                    out_stride=out.stride(0), tops_stride=tops.stride(0),
                    BM=TILE, BN=TILE, BK=config.bk, GROUP=GROUP, IDS=ids is not None,
                    num_warps=8, num_stages=config.stages,  # 4 spill 1.4 kB by Triton 3.6
                )  # fmt: skip
                block = out[:rows, : tiles * TILE], tops[:rows, :tiles]
                value, column = _best(*block, min(k, columns))
                yield i, value, column + j.start


def _block(m: int, n: int, workspace: int) -> tuple[int, int]:
    """Rows and columns of a block of scores; a quarter of the workspace is the selection's."""
    columns = min(cdiv(n, TILE) * TILE, WIDEST)
    rows = workspace * 3 // 4 // (4 * columns * TILE) * TILE
    return min(max(TILE, rows), m), columns


def _best(s: Tensor, tops: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """`s.topk(k, dim=1)` of scores (m, n) whose tiles' largest are `tops` (m, n / TILE)."""
    if 4 * k * TILE > s.shape[1]:
        value, column = s.topk(k, dim=1)
        return value, column
    chunks = tops.topk(k, dim=1).indices
    kept = s.unflatten(1, (-1, TILE)).gather(1, chunks[:, :, None].expand(-1, -1, TILE)).flatten(1)
    value, at = kept.topk(k, dim=1)
    return value, chunks.gather(1, at // TILE) * TILE + at % TILE
