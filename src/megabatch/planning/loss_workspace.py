"""Estimates of the memory that the losses' operators take besides their inputs and results.

A test compares them with records of real runs (tests/planning/test_loss.py).
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from megabatch.similarity import eager, tiles
from megabatch.similarity.arguments import accumulator_dtype
from megabatch.similarity.distributed.schedule import columns_for, most_sharing, round_rows
from megabatch.similarity.triton.blocking import block_shape

#: float32 numbers that the backward pass of log-sum-exps keeps of a row and of a column.
UPSTREAM = 5


class Run(NamedTuple):
    """The circumstances of a run; all shards are of one size.

    Shapes and dtypes come from (fake) features x (m, d) and y (n, d), y=None: x against itself.
    """

    limit: int  #: bytes of the workspace
    on_cpu: bool
    ranks: int
    hosts: int = 1  #: with as many ranks on each
    columns: int | None = None  #: of a grid, 0: none; None: as the hosts suggest

    def workspace(self, operator: str, x: Tensor, y: Tensor | None) -> int:
        """Bytes that an operator of this name takes while it runs; 0 if it takes little.

        Left out: copies of features whose rows are no multiple of 16 bytes, a guide's features of
        other ranks, and a teacher's blocks on the CPU.
        """
        run = self if y is not None else self._replace(columns=0)  # which takes no grid
        if operator == "logsumexps":
            return run.block(x, y)[0] + run.transfers(x)
        if operator == "logsumexps_backward":
            return run._gradients(x, y)
        if operator == "softplus_sum" and y is not None:
            block, rows = run.block(x, y)
            totals = len(y) + min(rows, len(x)) if run.ranks == 1 else run.rows(x)
            return block + run.totals(x, totals) + run.transfers(x)
        return 0

    def _gradients(self, x: Tensor, y: Tensor | None) -> int:
        block, rows = self.block(x, y)
        if y is not None and self.ranks == 1:  # accumulators of all columns, and of a strip of rows
            upstreams = 0 if self.on_cpu else 4 * UPSTREAM * (len(x) + len(y))
            return block + self.totals(x, len(y) + min(rows, len(x))) + upstreams
        product = self.totals(x, min(tiles.STRIP, len(x))) if self.on_cpu else 0  # scale's gradient
        temporary = block + product + self.transfers(x)
        if not self.on_cpu and y is not None:
            # x's gradient is written when these are freed, but for the last round's gradients.
            temporary = max(self._rounds(x, 0, 1), temporary - x.nbytes)
        return self.totals(x, self.rows(x)) + temporary

    def block(self, x: Tensor, y: Tensor | None) -> tuple[int, int]:
        """(bytes of a block with what a backend holds in addition, its rows)."""
        n, item = len(x if y is None else y), x.element_size()
        if self.on_cpu:
            rows, cols = eager.block_shape(x, self.limit, on_cpu=True)
            return eager.block_bytes(min(rows, len(x)), min(cols, n), x), min(rows, len(x))
        m = self.rows(x)
        if self.ranks > 1:  # columns at once
            n = self._sharing(x) * self._round(x)
        rows, cols = block_shape(m, n, x.shape[1], item, y is None, self.limit)
        return item * min(rows, m) * min(cols, n), rows

    def rows(self, x: Tensor) -> int:
        """Rows that a rank computes: its own, or in a grid those of the ranks that share them."""
        return len(x) * self.ranks // self._sharing(x)

    def totals(self, x: Tensor, rows: int) -> int:
        """Bytes of accumulators for the gradients of `rows` rows."""
        return rows * x.shape[1] * accumulator_dtype(x.dtype).itemsize

    def transfers(self, x: Tensor) -> int:
        """Bytes of other ranks' features and of gradients for them."""
        if self.ranks == 1:
            return 0
        rows = self.rows(x)
        shared = rows * x.shape[1] * x.element_size() if rows > len(x) else 0
        # Of several rounds: features of this one, of the next, and of the previous one, which its
        # last part holds; gradients that are computed, and those that are summed.
        return shared + self._rounds(x, *((1, 1) if self._round(x) >= len(x) else (3, 2)))

    def _rounds(self, x: Tensor, features: int, gradients: int) -> int:
        """Bytes of all ranks' features of `features` rounds and gradients of `gradients` rounds."""
        item = accumulator_dtype(x.dtype).itemsize
        sizes = features * x.element_size() + gradients * item
        return self._round(x) * self._sharing(x) * x.shape[1] * sizes

    def _round(self, x: Tensor) -> int:
        """Rows of each rank that are gathered at once."""
        return round_rows(len(x), self._sharing(x) * x.shape[1] * x.element_size())

    def _sharing(self, x: Tensor) -> int:
        """The ranks whose columns a rank computes with: all, or those that share them."""
        columns = self.columns
        if columns is None:
            each, rest = divmod(self.ranks, self.hosts)
            most = most_sharing(len(x), x.shape[1] * x.element_size())
            columns = 0 if rest else columns_for(self.hosts, each, most)
        return self.ranks // max(1, columns)
