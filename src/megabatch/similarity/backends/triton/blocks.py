"""Log-sum-exps of one device's matrix by Triton kernels: the interface of `sweep.Blocks`.

States and pulls (a side's log-sum-exps with their upstream gradients) are laid out as `states`
documents, with a state's references in base 2.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import TypeAlias

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from megabatch.similarity.backends.triton import softmax_backward, softmax_forward
from megabatch.similarity.backends.triton.blocking import (
    TILE,
    block_shape,
    cdiv,
    parts,
    product_parts,
)
from megabatch.similarity.backends.triton.configs import backward_config, forward_config
from megabatch.similarity.backends.triton.operands import (
    Side,
    aligned,
    diagonal_of,
    new_descriptor,
    ranges_of,
)
from megabatch.similarity.backends.triton.tiles import NO_DIAGONAL
from megabatch.similarity.pairs import PAIRED, Pairs
from megabatch.similarity.states import clear_fresh, empty_state, finish
from megabatch.similarity.tile_torch import add_product

#: Largest difference of log2 log-sum-exps that share one exponential's reference.
SPREAD = 80.0
#: float16 holds dS from 2^-24 to 2^16: upstream gradients are scaled to this size. At most six of
#: them add up in one dS, and a probability of 1 / 4M is still a normal number.
HALF_SIZE = 4096.0
#: A side's state, whether this block is its first one, and whether it is its last one.
_State: TypeAlias = tuple[Tensor, bool, bool]


class FusedBlocks:
    """The blocks of x (m, d) against y (n, d) on one GPU; see `sweep.Blocks`."""

    #: A state's reference times this is a natural logarithm.
    unit = math.log(2)

    def __init__(self, x: Tensor, y: Tensor, pairs: Pairs, symmetric: bool, workspace: int) -> None:
        self.width = x.shape[1]
        self.x = aligned(x)
        self.y = self.x if y is x else aligned(y)
        self.pairs, self.symmetric = pairs, symmetric
        self.d = self.x.shape[1]
        self.features = x  #: as given, not padded
        self._descriptor_pairs: dict[int, tuple[TensorDescriptor, TensorDescriptor]] = {}
        self._ranges = ranges_of(pairs.row_ids), ranges_of(pairs.column_ids)
        matrix = len(self.x), len(self.y), self.width, x.element_size()
        self.rows, self.columns = block_shape(*matrix, symmetric, workspace)
        self._ds: Tensor | None = None

    def strips(self) -> Iterator[slice]:
        """The rows in parts, each for one call of `backward`."""
        return product_parts(len(self.x), self.rows)

    # --- forward ----------------------------------------------------------------------------

    def values(self, scale: Tensor, kinds: int, columns: bool) -> tuple[Tensor, Tensor | None]:
        """The results of the rows and, if wanted, of the columns, as the public functions return.

        Args:
            kinds: 1 if all pairs are negatives, 2 if some can be positive.
        """
        m, n = len(self.x), len(self.y)
        if m == 0 or n == 0:
            nothing = (finish(empty_state(size, kinds, self.x), self.unit) for size in (m, n))
            return next(nothing), next(nothing) if columns else None
        rows = self._empty(2 if kinds == 1 else 6, m)
        cols = self._empty(len(rows), n) if columns else None
        self._reduce(scale, rows, cols, (True, True), to_logsumexp=True)
        results = 1 if kinds == 1 else 4
        return rows[:results], None if cols is None else cols[:results]

    def forward(
        self,
        scale: Tensor,
        rows: Tensor,
        cols: Tensor | None,
        overwrite: tuple[bool, bool] = (False, False),
    ) -> None:
        """Merge all blocks into the states of the rows and, unless None, of the columns.

        Args:
            overwrite: whether the state of the rows, of the columns holds nothing yet. It is
                cleared if there are no blocks to write it.
        """
        if len(self.x) and len(self.y):
            self._reduce(scale, rows, cols, overwrite, to_logsumexp=False)
        else:
            clear_fresh(rows, cols, overwrite)

    def _reduce(
        self,
        scale: Tensor,
        rows: Tensor,
        cols: Tensor | None,
        overwrite: tuple[bool, bool],
        to_logsumexp: bool,
    ) -> None:
        """`forward`; with `to_logsumexp` the last block turns a state into results, in place."""
        m, n = len(self.x), len(self.y)
        # The forward pass's workspace is one sum per tile and row: larger blocks fit.
        step = self.rows if self.symmetric else 2 * self.rows
        for i, j in ((i, j) for i in parts(m, step) for j in parts(n, step)):
            if self.symmetric and j.start < i.start:
                continue
            # Above the diagonal, a block's columns are rows further down.
            mirrored = self.symmetric and i != j
            other = rows if mirrored else cols
            overwrite_other = overwrite[0 if self.symmetric else 1]
            first = overwrite[0] and j.start == 0, overwrite_other and i.start == 0
            last = to_logsumexp and j.stop == n, to_logsumexp and not mirrored and i.stop == m
            row_state = rows[:, i], first[0], last[0]
            col_state = None if other is None else (other[:, j], first[1], last[1])
            self._forward_block(i, j, scale, row_state, col_state)

    def _forward_block(
        self, i: slice, j: slice, scale: Tensor, rows: _State, cols: _State | None
    ) -> None:
        m, n = i.stop - i.start, j.stop - j.start
        pairs, config = self.pairs.view(i, j), forward_config(self.features)
        triangle = self.symmetric and i == j
        group_rows = config.rows * TILE
        groups, tiles = cdiv(m, group_rows), cdiv(n, TILE)
        references, group_references = self._empty(groups * group_rows), self._empty(groups)
        row_sums, col_sums = self._empty(tiles, m), self._empty(groups, n)
        diagonal = diagonal_of(pairs) if pairs.crosses_diagonal(m, n) else NO_DIAGONAL
        offset = pairs.column_start - pairs.row_start
        xd, yd = self._descriptors(config.bk)
        row_ranges, col_ranges = (r.view(s) for r, s in zip(self._ranges, (i, j), strict=True))
        ids, ceiling = pairs.row_ids is not None, pairs.ceiling is not None
        softmax_forward.reference.launch(
            groups * config.rows, x=xd, y=self.y, y_stride=self.y.stride(0), scale=scale,
            out=references, row_ids=pairs.row_ids, col_ids=pairs.column_ids, ceiling=pairs.ceiling,
            row_start=i.start, col_start=j.start, m=m, n=n, d=self.d, diagonal_offset=offset,
            BM=TILE, BN=TILE, BK=config.bk, DIAGONAL=diagonal != NO_DIAGONAL, IDS=ids,
            CEILING=ceiling, num_warps=config.warps, num_stages=config.stages,
        )  # fmt: skip
        # The last column tile has a launch of its own if it reaches past the end: a mask in all
        # tiles costs 4%.
        whole = n // TILE
        for first, count, even in ((0, whole, True), (whole, tiles - whole, False)):
            if count:
                softmax_forward.unmasked_tiles.launch(
                    groups * count, x=xd, y=yd, scale=scale, references=references,
                    group_references=group_references, row_sums=row_sums, col_sums=col_sums,
                    row_ranges=row_ranges.values, row_range_stride=row_ranges.stride,
                    col_ranges=col_ranges.values, col_range_stride=col_ranges.stride,
                    ceiling=pairs.ceiling, row_start=i.start, col_start=j.start,
                    m=m, n=n, d=self.d, first_col_tile=first, col_tiles=count,
                    diagonal_offset=offset,
                    BM=TILE, BN=TILE, BK=config.bk, ROW_TILES=config.rows, GROUP=config.group,
                    DIAGONAL=diagonal != NO_DIAGONAL, IDS=ids, CEILING=ceiling,
                    COLS=triangle or cols is not None, EVEN_N=even, TRIANGLE=triangle,
                    num_warps=config.warps, num_stages=config.stages,
                )  # fmt: skip
        row_state, row_is_first, row_is_last = rows
        col_state, col_is_first, col_is_last = rows if cols is None else cols
        programs = cdiv(m, TILE) + (0 if cols is None else tiles)
        softmax_forward.combine_partials.launch(
            programs, x=xd, y=yd, scale=scale,
            row_sums=row_sums, references=references, row_partials=tiles, row_state=row_state,
            row_state_stride=row_state.stride(0), row_is_first=int(row_is_first),
            row_is_last=int(row_is_last),
            col_sums=col_sums, group_references=group_references, col_partials=groups,
            col_state=col_state, col_state_stride=col_state.stride(0),
            col_is_first=int(col_is_first), col_is_last=int(col_is_last),
            row_ids=pairs.row_ids, row_ranges=row_ranges.values, row_range_stride=row_ranges.stride,
            col_ids=pairs.column_ids, col_ranges=col_ranges.values,
            col_range_stride=col_ranges.stride,
            ceiling=pairs.ceiling, row_start=i.start, col_start=j.start, m=m, n=n, d=self.d,
            diagonal_offset=offset,
            GROUP_ROWS=group_rows, P=64, B=TILE, BK=config.bk, DIAGONAL=diagonal, IDS=ids,
            PAIRED=pairs.diagonal == PAIRED, CEILING=ceiling, HAS_POSITIVES=len(row_state) == 6,
            TRIANGLE=triangle, num_warps=8, num_stages=config.stages,
        )  # fmt: skip

    def merged(self, states: Tensor) -> Tensor:
        """Several states (k, ...) of the same rows as one."""
        return softmax_forward.merged(states)

    def results(self, states: Tensor, out: Tensor) -> None:
        """out = the results of several states (k, ...) of the same rows."""
        softmax_forward.merged_logsumexp(states, out)

    # --- backward ---------------------------------------------------------------------------

    def side(self, pull: Tensor | None) -> Side:
        """The operand of `backward` for a side whose pull came from elsewhere."""
        return Side.of(pull, self.x)

    def pull(self, values: Tensor, gradient: Tensor) -> Side:
        """The operand of `backward` for a side, from its results and their upstream gradients."""
        if gradient.stride(1) != 1:
            gradient = gradient.contiguous()
        has_positives, size = len(values) > 1, values.shape[1]
        out = values.new_empty(5 if has_positives else 2, size)
        extremes = values.new_empty(2, cdiv(size, TILE))
        tiles = extremes.shape[1]
        if tiles:
            softmax_backward.lse_and_grad.launch(
                tiles, results=values, result_stride=values.stride(0), gradients=gradient,
                gradient_stride=gradient.stride(0), out=out, extremes=extremes, size=size,
                tiles=tiles, B=TILE, HAS_POSITIVES=has_positives,
            )  # fmt: skip
        return Side(True, out, extremes, size, tiles, has_positives)

    def backward(
        self,
        i: slice,
        scale: Tensor,
        rows: Side | Tensor | None,
        cols: Side | Tensor | None,
        dx: Tensor | None,
        dy: Tensor | None,
        overwrite: tuple[bool, bool] = (False, False),
        deferred: list[Callable[[], None]] | None = None,
    ) -> None:
        """Add the gradients of one strip of rows `i`: dx holds that strip, dy all columns.

        With `symmetric`, dx and dy are views of one gradient of all rows, and `cols` is `rows`.

        Args:
            overwrite: whether dx, dy hold nothing yet (`buffer`).
            deferred: gets the last product of dx, which the caller must call before the next strip.
                None: the product is computed here.
        """
        row_side, col_side = Side.of(rows, scale), Side.of(cols, scale)
        for j in product_parts(len(self.y), self.columns):
            if self.symmetric and j.start < i.start:
                continue
            ds = self._gradient_block(i, j, scale, row_side.view(i), col_side.view(j))
            if dy is not None and not (self.symmetric and i == j):
                add_product(dy[j], ds.T, self.x[i], overwrite[1])
            if dx is not None:
                self._add_to_dx(dx, ds, j, overwrite[0], deferred)

    def _add_to_dx(
        self,
        dx: Tensor,
        ds: Tensor,
        j: slice,
        overwrite: bool,
        deferred: list[Callable[[], None]] | None,
    ) -> None:
        """dx += dS y of the columns `j`; the last columns' product goes to `deferred`, if any."""
        product = partial(add_product, dx, ds, self.y[j], overwrite and j.start == 0)
        if deferred is None or j.stop < len(self.y):
            product()
        else:
            deferred.append(product)

    def _gradient_block(self, i: slice, j: slice, scale: Tensor, rows: Side, cols: Side) -> Tensor:
        """dS (m, n) of one block, in the features' dtype, in the workspace."""
        m, n = i.stop - i.start, j.stop - j.start
        pairs, config = self.pairs.view(i, j), backward_config(self.features)
        ds = self._workspace(m, n)
        tiles, col_tiles = cdiv(m, TILE), cdiv(n, TILE)
        xd, yd = self._descriptors(config.bk)
        row_ranges, col_ranges = (r.view(s) for r, s in zip(self._ranges, (i, j), strict=True))
        triangle = self.symmetric and i == j
        # Triton 3.6 does not compile a loop over several rows of tiles with a store in a branch.
        row_tiles = 1 if triangle else config.rows
        whole = new_descriptor(ds, TILE)
        if rows.wanted:
            pieces = whole if config.split == 1 else new_descriptor(ds, TILE // config.split)
            softmax_backward.unmasked_tiles.launch(
                cdiv(tiles, row_tiles) * col_tiles, x=xd, y=yd, ds=pieces, scale=scale,
                row_lse_and_grad=rows.pull, row_stride=rows.stride,
                col_lse_and_grad=cols.pull, col_stride=cols.stride,
                ceiling=pairs.ceiling, row_start=i.start, col_start=j.start, m=m, n=n, d=self.d,
                BM=TILE, BN=TILE, BK=config.bk, ROW_TILES=row_tiles, GROUP=config.group,
                SPLIT=config.split, COLS=cols.wanted, CEILING=pairs.ceiling is not None,
                TRIANGLE=triangle, num_warps=config.warps, num_stages=config.stages,
            )  # fmt: skip
        chunk = 64 if rows.wanted else 1
        softmax_backward.masked_tiles.launch(
            cdiv(tiles * col_tiles, chunk), x=xd, y=yd, ds=whole, scale=scale,
            row_lse_and_grad=rows.pull, row_stride=rows.stride,
            col_lse_and_grad=cols.pull, col_stride=cols.stride,
            row_extremes=rows.extremes, row_tiles=rows.tiles,
            col_extremes=cols.extremes, col_tiles=cols.tiles,
            row_ids=pairs.row_ids, row_ranges=row_ranges.values, row_range_stride=row_ranges.stride,
            col_ids=pairs.column_ids, col_ranges=col_ranges.values,
            col_range_stride=col_ranges.stride,
            ceiling=pairs.ceiling, row_start=i.start, col_start=j.start, m=m, n=n, d=self.d,
            diagonal_offset=pairs.column_start - pairs.row_start,
            BM=TILE, BN=TILE, BK=config.bk, CHUNK=chunk, ALL=not rows.wanted, ROWS=rows.wanted,
            COLS=cols.wanted,
            DIAGONAL=diagonal_of(pairs) if pairs.crosses_diagonal(m, n) else NO_DIAGONAL,
            IDS=pairs.row_ids is not None, PAIRED=pairs.diagonal == PAIRED,
            CEILING=pairs.ceiling is not None,
            HAS_POSITIVES=rows.has_positives or cols.has_positives,
            LIMIT=SPREAD, num_warps=8, num_stages=config.stages,
        )  # fmt: skip
        return ds

    def _workspace(self, m: int, n: int) -> Tensor:
        stride = cdiv(n, 64) * 64  # rows that a descriptor and a fast product can take
        if self._ds is None or self._ds.numel() < m * stride:
            self._ds = None  # free the smaller one first
            self._ds = self.x.new_empty(m * stride)
        return self._ds[: m * stride].view(m, stride)[:, :n]

    # --- around the sweep -------------------------------------------------------------------

    def _empty(self, *shape: int) -> Tensor:
        return self.x.new_empty(shape, dtype=torch.float32)

    def _descriptors(self, columns: int) -> tuple[TensorDescriptor, TensorDescriptor]:
        # Made once, not per launch, and on demand: there are none of an empty shard.
        if columns not in self._descriptor_pairs:
            pair = new_descriptor(self.x, columns), new_descriptor(self.y, columns)
            self._descriptor_pairs[columns] = pair
        return self._descriptor_pairs[columns]

    def accumulator(self, rows: int) -> Tensor:
        """Zeros for the gradients of `rows` rows."""
        return self.x.new_zeros((rows, self.d), dtype=torch.float32)

    def buffer(self, rows: int) -> Tensor:
        """Room for the gradients of `rows` rows, to be overwritten; zeros if no block writes it."""
        if len(self.x) == 0 or len(self.y) == 0:
            return self.accumulator(rows)
        return self.x.new_empty((rows, self.d), dtype=torch.float32)

    def prepare(self, rows: Side | Tensor | None, cols: Side | Tensor | None) -> Tensor | None:
        """Rescale upstream gradients in place to fit float16; return the factor that undoes it."""
        if self.x.dtype != torch.float16:
            return None
        sides = [p.pull if isinstance(p, Side) else p for p in (rows, cols)]
        some = [p for p in sides if p is not None and p.numel()]
        parts = [p[1::2].abs().amax() for p in some]
        parts += [p[4].abs().amax() for p in some if len(p) == 5]
        if not parts:
            return None
        size = torch.stack(parts).amax()
        size = torch.where(size == 0, torch.ones_like(size), size) / HALF_SIZE
        for p in sides:
            if p is not None:
                p[1::2] /= size
                p[4:] /= size
        return size

    def finish(
        self,
        total: Tensor,
        side: str,
        rows: slice,
        factor: Tensor,
        with_scale: bool,
        out: Tensor | None,
    ) -> Tensor | None:
        """out = factor * total in out's dtype; returns <features, total> if `with_scale`.

        `total` is the accumulated product of these `rows` of the features of `side`, "x" or "y".
        """
        features = (self.x if side == "x" else self.y)[rows]
        size, d = len(features), self.width
        block = 16
        # The gradient of features that are stored by columns is stored so too.
        target = out if out is None or out.stride(1) == 1 else out.new_empty(out.shape)
        parts = total.new_empty(cdiv(size, block))
        if size:
            softmax_backward.write_grad.launch(
                cdiv(size, block), total=total, features=features,
                out=total if target is None else target, factor=factor, scale_grad_parts=parts,
                rows=size, d=d, total_stride=total.stride(0), feature_stride=features.stride(0),
                out_stride=0 if target is None else target.stride(0),
                B=block, BD=128, SCALE_GRAD=with_scale, WRITE=out is not None,
            )  # fmt: skip
        if out is not None and target is not None and target is not out:
            out.copy_(target)
        return parts.sum() if with_scale else None
