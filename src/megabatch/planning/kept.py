"""How many micro-batches' graphs can wait for the second pass, so that they are encoded once."""

from __future__ import annotations


def kept_at_most(micro_batches: int, ranks: int) -> int:
    """The most graphs that can wait for the second pass; a single micro-batch has none.

    On several ranks the micro-batch that synchronises gradients is always encoded again.
    """
    return 0 if micro_batches == 1 else micro_batches - (ranks > 1)


def kept_count(graph: int, possible: int, *limits: int | None) -> int:
    """How many of the `possible` graphs, each of this many bytes, are within all limits."""
    counts = [limit // max(1, graph) for limit in limits if limit is not None]
    return max(0, min([possible, *counts]))
