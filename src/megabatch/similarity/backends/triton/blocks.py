"""One device with fused kernels: the same interface as `sweep.Blocks`, far fewer launches.

States and pulls are laid out as `states` documents, with a state's references in base 2.
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
#: float16 holds dS from 2^-24 to 2^16: upstream gradients are brought to this size. At most six
#: terms of it meet in one dS, and a probability of 1 / 4M still is a normal number.
HALF_SIZE = 4096.0
#: one side's state, whether this block is its first, and whether it is its last
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
        self.features = x  #: as they came
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
        """What the public functions return of the rows and, if wanted, of the columns."""
        m, n = len(self.x), len(self.y)
        if m == 0 or n == 0:
            nothing = (finish(empty_state(size, kinds, self.x), self.unit) for size in (m, n))
            return next(nothing), next(nothing) if columns else None
        near = self._empty(2 if kinds == 1 else 6, m)
        far = self._empty(len(near), n) if columns else None
        self._sweep(scale, near, far, (True, True), last=True)
        results = 1 if kinds == 1 else 4
        return near[:results], None if far is None else far[:results]

    def forward(
        self,
        scale: Tensor,
        rows: Tensor,
        columns: Tensor | None,
        fresh: tuple[bool, bool] = (False, False),
    ) -> None:
        """Merge all blocks into the states of the rows and, unless None, of the columns.

        `fresh`: the rows', the columns' state holds nothing yet. (What has no columns, or no rows,
        is cleared: nothing else would be written.)
        """
        if len(self.x) and len(self.y):
            self._sweep(scale, rows, columns, fresh, last=False)
        else:
            clear_fresh(rows, columns, fresh)

    def _sweep(
        self,
        scale: Tensor,
        rows: Tensor,
        columns: Tensor | None,
        fresh: tuple[bool, bool],
        last: bool,
    ) -> None:
        """With `last` states end as results."""
        m, n = len(self.x), len(self.y)
        # The forward's workspace is one sum a tile and row: larger blocks fit.
        step = self.rows if self.symmetric else 2 * self.rows
        for i, j in ((i, j) for i in parts(m, step) for j in parts(n, step)):
            if self.symmetric and j.start < i.start:
                continue
            # Above the diagonal, a block's columns are rows further down.
            mirrored = self.symmetric and i != j
            other = rows if mirrored else columns
            new = fresh[0 if self.symmetric else 1]
            start = fresh[0] and j.start == 0, new and i.start == 0
            end = last and j.stop == n, last and not mirrored and i.stop == m
            near = rows[:, i], start[0], end[0]
            far = None if other is None else (other[:, j], start[1], end[1])
            self._forward_block(i, j, scale, near, far)

    def _forward_block(
        self, i: slice, j: slice, scale: Tensor, rows: _State, columns: _State | None
    ) -> None:
        m, n = i.stop - i.start, j.stop - j.start
        pairs, config = self.pairs.view(i, j), forward_config(self.features)
        triangle = self.symmetric and i == j
        size = config.rows * TILE
        groups, tiles = cdiv(m, size), cdiv(n, TILE)
        references, tops = self._empty(groups * size), self._empty(groups)
        row_sums, column_sums = self._empty(tiles, m), self._empty(groups, n)
        diagonal = diagonal_of(pairs) if pairs.crosses_diagonal(m, n) else NO_DIAGONAL
        offset = pairs.column_start - pairs.row_start
        xd, yd = self._descriptors(config.bk)
        near, far = (r.view(s) for r, s in zip(self._ranges, (i, j), strict=True))
        ids, ceiling = pairs.row_ids is not None, pairs.ceiling is not None
        softmax_forward.reference.launch(
            groups * config.rows, x=xd, y=self.y, y_stride=self.y.stride(0), scale=scale,
            out=references, row_ids=pairs.row_ids, column_ids=pairs.column_ids,
            ceiling=pairs.ceiling, row_start=i.start, column_start=j.start, m=m, n=n, d=self.d,
            diagonal_offset=offset,
            BM=TILE, BN=TILE, BK=config.bk, DIAGONAL=diagonal != NO_DIAGONAL, IDS=ids,
            CEILING=ceiling, num_warps=config.warps, num_stages=config.stages,
        )  # fmt: skip
        # The last column tile apart where it reaches past the end: a mask costs the others 4%.
        whole = n // TILE
        for first, count, even in ((0, whole, True), (whole, tiles - whole, False)):
            if count:
                softmax_forward.tile.launch(
                    groups * count, x=xd, y=yd, scale=scale, references=references, tops=tops,
                    row_sums=row_sums, column_sums=column_sums,
                    row_ranges=near.values, row_range_stride=near.stride,
                    column_ranges=far.values, column_range_stride=far.stride,
                    ceiling=pairs.ceiling, row_start=i.start, column_start=j.start,
                    m=m, n=n, d=self.d, first_column_tile=first, column_tiles=count,
                    diagonal_offset=offset,
                    BM=TILE, BN=TILE, BK=config.bk, R=config.rows, GROUP=config.group,
                    DIAGONAL=diagonal != NO_DIAGONAL, IDS=ids, CEILING=ceiling,
                    COLUMNS=triangle or columns is not None, EVEN=even, TRIANGLE=triangle,
                    num_warps=config.warps, num_stages=config.stages,
                )  # fmt: skip
        state, begins, ends = rows
        other, other_begins, other_ends = rows if columns is None else columns
        programs = cdiv(m, TILE) + (0 if columns is None else tiles)
        softmax_forward.settle.launch(
            programs, x=xd, y=yd, scale=scale,
            row_sums=row_sums, references=references, row_parts=tiles, row_state=state,
            row_state_stride=state.stride(0), row_first=int(begins), row_last=int(ends),
            column_sums=column_sums, tops=tops, column_parts=groups, column_state=other,
            column_state_stride=other.stride(0), column_first=int(other_begins),
            column_last=int(other_ends),
            row_ids=pairs.row_ids, row_ranges=near.values, row_range_stride=near.stride,
            column_ids=pairs.column_ids, column_ranges=far.values, column_range_stride=far.stride,
            ceiling=pairs.ceiling, row_start=i.start, column_start=j.start, m=m, n=n, d=self.d,
            diagonal_offset=offset,
            SIZE=size, P=64, B=TILE, BK=config.bk, DIAGONAL=diagonal, IDS=ids,
            OWN=pairs.diagonal == PAIRED, CEILING=ceiling, POSITIVES=len(state) == 6,
            TRIANGLE=triangle, num_warps=8, num_stages=config.stages,
        )  # fmt: skip

    def merged(self, states: Tensor) -> Tensor:
        """Several states (k, ...) of the same rows as one."""
        return softmax_forward.merged(states)

    def results(self, states: Tensor, out: Tensor) -> None:
        """out = what the public functions return of several states (k, ...) of the same rows."""
        softmax_forward.results(states, out)

    # --- backward ---------------------------------------------------------------------------

    def side(self, pull: Tensor | None) -> Side:
        """What `backward` takes of a side whose pull came from elsewhere."""
        return Side.of(pull, self.x)

    def pull(self, values: Tensor, gradient: Tensor) -> Side:
        """What `backward` takes of a side whose `values` got this upstream gradient."""
        if gradient.stride(1) != 1:
            gradient = gradient.contiguous()
        kinds, size = 1 if len(values) == 1 else 2, values.shape[1]
        pull = values.new_empty(2 if kinds == 1 else 5, size)
        extremes = values.new_empty(2, cdiv(size, TILE))
        tiles = extremes.shape[1]
        if tiles:
            softmax_backward.pull.launch(
                tiles, values=values, value_stride=values.stride(0), gradients=gradient,
                gradient_stride=gradient.stride(0), out=pull, extremes_out=extremes, size=size,
                tiles=tiles, B=TILE, KINDS=kinds,
            )  # fmt: skip
        return Side(True, pull, extremes, size, tiles, kinds == 2)

    def backward(
        self,
        i: slice,
        scale: Tensor,
        rows: Side | Tensor | None,
        columns: Side | Tensor | None,
        dx: Tensor | None,
        dy: Tensor | None,
        fresh: tuple[bool, bool] = (False, False),
        later: list[Callable[[], None]] | None = None,
    ) -> None:
        """Add the gradients of one strip of rows `i`: dx holds that strip, dy all columns.

        With `symmetric`, dx and dy are views of one gradient of all rows, `columns` is `rows`.
        `fresh`: dx, dy hold nothing yet (`buffer`). `later` gets dx's last product, which is then
        for the caller to make, before the next strip; None: it is made here.
        """
        near, far = Side.of(rows, scale), Side.of(columns, scale)
        for j in product_parts(len(self.y), self.columns):
            if self.symmetric and j.start < i.start:
                continue
            ds = self._gradient_block(i, j, scale, near.view(i), far.view(j))
            if dy is not None and not (self.symmetric and i == j):
                add_product(dy[j], ds.T, self.x[i], fresh[1])
            if dx is not None:
                self._add_to_dx(dx, ds, j, fresh[0], later)

    def _add_to_dx(
        self,
        dx: Tensor,
        ds: Tensor,
        j: slice,
        fresh: bool,
        later: list[Callable[[], None]] | None,
    ) -> None:
        """dx += dS y of the columns `j`; of the last ones by `later`, where it is given."""
        product = partial(add_product, dx, ds, self.y[j], fresh and j.start == 0)
        if later is None or j.stop < len(self.y):
            product()
        else:
            later.append(product)

    def _gradient_block(
        self, i: slice, j: slice, scale: Tensor, rows: Side, columns: Side
    ) -> Tensor:
        """dS (m, n) of one block, in the features' dtype, in the workspace."""
        m, n = i.stop - i.start, j.stop - j.start
        pairs, config = self.pairs.view(i, j), backward_config(self.features)
        ds = self._workspace(m, n)
        tiles, column_tiles = cdiv(m, TILE), cdiv(n, TILE)
        xd, yd = self._descriptors(config.bk)
        near, far = (r.view(s) for r, s in zip(self._ranges, (i, j), strict=True))
        triangle = self.symmetric and i == j
        # Triton 3.6 does not compile a loop over several rows of tiles with a store in a branch.
        size = 1 if triangle else config.rows
        whole = new_descriptor(ds, TILE)
        if rows.wanted:
            pieces = whole if config.split == 1 else new_descriptor(ds, TILE // config.split)
            softmax_backward.tile.launch(
                cdiv(tiles, size) * column_tiles, x=xd, y=yd, ds=pieces, scale=scale,
                row_pull=rows.pull, row_stride=rows.stride,
                column_pull=columns.pull, column_stride=columns.stride,
                ceiling=pairs.ceiling, row_start=i.start, column_start=j.start, m=m, n=n, d=self.d,
                BM=TILE, BN=TILE, BK=config.bk, R=size, GROUP=config.group, SPLIT=config.split,
                COLUMNS=columns.wanted, CEILING=pairs.ceiling is not None, TRIANGLE=triangle,
                num_warps=config.warps, num_stages=config.stages,
            )  # fmt: skip
        chunk = 64 if rows.wanted else 1
        softmax_backward.exact.launch(
            cdiv(tiles * column_tiles, chunk), x=xd, y=yd, ds=whole, scale=scale,
            row_pull=rows.pull, row_stride=rows.stride,
            column_pull=columns.pull, column_stride=columns.stride,
            row_extremes=rows.extremes, row_tiles=rows.tiles,
            column_extremes=columns.extremes, column_tiles=columns.tiles,
            row_ids=pairs.row_ids, row_ranges=near.values, row_range_stride=near.stride,
            column_ids=pairs.column_ids, column_ranges=far.values, column_range_stride=far.stride,
            ceiling=pairs.ceiling, row_start=i.start, column_start=j.start, m=m, n=n, d=self.d,
            diagonal_offset=pairs.column_start - pairs.row_start,
            BM=TILE, BN=TILE, BK=config.bk, CHUNK=chunk, ALL=not rows.wanted, ROWS=rows.wanted,
            COLUMNS=columns.wanted,
            DIAGONAL=diagonal_of(pairs) if pairs.crosses_diagonal(m, n) else NO_DIAGONAL,
            IDS=pairs.row_ids is not None, OWN=pairs.diagonal == PAIRED,
            CEILING=pairs.ceiling is not None, POSITIVES=rows.positives or columns.positives,
            LIMIT=SPREAD, num_warps=8, num_stages=config.stages,
        )  # fmt: skip
        return ds

    def _workspace(self, m: int, n: int) -> Tensor:
        stride = cdiv(n, 64) * 64  # rows that a descriptor and a fast product can take
        if self._ds is None or self._ds.numel() < m * stride:
            self._ds = None  # the memory of one suffices
            self._ds = self.x.new_empty(m * stride)
        return self._ds[: m * stride].view(m, stride)[:, :n]

    # --- around the sweep -------------------------------------------------------------------

    def _empty(self, *shape: int) -> Tensor:
        return self.x.new_empty(shape, dtype=torch.float32)

    def _descriptors(self, columns: int) -> tuple[TensorDescriptor, TensorDescriptor]:
        # Made once and not for each launch; there are none of an empty shard.
        if columns not in self._descriptor_pairs:
            pair = new_descriptor(self.x, columns), new_descriptor(self.y, columns)
            self._descriptor_pairs[columns] = pair
        return self._descriptor_pairs[columns]

    def accumulator(self, rows: int) -> Tensor:
        """Zeros for the gradients of `rows` rows."""
        return self.x.new_zeros((rows, self.d), dtype=torch.float32)

    def buffer(self, rows: int) -> Tensor:
        """Where the gradients of `rows` rows add up from a `fresh` start; zeros if none comes."""
        if len(self.x) == 0 or len(self.y) == 0:
            return self.accumulator(rows)
        return self.x.new_empty((rows, self.d), dtype=torch.float32)

    def prepare(self, near: Side | Tensor | None, far: Side | Tensor | None) -> Tensor | None:
        """Bring pulls into dS's range, in place; returns what gradients are to be multiplied by."""
        if self.x.dtype != torch.float16:
            return None
        rows, columns = (p.pull if isinstance(p, Side) else p for p in (near, far))
        some = [p for p in (rows, columns) if p is not None and p.numel()]
        parts = [p[1::2].abs().amax() for p in some]
        parts += [p[4].abs().amax() for p in some if len(p) == 5]
        if not parts:
            return None
        size = torch.stack(parts).amax()
        size = torch.where(size == 0, torch.ones_like(size), size) / HALF_SIZE
        for p in (rows, columns):
            if p is not None:
                p[1::2] /= size
                p[4:] /= size
        return size

    def finish(
        self, total: Tensor, side: str, rows: slice, factor: Tensor, inner: bool, out: Tensor | None
    ) -> Tensor | None:
        """out = factor * total in out's dtype; <features, total> if `inner` is wanted.

        `total` belongs to these `rows` of the features of `side`, "x" or "y".
        """
        features = (self.x if side == "x" else self.y)[rows]
        size, d = len(features), self.width
        block = 16
        # The gradient of features that are stored by columns is stored so too.
        target = out if out is None or out.stride(1) == 1 else out.new_empty(out.shape)
        parts = total.new_empty(cdiv(size, block))
        if size:
            softmax_backward.finish.launch(
                cdiv(size, block), total=total, features=features,
                out=total if target is None else target, factor=factor, inner=parts, rows=size, d=d,
                total_stride=total.stride(0), feature_stride=features.stride(0),
                out_stride=0 if target is None else target.stride(0),
                B=block, BD=128, INNER=inner, OUT=out is not None,
            )  # fmt: skip
        if out is not None and target is not None and target is not out:
            out.copy_(target)
        return parts.sum() if inner else None
