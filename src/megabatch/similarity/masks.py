"""Positive, negative and dropped pairs of a similarity matrix, and sorting by id.

Kernels need no mask, and one exponential per logit, in a tile whose rows and columns have no id in
common. In an unsorted large batch most tiles hold some pair of equal ids; sorted by id, few do.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

#: Roles of the pairs (i, i) of the whole matrix; see `Pairs`.
PLAIN, PAIRED, DROPPED = "plain", "paired", "dropped"


class Guide(NamedTuple):
    """Another model's features, whose similarities are compared with the ceilings."""

    rows: Tensor  #: (m, d')
    cols: Tensor  #: (n, d')


@dataclass(frozen=True)
class Pairs:
    """Classifies the pairs (i, j) of a block of rows against a block of columns.

    A pair is *positive* if both ids are equal and not negative, *dropped* if it does not count,
    *negative* otherwise. With `diagonal="paired"` the positives are the pairs (i, i), and other
    pairs of equal ids are dropped.
    """

    diagonal: str = PLAIN
    row_ids: Tensor | None = None  #: (m,) int64
    col_ids: Tensor | None = None  #: (n,) int64
    ceiling: Tensor | None = None  #: (m,) logits above which a negative pair is dropped
    guide: Guide | None = None  #: its similarities replace the logits
    row_start: int = 0  #: index of this block's first row in the whole matrix
    col_start: int = 0

    @property
    def has_positives(self) -> bool:
        """Whether any pair can be positive."""
        return self.row_ids is not None or self.diagonal == PAIRED

    def view(self, rows: slice, cols: slice) -> Pairs:
        """The pairs of a block of this block."""
        return Pairs(
            self.diagonal,
            None if self.row_ids is None else self.row_ids[rows],
            None if self.col_ids is None else self.col_ids[cols],
            None if self.ceiling is None else self.ceiling[rows],
            None if self.guide is None else Guide(self.guide.rows[rows], self.guide.cols[cols]),
            self.row_start + rows.start,
            self.col_start + cols.start,
        )

    def crosses_diagonal(self, m: int, n: int) -> bool:
        """Whether an m × n block at this place holds a pair (i, i)."""
        first, last = self.col_start - m, self.col_start + n
        return self.diagonal != PLAIN and first < self.row_start < last

    def masks(self, logits: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """Masks (positive, dropped) of an (m, n) block; None if there is surely no such pair.

        `logits`: those of the block, or a guide's similarities.
        """
        m, n = logits.shape
        equal = diagonal = None
        if self.row_ids is not None and self.col_ids is not None:
            equal = self.row_ids[:, None] == self.col_ids[None, :]
            equal &= (self.row_ids >= 0)[:, None]
            # On the CPU reading the mask is free, and most blocks of a large batch hold no equal
            # ids; on a GPU it would stall the stream.
            if equal.device.type == "cpu" and not equal.any():
                equal = None
        if self.crosses_diagonal(m, n):
            rows = torch.arange(m, device=logits.device) + (self.row_start - self.col_start)
            diagonal = rows[:, None] == torch.arange(n, device=logits.device)
        others = equal if equal is None or diagonal is None else equal & ~diagonal
        positive, dropped = (diagonal, others) if self.diagonal == PAIRED else (others, diagonal)
        if self.ceiling is not None:
            above = logits > self.ceiling[:, None]
            above = above if positive is None else above & ~positive
            dropped = above if dropped is None else above | dropped
        return positive, dropped


class SortedMatrix(NamedTuple):
    """Features and ids in the order of the ids; the orders are None if nothing is sorted."""

    x: Tensor
    y: Tensor
    pairs: Pairs
    row_order: Tensor | None = None  #: (m,) index of each sorted row among the given ones
    col_order: Tensor | None = None  #: (n,) likewise

    @classmethod
    def of(cls, x: Tensor, y: Tensor, pairs: Pairs) -> SortedMatrix:
        """Sort a whole matrix x (m, d) against y (n, d); copies both if there are ids.

        The vectors of `pairs` become contiguous, as kernels need them: not strided, not expanded.
        """
        if pairs.row_ids is None or pairs.col_ids is None:
            if pairs.ceiling is not None:
                pairs = replace(pairs, ceiling=pairs.ceiling.contiguous())
            return cls(x, y, pairs)
        rows = torch.argsort(pairs.row_ids, stable=True)
        # Pairs (i, i) stay on the diagonal only if both sides are sorted in the same way.
        alike = pairs.diagonal != PLAIN or pairs.col_ids is pairs.row_ids
        cols = rows if alike else torch.argsort(pairs.col_ids, stable=True)
        ceiling = None if pairs.ceiling is None else pairs.ceiling[rows]
        guide = None
        if pairs.guide is not None:
            guide = Guide(pairs.guide.rows[rows], pairs.guide.cols[cols])
        ids = pairs.row_ids[rows], pairs.col_ids[cols]
        sorted_x = x[rows]
        sorted_y = sorted_x if y is x and alike else y[cols]
        return cls(sorted_x, sorted_y, Pairs(pairs.diagonal, *ids, ceiling, guide), rows, cols)


def sort(values: Tensor, order: Tensor | None, dim: int) -> Tensor:
    """`values` in the sorted matrix's order along `dim`."""
    return values if order is None else values.index_select(dim, order)


def restore(values: Tensor, order: Tensor | None, dim: int) -> Tensor:
    """`values` of the sorted matrix in the given matrix's order along `dim`."""
    return values if order is None else torch.empty_like(values).index_copy_(dim, order, values)
