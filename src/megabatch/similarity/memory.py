"""Estimates of the memory that a reduction takes while it runs, besides its inputs and results.

The planner runs a loss on fake tensors and calls each operator's `workspace`. A test compares the
estimates with records of real runs (tests/planning/test_loss.py).
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from megabatch.similarity import eager, tiles
from megabatch.similarity.arguments import accumulator_dtype
from megabatch.similarity.distributed.schedule import columns_for, most_sharing, round_rows
from megabatch.similarity.triton.blocking import block_shape, padded


class Run(NamedTuple):
    """The circumstances of a run; all shards are of one size.

    Shapes and dtypes come from (fake) features x (m, d) and y (n, d), y=None: x against itself.
    """

    limit: int  #: bytes of the workspace
    on_cpu: bool
    ranks: int
    hosts: int = 1  #: with as many ranks on each
    columns: int | None = None  #: of a grid, 0: none; None: as the hosts suggest

    def block(self, x: Tensor, y: Tensor | None) -> tuple[int, int]:
        """(bytes of a block with what a backend holds in addition, its rows)."""
        n = len(x if y is None else y)
        if self.on_cpu:
            return self.eager_block(x, y)
        m = self.rows(x)
        if self.ranks > 1:  # columns at once
            n = self._sharing(x) * self._round(x)
        item = x.element_size()
        rows, cols = block_shape(m, n, x.shape[1], item, y is None, self.limit)
        return item * min(rows, m) * min(cols, n) + padded_bytes(x, y), rows

    def rows(self, x: Tensor) -> int:
        """Rows that a rank computes: its own, or in a grid those of the ranks that share them."""
        return len(x) * self.ranks // self._sharing(x)

    def _sharing(self, x: Tensor) -> int:
        """The ranks whose columns a rank computes with: all, or those that share them."""
        columns = self.columns
        if columns is None:
            each, rest = divmod(self.ranks, self.hosts)
            most = most_sharing(len(x), x.shape[1] * x.element_size())
            columns = 0 if rest else columns_for(self.hosts, each, most)
        return self.ranks // max(1, columns)

    def eager_block(self, x: Tensor, y: Tensor | None) -> tuple[int, int]:
        """`block` for torch operations on any device."""
        rows, cols = eager.block_shape(x, self.limit, self.on_cpu)
        rows, cols = min(rows, len(x)), min(cols, len(x if y is None else y))
        return eager.block_bytes(rows, cols, x), rows

    def totals(self, x: Tensor, rows: int) -> int:
        """Bytes of accumulators for the gradients of `rows` rows."""
        return rows * x.shape[1] * accumulator_dtype(x.dtype).itemsize

    def transfer_bytes(self, x: Tensor) -> int:
        """Bytes of other ranks' features and of gradients for them."""
        if self.ranks == 1:
            return 0
        rows = self.rows(x)
        shared = rows * x.shape[1] * x.element_size() if rows > len(x) else 0
        # Of several rounds: features of this one, of the next, and of the previous one, which its
        # last part holds; gradients that are computed, and those that are summed.
        rounds = (1, 1) if self._round(x) >= len(x) else (3, 2)
        return shared + self.in_rounds(x, *rounds)

    def in_rounds(self, x: Tensor, features: int, gradients: int) -> int:
        """Bytes of all ranks' features of `features` rounds and gradients of `gradients` rounds."""
        item = accumulator_dtype(x.dtype).itemsize
        sizes = features * x.element_size() + gradients * item
        return self._round(x) * self._sharing(x) * x.shape[1] * sizes

    def _round(self, x: Tensor) -> int:
        """Rows of each rank that are gathered at once."""
        return round_rows(len(x), self._sharing(x) * x.shape[1] * x.element_size())


def gradient_bytes(run: Run, x: Tensor, y: Tensor | None, numbers: int) -> int:
    """The bytes of `sweep.gradients`; `numbers`: how many an upstream has for each row."""
    block, rows = run.block(x, y)
    transfer_bytes = run.transfer_bytes(x)
    if y is not None and run.ranks == 1:  # accumulators of all columns, and of a strip of rows
        upstreams = 0 if run.on_cpu else 4 * numbers * (len(x) + len(y))  # of kernels, float32
        return block + run.totals(x, len(y) + min(rows, len(x))) + upstreams
    product = run.totals(x, min(tiles.STRIP, len(x))) if run.on_cpu else 0  # for scale's gradient
    temporary = block + product + transfer_bytes
    if not run.on_cpu and y is not None:
        # x's gradient is written when these are freed, except for the gradients of the last round.
        temporary = max(run.in_rounds(x, 0, 1), temporary - x.nbytes)
    return run.totals(x, run.rows(x)) + temporary


def padded_bytes(x: Tensor, y: Tensor | None) -> int:
    """Copies for the kernels, if rows are no multiple of 16 bytes."""
    width = padded(x.shape[1], x.element_size())
    if width == x.shape[1]:
        return 0
    return (len(x) + (0 if y is None else len(y))) * width * x.element_size()
