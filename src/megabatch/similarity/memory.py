"""Estimates of the memory that a reduction takes while it runs, besides its inputs and results.

The planner runs a loss on fake tensors and calls each operator's `workspace`. A test compares the
estimates with records of real runs (tests/planning/test_loss.py).
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from megabatch.similarity import settings
from megabatch.similarity.arguments import accumulator_dtype
from megabatch.similarity.backends import eager
from megabatch.similarity.backends.triton.blocking import block_shape, padded
from megabatch.similarity.distributed import gathered, ring
from megabatch.similarity.distributed.hosts import columns_for


class Run(NamedTuple):
    """The circumstances of a run; all shards are of one size.

    Shapes and dtypes come from (fake) features x (m, d) and y (n, d), y=None: x against itself.
    """

    limit: int  #: bytes of the workspace
    on_cpu: bool
    ranks: int
    hosts: int = 1  #: with as many ranks on each
    columns: int | None = None  #: of a grid, 0: none; None: as the setting and the hosts decide

    def block(self, x: Tensor, y: Tensor | None) -> tuple[int, int]:
        """(bytes of a block with what a backend holds in addition, its rows)."""
        n = len(x if y is None else y)
        if self.on_cpu:
            return self.eager_block(x, y)
        m = self.rows(x, y)
        if self.ranks > 1 and y is not None:  # columns at once
            n = self._sharing(x, y) * self._round(x, y) or min(ring.chunk_rows(x), len(x))
        item = x.element_size()
        rows, cols = block_shape(m, n, x.shape[1], item, y is None, self.limit)
        return item * min(rows, m) * min(cols, n) + padded_bytes(x, y), rows

    def rows(self, x: Tensor, y: Tensor | None) -> int:
        """Rows that a rank computes: its own, or in a grid those of the ranks that share them."""
        return len(x) * self.ranks // self._sharing(x, y)

    def _sharing(self, x: Tensor, y: Tensor | None) -> int:
        """The ranks whose columns a rank computes with: all, or those that share them."""
        if self.columns is not None:
            return self.ranks // max(1, self.columns)
        columns, row, symmetric = settings.grid(), x.shape[1] * x.element_size(), y is None
        if columns < 0:
            each, rest = divmod(self.ranks, self.hosts)
            most = gathered.most_sharing(len(x), row)
            columns = 0 if rest else columns_for(self.hosts, each, most, symmetric)
        if columns == 0 or self.ranks % columns:
            return self.ranks
        others = self.ranks // columns
        fits = gathered.fits_grid(columns, others, len(x), len(x), row, symmetric)
        return others if fits else self.ranks

    def eager_block(self, x: Tensor, y: Tensor | None) -> tuple[int, int]:
        """`block` for torch operations on any device."""
        rows, cols = eager.block_shape(x, self.limit, self.on_cpu)
        rows, cols = min(rows, len(x)), min(cols, len(x if y is None else y))
        return eager.block_bytes(rows, cols, x), rows

    def totals(self, x: Tensor, rows: int) -> int:
        """Bytes of accumulators for the gradients of `rows` rows."""
        return rows * x.shape[1] * accumulator_dtype(x.dtype).itemsize

    def transfer_bytes(self, x: Tensor, y: Tensor | None) -> int:
        """Bytes of other ranks' features and of gradients for them."""
        if self.ranks == 1:
            return 0
        rows, shared = self._round(x, y), self.rows(x, y)
        beside = shared * x.shape[1] * x.element_size() if shared > len(x) else 0
        if rows == 0:  # two chunks of features, or all if they are saved, and three of gradients
            chunk = min(ring.chunk_rows(x), len(x))
            features = beside + 2 * chunk * x.shape[1] * x.element_size()
            if y is None:
                saved = gathered.saved_shards(x, self.ranks, True, settings.gather())
                features = saved * x.nbytes or features
            return features + self.totals(x, 3 * chunk)
        if rows == len(x):
            return beside + self.in_rounds(x, y, 1, 1)
        # Features of this round, of the next, and of the previous one, which its last chunk holds;
        # gradients that are computed, and those that are summed.
        return beside + self.in_rounds(x, y, 3, 2)

    def in_rounds(self, x: Tensor, y: Tensor | None, features: int, gradients: int) -> int:
        """Bytes of all ranks' features of `features` rounds and gradients of `gradients` rounds."""
        item = accumulator_dtype(x.dtype).itemsize
        sizes = features * x.element_size() + gradients * item
        return self._round(x, y) * self._sharing(x, y) * x.shape[1] * sizes

    def _round(self, x: Tensor, y: Tensor | None) -> int:
        """Rows of each rank that are gathered at once; 0 for the ring."""
        if y is None:
            return 0
        row = self._sharing(x, y) * x.shape[1] * x.element_size()
        return gathered.round_rows(len(x), row, self.hosts > 1)


def gradient_bytes(run: Run, x: Tensor, y: Tensor | None, numbers: int) -> int:
    """The bytes of `engine.gradients`; `numbers`: how many an upstream has for each row."""
    block, rows = run.block(x, y)
    transfer_bytes = run.transfer_bytes(x, y)
    if y is not None and run.ranks == 1:  # accumulators of all columns, and of a strip of rows
        upstreams = 0 if run.on_cpu else 4 * numbers * (len(x) + len(y))  # of kernels, float32
        return block + run.totals(x, len(y) + min(rows, len(x))) + upstreams
    product = run.totals(x, min(eager.STRIP, len(x))) if run.on_cpu else 0  # for scale's gradient
    temporary = block + product + transfer_bytes
    if not run.on_cpu and y is not None:
        # x's gradient is written when these are freed, except for the last round.
        temporary = max(run.in_rounds(x, y, 1, 1), temporary - x.nbytes)
    return run.totals(x, run.rows(x, y)) + temporary


def padded_bytes(x: Tensor, y: Tensor | None) -> int:
    """Copies for the kernels, if rows are no multiple of 16 bytes."""
    width = padded(x.shape[1], x.element_size())
    if width == x.shape[1]:
        return 0
    return (len(x) + (0 if y is None else len(y))) * width * x.element_size()
