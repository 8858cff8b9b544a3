"""Log-sum-exps of one device's matrix, by the kernels of `softmax_forward` and its neighbours.

States are laid out as `states` documents, with references in base 2.
"""

from __future__ import annotations

from torch import Tensor

from megabatch.similarity import states
from megabatch.similarity.matrix import Matrix
from megabatch.similarity.tiles import State, StateTiles
from megabatch.similarity.triton import softmax_backward, softmax_forward
from megabatch.similarity.triton.blocking import TILE, cdiv
from megabatch.similarity.triton.blocks import (
    KernelTiles,
    Upstream,
    by_last_tile,
    new_descriptor,
)
from megabatch.similarity.triton.configs import launch_config
from megabatch.similarity.triton.gradients import scale_rows


class SoftmaxKernelTiles(StateTiles, KernelTiles):
    """Tiles whose upstream is an `Upstream`."""

    def __init__(self, matrix: Matrix, scale: Tensor) -> None:
        rows = matrix.rows
        if rows.ceiling is not None:
            matrix = matrix._replace(rows=rows._replace(ceiling=rows.ceiling.contiguous()))
        super().__init__(matrix, scale)
        self.numbers = states.SPLIT if matrix.has_positives else states.NEGATIVES
        # The forward pass's workspace is one sum per tile and row: larger blocks fit.
        step = self.block_rows if self.symmetric else 2 * self.block_rows
        self.forward_blocks = step, step

    # --- forward ----------------------------------------------------------------------------

    def forward(
        self,
        rows: Tensor,
        cols: Tensor | None,
        overwrite: tuple[bool, bool],
        to_results: bool = False,
    ) -> None:
        for block in self.blocks_with_states(rows, cols, overwrite, to_results):
            self._forward_block(*block)

    def _forward_block(self, i: slice, j: slice, rows: State, cols: State | None) -> None:
        config = launch_config("forward", self.features)
        block = self._block(i, j, config.bk)
        block.set_states(rows, cols)
        m, n = block.m, block.n
        triangle = self.symmetric and i == j
        group_rows = config.rows * TILE
        groups, tiles = cdiv(m, group_rows), cdiv(n, TILE)
        references, group_references = self._empty(groups * group_rows), self._empty(groups)
        row_sums, col_sums = self._empty(tiles, m), self._empty(groups, n)
        guide_cols = None if self._guide is None else self._guide.y
        softmax_forward.reference.launch(
            groups * config.rows, block, out=references, cols=self.y, cols_stride=self.y.stride(0),
            guide_cols=guide_cols,
            guide_cols_stride=0 if guide_cols is None else guide_cols.stride(0),
            num_warps=config.warps, num_stages=config.stages,
        )  # fmt: skip
        for first, count, even in by_last_tile(n):
            softmax_forward.unmasked_tiles.launch(
                groups * count, block, references=references, group_references=group_references,
                row_sums=row_sums, col_sums=col_sums, first_col_tile=first, col_tiles=count,
                ROW_TILES=config.rows, GROUP=config.group, COLS=triangle or cols is not None,
                EVEN_N=even, TRIANGLE=triangle, num_warps=config.warps, num_stages=config.stages,
            )  # fmt: skip
        softmax_forward.combine_partials.launch(
            cdiv(m, TILE) + (0 if cols is None else tiles), block, row_sums=row_sums,
            references=references, row_partials=tiles, col_sums=col_sums,
            group_references=group_references, col_partials=groups, GROUP_ROWS=group_rows,
            TRIANGLE=triangle, num_warps=8, num_stages=config.stages,
        )  # fmt: skip

    def merge(self, parts: Tensor) -> Tensor:
        out = parts.new_empty(parts.shape[1:])
        softmax_forward.merge(parts, out, to_logsumexp=False)
        return out

    def write_results(self, parts: Tensor, out: Tensor) -> None:
        softmax_forward.merge(parts, out, to_logsumexp=True)

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
                tiles=tiles, HAS_POSITIVES=has_positives,
            )  # fmt: skip
        return Upstream(out, size, extremes, tiles)

    def unpack_upstream(self, packed: Tensor | None) -> Upstream | None:
        return None if packed is None else Upstream.of(packed)

    def pack_upstream(self, upstream: Upstream | None) -> Tensor | None:
        return None if upstream is None else upstream.packed

    def gradient_block(
        self, i: slice, j: slice, rows: Upstream | None, cols: Upstream | None
    ) -> Tensor:
        config, ds = launch_config("backward", self.features), self._workspace(i, j)
        block = self._block(i, j, config.bk)
        block.set_upstreams(rows and rows.view(i), cols and cols.view(j))
        tiles, col_tiles = cdiv(block.m, TILE), cdiv(block.n, TILE)
        triangle = self.symmetric and i == j
        # Triton 3.6 does not compile a loop over several rows of tiles with a store in a branch.
        row_tiles = 1 if triangle else config.rows
        whole = new_descriptor(ds, TILE)
        if rows is not None:
            pieces = whole if config.split == 1 else new_descriptor(ds, TILE // config.split)
            softmax_backward.unmasked_tiles.launch(
                cdiv(tiles, row_tiles) * col_tiles, block, ds=pieces, ROW_TILES=row_tiles,
                GROUP=config.group, SPLIT=config.split, TRIANGLE=triangle,
                num_warps=config.warps, num_stages=config.stages,
            )  # fmt: skip
        chunk = 1 if rows is None else 64
        softmax_backward.masked_tiles.launch(
            cdiv(tiles * col_tiles, chunk), block, ds=whole, CHUNK=chunk,
            num_warps=8, num_stages=config.stages,
        )  # fmt: skip
        return ds

    def write_grad(
        self,
        total: Tensor,
        side: str,
        rows: slice,
        factor: Tensor,
        scale_grad: bool,
        out: Tensor | None,
    ) -> Tensor | None:
        out = None if out is None else out[rows]
        # The gradient of features that are stored by columns is stored so too.
        target = out if out is None or out.stride(1) == 1 else out.new_empty(out.shape)
        features = (self.x if side == "x" else self.y)[rows] if scale_grad else None
        parts = scale_rows(total, target, factor, self.width, features=features)
        if out is not None and target is not None and target is not out:
            out.copy_(target)
        return None if parts is None else parts.sum()
