"""The right answers of queries, and the number of wrong ones that rank before them.

Queries are the rows of features x (m, d); the rows of y (n, d), their possible answers, are called
columns. `Right` says which columns are right for each row. There are two kinds: columns of a row's
own id, as for images with captions or classes; and any pairs, as for two texts, where one text may
answer several others that do not share all of their answers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from megabatch.ranks import all_gather_rows, local_range
from megabatch.similarity import ranks
from megabatch.similarity.eager import block_shape

# Elements of one gathered block of features: 64 MiB in fp32.
_CHUNK_ELEMENTS = 2**24


@dataclass(frozen=True)
class Right:
    """The right columns of each of m rows: for row i `columns[start[i] : start[i] + counts[i]]`.

    columns: int64; those of a row are in ascending order. start, counts: int64 (m,). ids: int64
    (m,) and (n,), if the right columns are those of the row's id; None if they are given by pairs.
    """

    columns: Tensor
    start: Tensor
    counts: Tensor
    ids: tuple[Tensor, Tensor] | None = None

    @classmethod
    def by_ids(cls, row_ids: Tensor, column_ids: Tensor) -> Right:
        """Columns with the row's id, int64 (m,) and (n,); a negative one equals nothing."""
        sorted_ids, order = column_ids.sort(stable=True)
        start = torch.searchsorted(sorted_ids, row_ids)
        counts = torch.searchsorted(sorted_ids, row_ids, right=True) - start
        return cls(order, start, torch.where(row_ids >= 0, counts, 0), (row_ids, column_ids))

    @classmethod
    def by_pairs(cls, rows: Tensor, columns: Tensor, m: int) -> Right:
        """The pairs (rows[i], columns[i]), int64 (p,), each once; m: the number of rows."""
        columns, order = columns.sort()
        rows, by_row = rows[order].sort(stable=True)
        counts = rows.bincount(minlength=m)
        return cls(columns[by_row], counts.cumsum(0) - counts, counts)

    def of(self, rows: Tensor | slice) -> Right:
        """The right columns of some rows."""
        ids = None if self.ids is None else (self.ids[0][rows], self.ids[1])
        return Right(self.columns, self.start[rows], self.counts[rows], ids)

    def pairs(self) -> tuple[Tensor, Tensor]:
        """All pairs by row, int64 (p,) each: rows and columns."""
        rows = torch.repeat_interleave(self.counts)
        first = self.counts.cumsum(0) - self.counts
        within = torch.arange(len(rows), device=rows.device) - first[rows]
        return rows, self.columns[self.start[rows] + within]

    def of_row(self, row: int) -> Tensor:
        """The right columns of one row."""
        start = int(self.start[row])
        return self.columns[start : start + int(self.counts[row])]

    def to(self, device: str) -> Right:
        """The same on a device."""
        ids = None if self.ids is None else (self.ids[0].to(device), self.ids[1].to(device))
        return Right(self.columns.to(device), self.start.to(device), self.counts.to(device), ids)


@dataclass(frozen=True)
class Answers:
    """The right columns of rows, and the right rows of columns."""

    there: Right
    back: Right

    @classmethod
    def by_ids(cls, row_ids: Tensor, column_ids: Tensor) -> Answers:
        """As `Right.by_ids`."""
        return cls(Right.by_ids(row_ids, column_ids), Right.by_ids(column_ids, row_ids))

    @classmethod
    def by_pairs(cls, rows: Tensor, columns: Tensor, m: int, n: int) -> Answers:
        """As `Right.by_pairs`, of m rows and n columns."""
        return cls(Right.by_pairs(rows, columns, m), Right.by_pairs(columns, rows, n))

    def to(self, device: str) -> Answers:
        """The same on a device."""
        return Answers(self.there.to(device), self.back.to(device))


class Placed(NamedTuple):
    """Of each row, int64 (m,): its best right column, and the columns that compete with it.

    above, equal: the wrong columns that score higher than it, and the same; tied: the right ones
    that score the same, itself included.
    """

    best: Tensor
    above: Tensor
    equal: Tensor
    tied: Tensor


def place(x: Tensor, y: Tensor, right: Right, group: object = "local") -> Placed:
    """Place each row's best right column among the wrong ones; each row must have a right one.

    Args:
        x: (m, d); y: (n, d); right: their right answers.
        group: ranks that share the work; each holds all of these tensors, and gets all results.
    """
    return _place_by_pairs(x, y, right, group) if right.ids is None else _place(x, y, right, group)


def _place(x: Tensor, y: Tensor, right: Right, group: object) -> Placed:
    part = local_range(len(x), group, block=block_shape(x)[0])
    mine = slice(part.start, part.stop)
    x, right = x[mine], right.of(mine)
    best, tied = best_right_columns(x, y, right)
    above, equal = ranks(x, y, best, ids=right.ids, group="local")
    gathered = all_gather_rows(torch.stack([best, above, equal, tied], dim=1), group)
    return Placed(*gathered.unbind(1))


def _place_by_pairs(x: Tensor, y: Tensor, right: Right, group: object) -> Placed:
    """Count the columns above and equal to each right one, and keep the best one's counts.

    Wrong and right columns need not be distinguished: no right column of a row is above its best,
    and those equal to it have the same number of columns above.
    """
    rows, columns = right.pairs()
    block = block_shape(x)[0]
    part = local_range(len(rows), group, block=block)
    step = block * max(1, _CHUNK_ELEMENTS // (block * max(1, x.shape[1])))  # bounds x[rows]
    counted = [rows.new_zeros(0, 2)]
    for start in range(part.start, part.stop, step):
        some = slice(start, min(part.stop, start + step))
        counted.append(torch.stack(ranks(x[rows[some]], y, columns[some], group="local"), dim=1))
    above_each, equal_each = all_gather_rows(torch.cat(counted), group).unbind(1)
    most = torch.full_like(right.counts, len(y))
    above = most.scatter_reduce(0, rows, above_each, "amin")
    is_best = above_each == above[rows]
    zeros = torch.zeros_like(right.counts)
    tied = zeros.scatter_add(0, rows, is_best.long())
    best = zeros.scatter_reduce(0, rows[is_best], columns[is_best], "amax")
    equal = zeros.scatter_reduce(0, rows[is_best], equal_each[is_best], "amax")
    return Placed(best, above, (equal - (tied - 1)).clamp(min=0), tied)


def best_right_columns(x: Tensor, y: Tensor, right: Right) -> tuple[Tensor, Tensor]:
    """Per row, its best-scoring right column, and how many of them share that score.

    Only right pairs are scored, a bounded number at a time. (0, 0) for a row without any.
    """
    best = torch.zeros_like(right.counts)
    tied = torch.zeros_like(right.counts)
    for rows in _chunks(right.counts, max(1, _CHUNK_ELEMENTS // max(1, x.shape[1]))):
        pair_row, pair_column = right.of(rows).pairs()
        score = _scores(x[rows], y, pair_row, pair_column)
        count = right.counts[rows]
        lowest = score.new_full((len(count),), -torch.inf)
        highest = lowest.scatter_reduce(0, pair_row, score, "amax")
        is_best = score == highest[pair_row]
        tied[rows] = torch.zeros_like(count).scatter_add(0, pair_row, is_best.long())
        best[rows] = torch.zeros_like(count).scatter_reduce(
            0, pair_row[is_best], pair_column[is_best], "amax"
        )
    return best, tied


def _scores(x: Tensor, y: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """Inner products of the given pairs (p,), 2^24 products at a time, at least in fp32."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    step = max(1, _CHUNK_ELEMENTS // max(1, x.shape[1]))
    parts = [
        (x[r].to(dtype) * y[c].to(dtype)).sum(1)
        for r, c in zip(rows.split(step), columns.split(step), strict=True)
    ]
    return torch.cat(parts) if parts else x.new_zeros(0, dtype=dtype)


def _chunks(counts: Tensor, most: int) -> Iterator[slice]:
    """Runs of rows with about `most` pairs in total; a single row may have more."""
    part = counts.cumsum(0) // most
    sizes = torch.unique_consecutive(part, return_counts=True)[1].tolist()
    end = 0
    for size in sizes:
        yield slice(end, end + size)
        end += size
