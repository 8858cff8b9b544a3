"""The similarity matrix: its two sides, which of its pairs count as what, and sorting by id.

Kernels need no mask, and one exponential per logit, in a tile whose rows and columns have no id in
common. In an unsorted large batch most tiles hold some pair of equal ids; sorted by id, few do.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

#: Roles of the pairs (i, i) of the whole matrix; see `Matrix`.
PLAIN, PAIRED, DROPPED = "plain", "paired", "dropped"


class Side(NamedTuple):
    """The rows or the columns of a matrix, and the tensors that belong to them."""

    features: Tensor  #: (m, d), or (m, l, d) the tokens of late interaction
    ids: Tensor | None = None  #: (m,) int64
    ceiling: Tensor | None = None  #: (m,) of rows: logits above which a negative pair is dropped
    weight: Tensor | None = None  #: (m,) of rows: factors of the sigmoid loss, of MaxSim's sums
    guide: Tensor | None = None  #: (m, d') another model's features: a guide's or a teacher's
    upstream: Tensor | None = None  #: (k, m) of the backward pass: see `states`
    lengths: Tensor | None = None  #: (m,) int64 of columns: their first tokens, which count

    def take(self, rows: slice | Tensor) -> Side:
        """These rows, in this order."""
        _, ids, ceiling, weight, guide, upstream, lengths = self
        return Side(
            self.features[rows],
            None if ids is None else ids[rows],
            None if ceiling is None else ceiling[rows],
            None if weight is None else weight[rows],
            None if guide is None else guide[rows],
            None if upstream is None else upstream[:, rows],
            None if lengths is None else lengths[rows],
        )

    def narrow(self, part: slice) -> Side:
        """A part of the rows; the side itself if it is all of them."""
        whole = part.start == 0 and part.stop == self.features.shape[0]
        return self if whole else self.take(part)


class Matrix(NamedTuple):
    """A block of rows against a block of columns.

    A pair is *positive* if both ids are equal and not negative, *dropped* if it does not count,
    *negative* otherwise. With `diagonal="paired"` the positives are the pairs (i, i), and other
    pairs of equal ids are dropped.
    """

    rows: Side
    cols: Side
    diagonal: str = PLAIN
    row_start: int = 0  #: index of this block's first row in the whole matrix
    col_start: int = 0
    symmetric: bool = (
        False  #: the columns are the rows: only blocks on and above the diagonal count
    )
    width: int = 0  #: of the features without further ones for a bias; 0: there are none

    @property
    def shape(self) -> tuple[int, int]:
        """Numbers of rows and columns."""
        return self.rows.features.shape[0], self.cols.features.shape[0]

    @property
    def has_positives(self) -> bool:
        """Whether any pair can be positive."""
        return self.rows.ids is not None or self.diagonal == PAIRED

    def view(self, i: slice, j: slice) -> Matrix:
        """The block of rows `i` and columns `j`."""
        rows, cols = self.rows.narrow(i), self.cols.narrow(j)
        if rows is self.rows and cols is self.cols:
            return self
        starts = self.row_start + i.start, self.col_start + j.start
        return Matrix(rows, cols, self.diagonal, *starts, self.symmetric and i == j)

    def crosses_diagonal(self) -> bool:
        """Whether this block holds a pair (i, i)."""
        m, n = self.shape
        first, last = self.col_start - m, self.col_start + n
        return self.diagonal != PLAIN and first < self.row_start < last

    def masks(self, logits: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """Masks (positive, dropped) of this block (m, n); None if there is surely no such pair.

        `logits`: of the block, or a guide's similarities, which the ceilings bound.
        """
        m, n = logits.shape
        row_ids, col_ids, ceiling = self.rows.ids, self.cols.ids, self.rows.ceiling
        equal = diagonal = None
        if row_ids is not None and col_ids is not None:
            equal = row_ids[:, None] == col_ids[None, :]
            equal &= (row_ids >= 0)[:, None]
            # On the CPU reading the mask is free, and most blocks of a large batch hold no equal
            # ids; on a GPU it would stall the stream.
            if equal.device.type == "cpu" and not equal.any():
                equal = None
        if self.crosses_diagonal():
            rows = torch.arange(m, device=logits.device) + (self.row_start - self.col_start)
            diagonal = rows[:, None] == torch.arange(n, device=logits.device)
        others = equal if equal is None or diagonal is None else equal & ~diagonal
        positive, dropped = (diagonal, others) if self.diagonal == PAIRED else (others, diagonal)
        if ceiling is not None:
            above = logits > ceiling[:, None]
            above = above if positive is None else above & ~positive
            dropped = above if dropped is None else above | dropped
        return positive, dropped


def strips(n: int, step: int) -> Iterator[slice]:
    """Slices of at most `step` that cover range(n)."""
    for start in range(0, n, step):
        yield slice(start, min(start + step, n))


def narrow(values: Tensor, part: slice, dim: int = 0) -> Tensor:
    """A part of `values` along `dim`; themselves, without an operator, if it is all of them."""
    if part.start == 0 and part.stop == values.shape[dim]:
        return values
    return values.narrow(dim, part.start, part.stop - part.start)


class Orders(NamedTuple):
    """The order in which a matrix's sides were sorted; None if they were not."""

    rows: Tensor | None = None  #: (m,) index of each sorted row among the given ones
    cols: Tensor | None = None  #: (n,) likewise


def sort_by_id(matrix: Matrix) -> tuple[Matrix, Orders]:
    """Sort both sides of a whole matrix by id; copies them if there are ids."""
    rows, cols = matrix.rows, matrix.cols
    if rows.ids is None or cols.ids is None:
        return matrix, Orders()
    row_order = torch.argsort(rows.ids, stable=True)
    # Pairs (i, i) stay on the diagonal only if both sides are sorted in the same way.
    same = matrix.diagonal != PLAIN or cols.ids is rows.ids
    col_order = row_order if same else torch.argsort(cols.ids, stable=True)
    sorted_rows = rows.take(row_order)
    if same and cols.features is rows.features and cols.guide is rows.guide:
        sorted_cols = sorted_rows
    else:
        sorted_cols = cols.take(col_order)
    return matrix._replace(rows=sorted_rows, cols=sorted_cols), Orders(row_order, col_order)


def sort(values: Tensor, order: Tensor | None, dim: int) -> Tensor:
    """`values` in the sorted matrix's order along `dim`."""
    return values if order is None else values.index_select(dim, order)


def restore(values: Tensor, order: Tensor | None, dim: int) -> Tensor:
    """`values` of the sorted matrix in the given matrix's order along `dim`."""
    return values if order is None else torch.empty_like(values).index_copy_(dim, order, values)
