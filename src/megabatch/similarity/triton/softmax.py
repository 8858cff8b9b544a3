"""Log-sum-exps of one device's matrix, by the kernels of `softmax_forward` and its neighbours.

States are laid out as `states` documents, with references in base 2.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeAlias

import torch
from torch import Tensor

from megabatch.similarity import states
from megabatch.similarity.matrix import PAIRED, Matrix
from megabatch.similarity.slices import strips
from megabatch.similarity.states import SoftmaxStates
from megabatch.similarity.triton import softmax_backward, softmax_combine, softmax_forward
from megabatch.similarity.triton.blocking import TILE, cdiv
from megabatch.similarity.triton.blocks import KernelTiles, diagonal_in
from megabatch.similarity.triton.configs import backward_config, forward_config
from megabatch.similarity.triton.operands import (
    GuideOperands,
    Upstream,
    aligned,
    new_descriptor,
)
from megabatch.similarity.triton.tiles import NO_DIAGONAL

#: Largest difference of log2 log-sum-exps that share one exponential's reference.
SPREAD = 80.0
#: A side's state, whether this block is its first one, and whether it is its last one.
State: TypeAlias = tuple[Tensor, bool, bool]


class SoftmaxKernelTiles(SoftmaxStates, KernelTiles):
    """See `sweep.StateTiles`; an upstream is an `Upstream`."""

    def __init__(self, matrix: Matrix, scale: Tensor) -> None:
        rows, cols = matrix.rows, matrix.cols
        if rows.ceiling is not None:
            matrix = matrix._replace(rows=rows._replace(ceiling=rows.ceiling.contiguous()))
        super().__init__(matrix)
        self.scale = scale
        self._no_upstream = Upstream.absent(scale)
        self._guide: tuple[Tensor, Tensor] | None = None
        if rows.guide is not None and cols.guide is not None:
            self._guide = aligned(rows.guide), aligned(cols.guide)
        self._guides: dict[int, GuideOperands] = {}

    def _guide_operands(self, bk: int) -> GuideOperands:
        """For products of `bk` features of x a step, in no more shared memory."""
        if self._guide is None:
            return GuideOperands()
        if bk not in self._guides:  # made on demand, as `_descriptors` are
            guide_bk = max(16, bk * self.x.element_size() // self._guide[1].element_size())
            self._guides[bk] = GuideOperands.of(*self._guide, guide_bk)
        return self._guides[bk]

    # --- forward ----------------------------------------------------------------------------

    @property
    def _results(self) -> int:
        """Numbers of a row's results."""
        return 4 if self.matrix.has_positives else 1

    def results(self, state: Tensor) -> Tensor:
        return state[: self._results]  # as the last block left them

    def forward(
        self,
        rows: Tensor,
        cols: Tensor | None,
        overwrite: tuple[bool, bool],
        to_results: bool = False,
    ) -> None:
        for i, j, row_state, col_state in self._blocks(rows, cols, overwrite, to_results):
            self._forward_block(i, j, row_state, col_state)
        if self.m == 0 or self.n == 0:
            self._without_pairs(rows, cols, overwrite, to_results)

    def _without_pairs(
        self, rows: Tensor, cols: Tensor | None, overwrite: tuple[bool, bool], to_results: bool
    ) -> None:
        """The states that no block writes."""
        for state, new in zip((rows, cols), overwrite, strict=True):
            if new and state is not None:
                self.clear(state)
            if to_results and state is not None:
                self.write_results(state[None].clone(), self.results(state))

    def _blocks(
        self, rows: Tensor, cols: Tensor | None, overwrite: tuple[bool, bool], to_results: bool
    ) -> Iterator[tuple[slice, slice, State, State | None]]:
        """The blocks, and the states that each adds to.

        With `to_results` the last block turns a state into results, in place.
        """
        m, n = self.m, self.n
        # The forward pass's workspace is one sum per tile and row: larger blocks fit.
        step = self.block_rows if self.symmetric else 2 * self.block_rows
        for i, j in ((i, j) for i in strips(m, step) for j in strips(n, step)):
            if self.symmetric and j.start < i.start:
                continue
            # Above the diagonal, a block's columns are rows further down.
            mirrored = self.symmetric and i != j
            other = rows if mirrored else cols
            overwrite_other = overwrite[0 if self.symmetric else 1]
            first = overwrite[0] and j.start == 0, overwrite_other and i.start == 0
            last = to_results and j.stop == n, to_results and not mirrored and i.stop == m
            row_state = rows[:, i], first[0], last[0]
            col_state = None if other is None else (other[:, j], first[1], last[1])
            yield i, j, row_state, col_state

    def _forward_block(self, i: slice, j: slice, rows: State, cols: State | None) -> None:
        m, n = i.stop - i.start, j.stop - j.start
        block, config = self.matrix.view(i, j), forward_config(self.features)
        triangle = self.symmetric and i == j
        group_rows = config.rows * TILE
        groups, tiles = cdiv(m, group_rows), cdiv(n, TILE)
        references, group_references = self._empty(groups * group_rows), self._empty(groups)
        row_sums, col_sums = self._empty(tiles, m), self._empty(groups, n)
        diagonal, offset = diagonal_in(block), block.col_start - block.row_start
        row_ids, col_ids, ceiling = block.rows.ids, block.cols.ids, block.rows.ceiling
        xd, yd = self._descriptors(config.bk)
        row_ranges, col_ranges = self._id_ranges(i, j)
        ids, has_ceiling = row_ids is not None, ceiling is not None
        guide, guided = self._guide_operands(config.bk), self._guide is not None
        softmax_forward.reference.launch(
            groups * config.rows, x=xd, y=self.y, y_stride=self.y.stride(0), scale=self.scale,
            out=references, row_ids=row_ids, col_ids=col_ids, ceiling=ceiling,
            guide_x=guide.x, guide_y=guide.cols, guide_stride=guide.stride, guide_d=guide.d,
            row_start=i.start, col_start=j.start, m=m, n=n, d=self.d, diagonal_offset=offset,
            BM=TILE, BN=TILE, BK=config.bk, DIAGONAL=diagonal != NO_DIAGONAL, IDS=ids,
            CEILING=has_ceiling, GUIDE=guided, GUIDE_BK=guide.bk,
            num_warps=config.warps, num_stages=config.stages,
        )  # fmt: skip
        # The last column tile has a launch of its own if it reaches past the end: a mask in all
        # tiles costs 4%.
        whole = n // TILE
        for first, count, even in ((0, whole, True), (whole, tiles - whole, False)):
            if count:
                softmax_forward.unmasked_tiles.launch(
                    groups * count, x=xd, y=yd, scale=self.scale, references=references,
                    group_references=group_references, row_sums=row_sums, col_sums=col_sums,
                    row_ranges=row_ranges.values, row_range_stride=row_ranges.stride,
                    col_ranges=col_ranges.values, col_range_stride=col_ranges.stride,
                    ceiling=ceiling, guide_x=guide.x, guide_y=guide.y, guide_d=guide.d,
                    row_start=i.start, col_start=j.start,
                    m=m, n=n, d=self.d, first_col_tile=first, col_tiles=count,
                    diagonal_offset=offset,
                    BM=TILE, BN=TILE, BK=config.bk, ROW_TILES=config.rows, GROUP=config.group,
                    DIAGONAL=diagonal != NO_DIAGONAL, IDS=ids, CEILING=has_ceiling,
                    GUIDE=guided, GUIDE_BK=guide.bk,
                    COLS=triangle or cols is not None, EVEN_N=even, TRIANGLE=triangle,
                    num_warps=config.warps, num_stages=config.stages,
                )  # fmt: skip
        row_state, row_is_first, row_is_last = rows
        col_state, col_is_first, col_is_last = rows if cols is None else cols
        programs = cdiv(m, TILE) + (0 if cols is None else tiles)
        softmax_combine.combine_partials.launch(
            programs, x=xd, y=yd, scale=self.scale,
            row_sums=row_sums, references=references, row_partials=tiles, row_state=row_state,
            row_state_stride=row_state.stride(0), row_is_first=int(row_is_first),
            row_is_last=int(row_is_last),
            col_sums=col_sums, group_references=group_references, col_partials=groups,
            col_state=col_state, col_state_stride=col_state.stride(0),
            col_is_first=int(col_is_first), col_is_last=int(col_is_last),
            row_ids=row_ids, row_ranges=row_ranges.values, row_range_stride=row_ranges.stride,
            col_ids=col_ids, col_ranges=col_ranges.values,
            col_range_stride=col_ranges.stride,
            ceiling=ceiling, guide_x=guide.x, guide_y=guide.y, guide_d=guide.d,
            row_start=i.start, col_start=j.start, m=m, n=n, d=self.d, diagonal_offset=offset,
            GROUP_ROWS=group_rows, P=64, B=TILE, BK=config.bk, DIAGONAL=diagonal, IDS=ids,
            PAIRED=block.diagonal == PAIRED, CEILING=has_ceiling, GUIDE=guided, GUIDE_BK=guide.bk,
            HAS_POSITIVES=len(row_state) == 6, TRIANGLE=triangle,
            num_warps=8, num_stages=config.stages,
        )  # fmt: skip

    def merge(self, parts: Tensor) -> Tensor:
        return softmax_combine.merged(parts)

    def write_results(self, parts: Tensor, out: Tensor) -> None:
        softmax_combine.merged_logsumexp(parts, out)

    # --- backward ---------------------------------------------------------------------------

    def make_upstream(self, results: Tensor, gradient: Tensor) -> Upstream:
        if gradient.stride(1) != 1:
            gradient = gradient.contiguous()
        has_positives, size = len(results) > 1, results.shape[1]
        out = results.new_empty(5 if has_positives else 2, size)
        extremes = results.new_empty(2, cdiv(size, TILE))
        tiles = extremes.shape[1]
        if tiles:
            softmax_backward.lse_and_grad.launch(
                tiles, results=results, result_stride=results.stride(0), gradients=gradient,
                gradient_stride=gradient.stride(0), out=out, extremes=extremes, size=size,
                tiles=tiles, B=TILE, HAS_POSITIVES=has_positives,
            )  # fmt: skip
        return Upstream(True, out, extremes, size, tiles, has_positives)

    def unpack_upstream(self, packed: Tensor | None) -> Upstream | None:
        return None if packed is None else Upstream.of(packed)

    def pack_upstream(self, upstream: Upstream | None) -> Tensor | None:
        return None if upstream is None else upstream.packed

    def upstream_divisor(self, rows: Upstream | None, cols: Upstream | None) -> Tensor | None:
        if self.x.dtype != torch.float16:
            return None
        return states.upstream_divisor([side.packed for side in (rows, cols) if side is not None])

    def gradient_block(
        self, i: slice, j: slice, rows: Upstream | None, cols: Upstream | None
    ) -> Tensor:
        rows = self._no_upstream if rows is None else rows.view(i)
        cols = self._no_upstream if cols is None else cols.view(j)
        m, n = i.stop - i.start, j.stop - j.start
        block, config = self.matrix.view(i, j), backward_config(self.features)
        guide, guided = self._guide_operands(config.bk), self._guide is not None
        row_ids, col_ids, ceiling = block.rows.ids, block.cols.ids, block.rows.ceiling
        ds = self._workspace(i, j)
        tiles, col_tiles = cdiv(m, TILE), cdiv(n, TILE)
        xd, yd = self._descriptors(config.bk)
        row_ranges, col_ranges = self._id_ranges(i, j)
        triangle = self.symmetric and i == j
        # Triton 3.6 does not compile a loop over several rows of tiles with a store in a branch.
        row_tiles = 1 if triangle else config.rows
        whole = new_descriptor(ds, TILE)
        if rows.wanted:
            pieces = whole if config.split == 1 else new_descriptor(ds, TILE // config.split)
            softmax_backward.unmasked_tiles.launch(
                cdiv(tiles, row_tiles) * col_tiles, x=xd, y=yd, ds=pieces, scale=self.scale,
                row_lse_and_grad=rows.packed, row_stride=rows.stride,
                col_lse_and_grad=cols.packed, col_stride=cols.stride,
                ceiling=ceiling, guide_x=guide.x, guide_y=guide.y, guide_d=guide.d,
                row_start=i.start, col_start=j.start, m=m, n=n, d=self.d,
                BM=TILE, BN=TILE, BK=config.bk, ROW_TILES=row_tiles, GROUP=config.group,
                SPLIT=config.split, COLS=cols.wanted, CEILING=ceiling is not None,
                GUIDE=guided, GUIDE_BK=guide.bk,
                TRIANGLE=triangle, num_warps=config.warps, num_stages=config.stages,
            )  # fmt: skip
        chunk = 64 if rows.wanted else 1
        softmax_backward.masked_tiles.launch(
            cdiv(tiles * col_tiles, chunk), x=xd, y=yd, ds=whole, scale=self.scale,
            row_lse_and_grad=rows.packed, row_stride=rows.stride,
            col_lse_and_grad=cols.packed, col_stride=cols.stride,
            row_extremes=rows.extremes, row_tiles=rows.tiles,
            col_extremes=cols.extremes, col_tiles=cols.tiles,
            row_ids=row_ids, row_ranges=row_ranges.values, row_range_stride=row_ranges.stride,
            col_ids=col_ids, col_ranges=col_ranges.values,
            col_range_stride=col_ranges.stride,
            ceiling=ceiling, guide_x=guide.x, guide_y=guide.y, guide_d=guide.d,
            row_start=i.start, col_start=j.start, m=m, n=n, d=self.d,
            diagonal_offset=block.col_start - block.row_start,
            BM=TILE, BN=TILE, BK=config.bk, CHUNK=chunk, ALL=not rows.wanted, ROWS=rows.wanted,
            COLS=cols.wanted,
            DIAGONAL=diagonal_in(block),
            IDS=row_ids is not None, PAIRED=block.diagonal == PAIRED,
            CEILING=ceiling is not None, GUIDE=guided, GUIDE_BK=guide.bk,
            HAS_POSITIVES=rows.has_positives or cols.has_positives,
            LIMIT=SPREAD, num_warps=8, num_stages=config.stages,
        )  # fmt: skip
        return ds

    def write_grad(
        self,
        total: Tensor,
        side: str,
        rows: slice,
        factor: Tensor,
        scale_grad_part: bool,
        out: Tensor | None,
    ) -> Tensor | None:
        features = (self.x if side == "x" else self.y)[rows]
        size, d = len(features), self.width
        per_program = 16
        # The gradient of features that are stored by columns is stored so too.
        target = out if out is None or out.stride(1) == 1 else out.new_empty(out.shape)
        parts = total.new_empty(cdiv(size, per_program))
        if size:
            softmax_backward.write_grad.launch(
                cdiv(size, per_program), total=total, features=features,
                out=total if target is None else target, factor=factor, scale_grad_parts=parts,
                rows=size, d=d, total_stride=total.stride(0), feature_stride=features.stride(0),
                out_stride=0 if target is None else target.stride(0),
                B=per_program, BD=128, SCALE_GRAD=scale_grad_part, WRITE=out is not None,
            )  # fmt: skip
        if out is not None and target is not None and target is not out:
            out.copy_(target)
        return parts.sum() if scale_grad_part else None
