"""The division of batches into micro-batches: of equal rows, or of equal tokens."""

from __future__ import annotations

import bisect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

#: Lengths of sorted sequences: a number of columns, and how many rows need it, the longest first.
Runs: TypeAlias = "Sequence[tuple[int, int]]"


@dataclass(frozen=True)
class MicroBatch:
    """The rows that an encoder gets at a time; an idle one has none.

    Attributes:
        rows: of the batches that are encoded in their own order.
        by_length: of those that are sorted by length, by the batch's name.
    """

    rows: slice
    by_length: Mapping[str, slice] = field(default_factory=dict)

    @property
    def idle(self) -> bool:
        """Whether there are no rows, as on a rank that has fewer micro-batches than another."""
        return self.rows.start == self.rows.stop

    def of(self, batch: str) -> slice:
        """The rows of a batch."""
        return self.by_length.get(batch, self.rows)


def equal_rows(rows: int, size: int) -> list[slice]:
    """Micro-batches of `size` rows; the last one may have fewer."""
    return [slice(start, min(start + size, rows)) for start in range(0, rows, size)]


def equal_tokens(runs: Runs, count: int) -> list[slice]:
    """Divide sorted sequences so that the largest number of tokens is as small as possible.

    The tokens of a micro-batch are its rows times the columns of its first row.

    Args:
        runs: the sequences.
        count: number of micro-batches, at most that of rows. Each has at least one row.
    """
    divided: list[slice] = []
    start = 0
    for size, _, number in equal_token_runs(runs, count):
        for _ in range(number):
            divided.append(slice(start, start + size))
            start += size
    return divided


def equal_token_runs(runs: Runs, count: int) -> list[tuple[int, int, int]]:
    """The micro-batches of `equal_tokens`, of which few differ, in as much time as there are runs.

    Returns:
        Rows, columns of the first row, and how many micro-batches in a row have them.
    """
    limit = fewest_tokens(runs, count)
    spare = sum(n for _, n in runs) - count  # beyond a row for each micro-batch
    found: list[tuple[int, int, int]] = []
    start = end = 0
    for columns, n in runs:
        end += n
        while start < end:
            size = min(limit // columns, 1 + spare)
            number = -(-(end - start) // size)  # the last of them may reach into the next run
            if size > 1:
                number = min(number, spare // (size - 1))
            found.append((size, columns, number))
            spare -= number * (size - 1)
            start += number * size
    return found


def fewest_tokens(runs: Runs, count: int) -> int:
    """The tokens of the largest micro-batch in `equal_tokens`; 0 without any row."""
    if not runs:
        return 0
    longest = runs[0][0]
    most = -(-sum(n for _, n in runs) // count) * longest  # as with equal rows
    # With more tokens in each micro-batch, fewer are needed.
    return longest + bisect.bisect_left(
        range(longest, most), True, key=lambda limit: _needed(runs, limit) <= count
    )


def growth(runs: Runs, columns: int, count: int) -> float:
    """How many times as many tokens the largest micro-batch has if one row needs all `columns`.

    For other batches of similar sequences, the longest of which may be longer. At least 1.
    """
    if not runs:
        return 1.0
    (longest, n), *others = runs
    return fewest_tokens([(columns, 1), (longest, n - 1), *others], count) / fewest_tokens(
        runs, count
    )


def _needed(runs: Runs, limit: int) -> int:
    """The number of micro-batches if each takes as many rows as have at most `limit` tokens."""
    count = start = end = 0
    for columns, n in runs:
        end += n
        if start < end:
            size = limit // columns
            more = -(-(end - start) // size)
            count, start = count + more, start + more * size
    return count
