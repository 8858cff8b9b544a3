"""How many micro-batches' graphs can wait for the second pass, so that they are encoded once."""

from __future__ import annotations

import itertools
from collections.abc import Sequence


def kept_at_most(micro_batches: int, ranks: int) -> int:
    """The most graphs that can wait for the second pass; a single micro-batch has none.

    On several ranks the micro-batch that synchronises gradients is always encoded again.
    """
    return 0 if micro_batches == 1 else micro_batches - (ranks > 1)


def kept_count(graphs: Sequence[int], possible: int, *limits: int | None) -> int:
    """How many of the graphs, the last ones, are together within all limits of bytes.

    graphs: their bytes, in the order of the micro-batches. `possible`: at most so many.
    """
    limit = min((limit for limit in limits if limit is not None), default=None)
    if limit is None:
        return possible
    sums = itertools.accumulate(max(1, graph) for graph in reversed(graphs))
    return min(possible, sum(1 for _ in itertools.takewhile(lambda total: total <= limit, sums)))
