"""How many micro-batches' graphs can wait for the second pass, so that they are encoded once."""

from __future__ import annotations

from collections.abc import Sequence


def kept_at_most(micro_batches: int, ranks: int) -> int:
    """The most graphs that can wait for the second pass; a single micro-batch has none.

    On several ranks the micro-batch that synchronises gradients is always encoded again.
    """
    return 0 if micro_batches == 1 else micro_batches - (ranks > 1)


def kept_count(runs: Sequence[tuple[int, int]], possible: int, *limits: int | None) -> int:
    """How many graphs, the last ones, are together within all limits of bytes.

    runs: bytes of a graph and how many in a row are as large, in the order of the micro-batches.
    possible: at most so many.
    """
    limit = min((limit for limit in limits if limit is not None), default=None)
    if limit is None:
        return possible
    count, limit = 0, max(0, limit)
    for graph, number in reversed(runs):
        size = max(1, graph)
        fitting = min(number, limit // size)
        count += fitting
        limit -= fitting * size
        if fitting < number:
            break
    return min(possible, count)
