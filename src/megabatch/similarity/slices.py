"""Slices that divide rows or columns."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise


def strips(n: int, step: int) -> Iterator[slice]:
    """Slices of at most `step` that cover range(n)."""
    for start in range(0, n, step):
        yield slice(start, min(start + step, n))


def within(bounds: Sequence[int], divide: Callable[[int], Iterator[slice]]) -> Iterator[slice]:
    """The slices of each range between two bounds; `divide(n)`: those of range(n)."""
    for start, stop in pairwise(bounds):
        for part in divide(stop - start):
            yield slice(start + part.start, start + part.stop)
