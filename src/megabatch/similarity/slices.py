"""Slices that divide rows or columns."""

from __future__ import annotations

from collections.abc import Iterator


def strips(n: int, step: int) -> Iterator[slice]:
    """Slices of at most `step` that cover range(n)."""
    for start in range(0, n, step):
        yield slice(start, min(start + step, n))
