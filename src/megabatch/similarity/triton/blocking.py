"""The division of a matrix into blocks and tiles."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator

from megabatch.similarity.matrix import strips

#: Rows and columns of a tile. Alike for both, so that pairs (i, i) fall into whole tiles.
TILE = 128
#: The sides of a block are multiples of it, so that only the last tiles are partly empty.
GROUP = 4 * TILE
#: Bytes per row of vectors in the backward pass: results, their gradients, a loss's own terms.
VECTORS = 80


def cdiv(a: int, b: int) -> int:
    """a / b rounded up. (Triton's own takes 5 us on the host; a step calls it 20 times.)"""
    return -(-a // b)


def whole_groups(size: int) -> int:
    """The largest multiple of GROUP up to `size`, but at least GROUP."""
    return max(GROUP, size // GROUP * GROUP)


def padded(width: int, item: int) -> int:
    """Width of features of `item` bytes as the kernels read them: rows of whole 16 bytes."""
    unit = 16 // item
    return cdiv(width, unit) * unit


@functools.lru_cache(1024)  # a step needs the same few shapes
def block_shape(
    m: int, n: int, width: int, item: int, symmetric: bool, workspace: int
) -> tuple[int, int]:
    """Rows and columns of a block of dS, which takes the workspace, in the features' dtype.

    A quarter of the workspace is left for the rest of the backward pass: a strip's gradient,
    vectors of rows and columns, padded copies. If those take more, blocks have fewer columns, down
    to half: with 4M pairs the vectors alone take more, and blocks of GROUP columns are slow.
    """
    rows = whole_groups(int(math.sqrt(workspace / item)))
    if symmetric:
        return rows, rows
    d = padded(width, item)
    beside = 4 * d * min(rows, m) + VECTORS * (m + n) + (item * d * (m + n) if d != width else 0)
    room = max(workspace // 2, min(workspace, workspace * 5 // 4 - beside))
    limit = max(GROUP, room // (item * rows))
    # Even parts: a last one of few columns would make a slow product.
    even = cdiv(n, cdiv(max(n, 1), limit))
    return rows, min(whole_groups(limit), whole_groups(even + GROUP - 1))


def product_strips(n: int, step: int) -> Iterator[slice]:
    """As `strips`, for products: the rows beyond a multiple of GROUP are a strip of their own.

    A product over an odd number of some thousand rows is slow: at b = 65,601 the loss took 53.8 ms
    with a block of 12,353 columns, 45.0 ms with one of 65.
    """
    whole = n - n % GROUP
    yield from strips(whole, step)
    if whole < n:
        yield slice(whole, n)
