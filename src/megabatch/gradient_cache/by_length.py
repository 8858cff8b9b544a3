"""Rows of a batch divided into micro-batches: equally, or sorted by length, of equal tokens."""

from __future__ import annotations

import bisect
import itertools
import sys
from collections.abc import Sequence
from typing import TypeAlias

#: Lengths of sorted sequences: a number of columns, and how many rows need it, the longest first.
Runs: TypeAlias = "Sequence[tuple[int, int]]"


def equal_rows(rows: int, size: int) -> list[slice]:
    """Micro-batches of `size` rows; the last one may have fewer."""
    return [slice(start, min(start + size, rows)) for start in range(0, rows, size)]


def equal_tokens(runs: Runs, count: int) -> list[slice]:
    """Divide sequences into `count` micro-batches, the largest with as few tokens as possible.

    A micro-batch has at least one row; its tokens are rows times the columns of the first one.
    """
    found = equal_token_runs(runs, count)
    sizes = [size for size, _, number in found for _ in range(number)]
    ends = itertools.accumulate(sizes)
    return [slice(end - size, end) for size, end in zip(sizes, ends, strict=True)]


def equal_token_runs(runs: Runs, count: int) -> list[tuple[int, int, int]]:
    """Runs of equal micro-batches of `equal_tokens`: rows, columns of the first row, and number."""
    spare = sum(n for _, n in runs) - count  # beyond a row for each micro-batch
    return _packed(runs, fewest_tokens(runs, count), spare)


def fewest_tokens(runs: Runs, count: int) -> int:
    """The tokens of the largest micro-batch in `equal_tokens`; 0 without any row."""
    if not runs:
        return 0
    longest = runs[0][0]
    most = -(-sum(n for _, n in runs) // count) * longest  # as with equal rows

    def suffices(limit: int) -> bool:  # with more tokens in each micro-batch, fewer are needed
        return sum(number for *_, number in _packed(runs, limit)) <= count

    return longest + bisect.bisect_left(range(longest, most), True, key=suffices)


def growth(runs: Runs, columns: int, count: int) -> float:
    """How many times as many tokens the largest micro-batch has if one row needs all `columns`."""
    if not runs:
        return 1.0
    (longest, n), *others = runs
    longer = [(columns, 1), (longest, n - 1), *others]
    return fewest_tokens(longer, count) / fewest_tokens(runs, count)


def _packed(runs: Runs, limit: int, spare: int = sys.maxsize) -> list[tuple[int, int, int]]:
    """As `equal_token_runs`, with at most `limit` tokens each, and `spare` more rows than parts."""
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
