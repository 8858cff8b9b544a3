"""Ranks and the best columns on one GPU, tile by tile.

Ranks: one kernel first finds each row's target and its score, then counts the columns above it.
The best columns: a kernel writes a block of scores and the largest of each 128 columns. A row's k
best are in the k chunks whose largest are; only those are given to torch's `topk`, which passes
over its input several times.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton.language as tl
from torch import Tensor

from megabatch.similarity import settings
from megabatch.similarity.matrix import Side, strips
from megabatch.similarity.triton.blocking import TILE, cdiv
from megabatch.similarity.triton.blocks import aligned, new_descriptor
from megabatch.similarity.triton.configs import launch_config
from megabatch.similarity.triton.launch import kernel
from megabatch.similarity.triton.tiles import B, BlockSide, logits_tile, mask_tile, swizzle

#: Column tiles per program of `ranks`, and row tiles whose programs run together.
COL_TILES, GROUP = 8, 16
#: Columns of a block of scores: in a wider block, `topk` sees a smaller share of them.
WIDEST = 65_536


class FusedScores:
    """The scores of rows against chunks of columns; see `ranking.Scores`."""

    def __init__(self, rows: Side) -> None:
        self._rows, self._m = _contiguous(rows), len(rows.features)
        self.config = launch_config("forward", rows.features)
        # Masks of a tile's ids spill from 4 warps' registers (sm_90: 150 bytes a thread).
        self.warps = self.config.warps if rows.ids is None else 8

    def find(self, cols: Side, target: Tensor, score: Tensor) -> None:
        """Write row i's score of its target to score[i] if target[i] is one of these columns."""
        self._launch(cols._replace(ids=None), target, score, None, None)

    def count(self, cols: Side, target: Tensor, score: Tensor, counts: Tensor) -> None:
        """Add to `counts` (2, m), int64, how many columns score above and equal; see `ranks`."""
        self._launch(cols, target, score, *counts)

    def _launch(
        self, cols: Side, target: Tensor, score: Tensor, above: Tensor | None, equal: Tensor | None
    ) -> None:
        """`count`, or `find` by the same kernel."""
        (x, row_ids, *_), (y, col_ids, *_), config = self._rows, _contiguous(cols), self.config
        n = len(y)
        if self._m and n:
            ranks.launch(
                cdiv(self._m, TILE) * cdiv(n, TILE * COL_TILES),
                x=new_descriptor(x, config.bk), y=new_descriptor(y, config.bk),
                target=target.contiguous(), score=score, above=above, equal=equal,
                row_ids=None if col_ids is None else row_ids, col_ids=col_ids,
                m=self._m, n=n, d=x.shape[1], BK=config.bk, COL_TILES=COL_TILES, GROUP=GROUP,
                num_warps=self.warps, num_stages=config.stages,
            )  # fmt: skip

    def best(self, cols: Side, k: int) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """Yield (rows, scores, columns) of the best, part by part; see `ranking.Scores`."""
        (x, row_ids, *_), (y, col_ids, *_), bk = self._rows, _contiguous(cols), self.config.bk
        m, n = self._m, len(y)
        if m == 0 or n == 0:
            return
        out = x.new_empty(_block(m, n, settings.workspace(x)), dtype=torch.float32)
        tops = out.new_empty(len(out), out.shape[1] // TILE)
        xd, yd = new_descriptor(x, bk), new_descriptor(y, bk)
        for i in strips(m, len(out)):
            for j in strips(n, out.shape[1]):
                rows, columns = i.stop - i.start, j.stop - j.start
                tiles = cdiv(columns, TILE)
                scores.launch(
                    cdiv(rows, TILE) * tiles, x=xd, y=yd, out=out, tops=tops,
                    row_ids=None if col_ids is None else row_ids, col_ids=col_ids,
                    row_start=i.start, col_start=j.start, m=rows, n=columns, d=x.shape[1],
                    out_stride=out.stride(0), tops_stride=tops.stride(0), BK=bk, GROUP=GROUP,
                    num_warps=8, num_stages=self.config.stages,  # 4 spill 1.4 kB by Triton 3.6
                )  # fmt: skip
                block = out[:rows, : tiles * TILE], tops[:rows, :tiles]
                value, column = _best(*block, min(k, columns))
                yield i, value, column + j.start


def _contiguous(side: Side) -> Side:
    """The side's features and ids as kernels take them."""
    return Side(aligned(side.features), None if side.ids is None else side.ids.contiguous())


def _block(m: int, n: int, workspace: int) -> tuple[int, int]:
    """Rows and columns of a block of scores; the selection gets a quarter of the workspace."""
    columns = min(cdiv(n, TILE) * TILE, WIDEST)
    rows = workspace * 3 // 4 // (4 * columns * TILE) * TILE
    return min(max(TILE, rows), m), columns


def _best(s: Tensor, tops: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """`s.topk(k, dim=1)` of scores (m, n) whose tiles' largest are `tops` (m, n / TILE)."""
    if 4 * k * TILE > s.shape[1]:
        value, column = s.topk(k, dim=1)
        return value, column
    chunks = tops.topk(k, dim=1).indices
    index = chunks[:, :, None].expand(-1, -1, TILE)
    candidates = s.unflatten(1, (-1, TILE)).gather(1, index).flatten(1)
    value, at = candidates.topk(k, dim=1)
    return value, chunks.gather(1, at // TILE) * TILE + at % TILE


@kernel
def ranks(
    x, y, target, score, above, equal, row_ids, col_ids, m, n, d,
    BK: tl.constexpr, COL_TILES: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Add to `above` and `equal` the other columns with higher and with equal scores.

    above None: instead, score[i] = x[i] @ y[target[i]], if that is a column. One kernel does both,
    so that a target's score is bit for bit the one in its tile when columns are counted. Counts are
    integers: their sums do not depend on the order of the programs.
    """
    rows = BlockSide(x, None, 0, m, row_ids, None, None, None)
    cols = BlockSide(y, None, 0, n, col_ids, None, None, None)
    ti, part = swizzle(tl.program_id(0), tl.cdiv(m, B), tl.cdiv(n, B * COL_TILES), GROUP)
    i = ti * B + tl.arange(0, B)
    targets = tl.load(target + i, mask=i < m, other=-1)
    first = part * COL_TILES
    last = tl.minimum(first + COL_TILES, tl.cdiv(n, B))
    if above is None:  # loop from the tile of the first to that of the last target of these rows
        here = (targets >= first * B) & (targets < tl.minimum(last * B, n))
        low = tl.min(tl.where(here, targets // B, last), 0)
        last = (tl.max(tl.where(here, targets // B, first - 1), 0) + 1).to(tl.int32)
        first = low.to(tl.int32)
    else:
        own = tl.load(score + i, mask=i < m, other=0.0)
        higher = tl.zeros((B,), tl.int32)
        ties = tl.zeros((B,), tl.int32)
    for tj in tl.range(first, last):
        s = logits_tile(rows, cols, ti, tj, d, BK)
        j = tj * B + tl.arange(0, B)
        is_target = targets[:, None] == j[None, :]
        if above is None:
            found = tl.sum(tl.where(is_target, s, 0.0), 1)
            inside = (targets >= tj * B) & (targets < tl.minimum(tj * B + B, n))
            tl.store(score + i, found, mask=inside)
        else:
            negative, _ = mask_tile(s, rows, cols, ti, tj, 0, None, 0, False, 0)
            counted = negative & ~is_target
            # Not s > own: a row whose target's score is NaN counts every column as above.
            higher += tl.sum((counted & ~(s <= own[:, None])).to(tl.int32), 1)
            ties += tl.sum((counted & (s == own[:, None])).to(tl.int32), 1)
    if above is not None:
        tl.atomic_add(above + i, higher.to(tl.int64), mask=i < m, sem="relaxed")
        tl.atomic_add(equal + i, ties.to(tl.int64), mask=i < m, sem="relaxed")


@kernel
def scores(
    x, y, out, tops, row_ids, col_ids, row_start, col_start, m, n, d, out_stride, tops_stride,
    BK: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """out = x @ y.T of a block of m rows and n columns; tops[i, tile] = largest of row i there.

    Pairs of equal ids get -inf, and so do columns past n, up to a whole tile. A NaN is inf in
    `tops`, so that a selection by them finds it.
    """
    if row_ids is not None:
        row_ids += row_start
        col_ids += col_start
    rows = BlockSide(x, None, row_start, m, row_ids, None, None, None)
    cols = BlockSide(y, None, col_start, n, col_ids, None, None, None)
    ti, tj = swizzle(tl.program_id(0), tl.cdiv(m, B), tl.cdiv(n, B), GROUP)
    i = ti * B + tl.arange(0, B)
    j = tj * B + tl.arange(0, B)
    s = logits_tile(rows, cols, ti, tj, d, BK)
    negative, _ = mask_tile(s, rows, cols, ti, tj, 0, None, 0, False, 0)
    s = tl.where(negative, s, float("-inf"))
    place = i.to(tl.int64)
    tl.store(out + (place * out_stride)[:, None] + j[None, :], s, mask=(i < m)[:, None])
    largest = tl.max(tl.where(s != s, float("inf"), s), 1)
    tl.store(tops + place * tops_stride + tj, largest, mask=i < m)
