"""Which pairs of a similarity matrix are positives, and which are left out."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

#: What the pairs (i, i) of the whole matrix are.
PLAIN, PAIRED, DROPPED = "plain", "paired", "dropped"


@dataclass(frozen=True)
class Pairs:
    """The kinds of the pairs (i, j) of a block of rows against a block of columns.

    A pair is *positive* where both ids are equal and not negative, *dropped* where it counts
    nowhere, *negative* otherwise. With `diagonal="paired"` the positives are the pairs (i, i), and
    other pairs of equal ids are dropped.
    """

    diagonal: str = PLAIN
    row_ids: Tensor | None = None  #: (m,) int64
    column_ids: Tensor | None = None  #: (n,) int64
    ceiling: Tensor | None = None  #: (m,) logits above which a negative pair is dropped
    row_start: int = 0  #: this block's first row in the whole matrix
    column_start: int = 0

    def view(self, rows: slice, columns: slice) -> Pairs:
        """The kinds of a block of this block."""
        return Pairs(
            self.diagonal,
            None if self.row_ids is None else self.row_ids[rows],
            None if self.column_ids is None else self.column_ids[columns],
            None if self.ceiling is None else self.ceiling[rows],
            self.row_start + rows.start,
            self.column_start + columns.start,
        )

    def crosses_diagonal(self, m: int, n: int) -> bool:
        """Whether an m × n block at this place holds a pair (i, i)."""
        first, last = self.column_start - m, self.column_start + n
        return self.diagonal != PLAIN and first < self.row_start < last

    def masks(self, logits: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """(positive, dropped) of an (m, n) block of logits; None where there is none for sure."""
        m, n = logits.shape
        equal = diagonal = None
        if self.row_ids is not None and self.column_ids is not None:
            equal = self.row_ids[:, None] == self.column_ids[None, :]
            equal &= (self.row_ids >= 0)[:, None]
            # On the CPU a look at the mask is free and most blocks of a large batch hold no equal
            # ids; on a GPU it would stall the stream.
            if equal.device.type == "cpu" and not equal.any():
                equal = None
        if self.crosses_diagonal(m, n):
            rows = torch.arange(m, device=logits.device) + (self.row_start - self.column_start)
            diagonal = rows[:, None] == torch.arange(n, device=logits.device)
        others = equal if equal is None or diagonal is None else equal & ~diagonal
        positive, dropped = (diagonal, others) if self.diagonal == PAIRED else (others, diagonal)
        if self.ceiling is not None:
            above = logits > self.ceiling[:, None]
            above = above if positive is None else above & ~positive
            dropped = above if dropped is None else above | dropped
        return positive, dropped
