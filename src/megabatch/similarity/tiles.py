"""The blocks of a matrix, as every reduction and backend computes them.

Each reduction has two classes of tiles, in torch operations (`eager`) and in Triton
kernels (`triton/`). They differ in how a block is computed; this file has what they share.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megabatch.similarity import states
from megabatch.similarity.arguments import accumulator_dtype
from megabatch.similarity.matrix import Matrix, narrow, strips

#: Rows that are widened at a time outside of the products.
STRIP = 4096


class Tiles:
    """The blocks of a matrix of x (m, d) against y (n, d).

    An *upstream* is the statistics of a side that dS depends on, None if there are none. On a rank
    it has the form that the tiles take, between ranks it is one tensor (k, rows).
    """

    matrix: Matrix
    x: Tensor
    y: Tensor
    m: int  #: rows of x; len(x) takes 1 us, and a step needs it often
    n: int  #: rows of y
    symmetric: bool  #: y is x: only the blocks on and above the diagonal are computed
    block_rows: int
    block_cols: int
    half_ds: bool  #: whether dS is stored in float16, so that its factors must fit
    #: Slices of at most `step` that cover range(n), from (n, step).
    divide: Callable[[int, int], Iterator[slice]] = staticmethod(strips)

    def row_blocks(self) -> Iterator[slice]:
        """Slices of the rows, one for each row of blocks."""
        return self.divide(self.m, self.block_rows)

    def col_blocks(self, i: slice) -> Iterator[slice]:
        """The columns of the blocks of rows `i`; if symmetric, those from the diagonal on."""
        for j in self.divide(self.n, self.block_cols):
            if not self.symmetric or j.start >= i.start:
                yield j

    def new_total(self, rows: int, features: Tensor) -> Tensor:
        """An accumulator for gradients of `rows` rows of x or y; zeros if no block writes to it."""
        shape, dtype = (rows, *features.shape[1:]), accumulator_dtype(features.dtype)
        if self.m == 0 or self.n == 0:
            return features.new_zeros(shape, dtype=dtype)
        return features.new_empty(shape, dtype=dtype)

    def gradient_block(self, i: slice, j: slice, rows: Any, cols: Any) -> Tensor | None:
        """dS of a block, valid until the next call; None if no gradient of features is wanted.

        `rows`, `cols`: the upstream of each side.
        """
        raise NotImplementedError

    def pack_upstream(self, upstream: Any) -> Tensor | None:
        """An upstream as one tensor (k, rows), which is sent with the columns."""
        packed: Tensor | None = upstream
        return packed

    def unpack_upstream(self, packed: Tensor | None) -> Any:
        """The upstream of a side from the tensor that was sent."""
        return packed

    def add_products(
        self,
        rows: Any,
        cols: Any,
        dx: Tensor | None,
        dy: Tensor | None,
        overwrite: tuple[bool, bool],
    ) -> None:
        """Add dS y of all rows to dx and dSᵀ x of all columns to dy.

        If symmetric, dx and dy are the same. `overwrite`: dx, dy are uninitialised.
        """
        if self.m == 0 or self.n == 0:  # no block writes them
            for total, new in zip((dx, dy), overwrite, strict=True):
                if new and total is not None:
                    total.zero_()
        for i in self.row_blocks():
            strip, first = None if dx is None else narrow(dx, i), overwrite[1] and i.start == 0
            self.add_strip(i, rows, cols, strip, dy, (overwrite[0], first))

    def add_strip(
        self,
        i: slice,
        rows: Any,
        cols: Any,
        dx: Tensor | None,
        dy: Tensor | None,
        overwrite: tuple[bool, bool],
    ) -> None:
        """Add the gradients of one strip of rows `i`: dx holds that strip, dy all columns."""
        for j in self.col_blocks(i):
            ds, first = self.gradient_block(i, j, rows, cols), overwrite[0] and j.start == 0
            if ds is not None:
                totals = dx, None if dy is None else narrow(dy, j)
                self.add_gradients(i, j, ds, totals, (first, overwrite[1]))

    def add_gradients(
        self,
        i: slice,
        j: slice,
        ds: Tensor,
        totals: tuple[Tensor | None, Tensor | None],
        overwrite: tuple[bool, bool],
    ) -> None:
        """Add a block's ds y and dsᵀ x to `totals`, of the rows `i` and of the columns `j`."""
        dx, dy = totals
        if dy is not None and not (self.symmetric and i == j):
            add_product(dy, ds.T, narrow(self.x, i), overwrite[1])
        if dx is not None:
            add_product(dx, ds, narrow(self.y, j), overwrite[0])

    def write_grad(
        self, total: Tensor, side: str, rows: slice, factor: Tensor, scale_grad: bool, out: Any
    ) -> Tensor | None:
        """out[rows] = factor * total in out's dtype; returns <features, total> if `scale_grad`.

        The product is that of the features without further ones for a bias.

        `total` belongs to these `rows` of the features of `side`, "x" or "y"; out: None if their
        gradient is not wanted.
        """
        features, width = (self.x if side == "x" else self.y)[rows], self.matrix.width or None
        part = None
        if scale_grad:
            part = row_dots(features[..., :width], total[..., :width], total.dtype)
        if out is not None:
            out[rows].copy_(total.mul_(factor))
        return part


class State(NamedTuple):
    """The running state of one side of a block, on the host and inside kernels: see `states`."""

    numbers: Any
    stride: Any
    is_first: Any  #: whether the block is the side's first one: `numbers` is uninitialised
    is_last: Any  #: whether it is the last one, which leaves the results


class StateTiles(Tiles):
    """Tiles of a reduction that keeps a running state for each row and each column: `states`."""

    numbers: states.Numbers
    forward_blocks: tuple[int, int]  #: rows and columns of a block of the forward pass

    def new_state(self, size: int) -> Tensor:
        """A state for `size` rows, (numbers, size), uninitialised."""
        return states.empty(self.numbers.state, size, self.x)

    def clear(self, state: Tensor) -> Tensor:
        """Set it to the state before any column; returns it."""
        state.zero_()
        for references in self.numbers.references:
            state[references] = -torch.inf
        return state

    def new_results(self, size: int) -> Tensor:
        """The results of `size` rows, (numbers, size), uninitialised."""
        return states.empty(self.numbers.results, size, self.x)

    def results(self, state: Tensor) -> Tensor:
        """The results, as the last block left them in a state."""
        return state[: self.numbers.results]

    def forward(
        self,
        rows: Tensor,
        cols: Tensor | None,
        overwrite: tuple[bool, bool],
        to_results: bool = False,
    ) -> None:
        """Merge all blocks into the states of the rows and, unless None, of the columns.

        If symmetric, the columns' state is the rows' and `cols` is None. `overwrite`: the rows',
        the columns' state is uninitialised. With `to_results` they become `results`.
        """
        for block in self.blocks_with_states(rows, cols, overwrite, to_results):
            self.forward_block(*block)

    def forward_block(self, i: slice, j: slice, rows: State, cols: State | None) -> None:
        """Merge one block into parts of the states."""
        raise NotImplementedError

    def blocks_with_states(
        self,
        rows: Tensor,
        cols: Tensor | None,
        overwrite: tuple[bool, bool],
        to_results: bool,
    ) -> Iterator[tuple[slice, slice, State, State | None]]:
        """The blocks of `forward`: rows, columns, and the part of both sides' states."""
        m, n, symmetric = self.m, self.n, self.symmetric
        if m == 0 or n == 0:  # no block writes them
            for state, new in zip((rows, cols), overwrite, strict=True):
                if new and state is not None:
                    self.clear(state)
                if to_results and state is not None:
                    self.write_results(state[None].clone(), self.results(state))
        height, width = self.forward_blocks
        for i, j in ((i, j) for i in strips(m, height) for j in strips(n, width)):
            if symmetric and j.start < i.start:
                continue
            # Above the diagonal, a block's columns are rows further down.
            mirrored = symmetric and i != j
            first, last = overwrite[0] and j.start == 0, to_results and j.stop == n
            row_state = State(narrow(rows, i, 1), rows.stride(0), int(first), int(last))
            col_state, other = None, rows if mirrored else cols
            if other is not None:
                first = overwrite[0 if symmetric else 1] and i.start == 0
                last = to_results and not mirrored and i.stop == m
                col_state = State(narrow(other, j, 1), other.stride(0), int(first), int(last))
            yield i, j, row_state, col_state

    def merge(self, parts: Tensor) -> Tensor:
        """Several states (k, ...) of the same rows as one."""
        return states.merge(parts)

    def write_results(self, parts: Tensor, out: Tensor) -> None:
        """Write the results of several states (k, ...) of the same rows to `out`."""
        states.write_results(parts[0] if len(parts) == 1 else states.merge(parts), out)

    def make_upstream(self, results: Tensor, gradient: Tensor) -> Any:
        """A side's upstream from its results and their upstream gradients."""
        return states.upstream(results, gradient)


# --- products -------------------------------------------------------------------------------------


def rounds_left(features: Tensor) -> bool:
    """Whether `add_product` rounds the left factor to the dtype of these, the right one."""
    return features.dtype != accumulator_dtype(features.dtype) and features.device.type == "cuda"


def add_product(total: Tensor, left: Tensor, right: Tensor, overwrite: bool = False) -> None:
    """total += left @ right in total's dtype; with `overwrite`, total = left @ right."""
    beta = 0 if overwrite else 1
    if rounds_left(right):
        half = left.to(right.dtype)
        torch.addmm(total, half, right, beta=beta, out_dtype=torch.float32, out=total)
    else:
        total.addmm_(left.to(total.dtype), right.to(total.dtype), beta=beta)


def row_dots(features: Tensor, gradient: Tensor, dtype: torch.dtype) -> Tensor:
    """<features, gradient>, a scalar of `dtype`, without a wider copy of the features."""
    total = gradient.new_zeros((), dtype=dtype)
    for i in strips(len(features), max(1, STRIP // math.prod(features.shape[1:-1]))):
        total += (features[i].to(gradient.dtype) * gradient[i]).sum()
    return total
