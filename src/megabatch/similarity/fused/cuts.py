"""How a matrix is cut into blocks."""

from __future__ import annotations

from collections.abc import Iterator

#: Rows and columns of every tile: pairs (i, i) then fall into whole tiles on both sides.
TILE = 128
#: A block's side is a multiple, so that only its last tiles may be partly empty.
GROUP = 4 * TILE
#: Rows of the largest block on the diagonal of a symmetric matrix, half of which is computed twice.
DIAGONAL = 8192


def cdiv(a: int, b: int) -> int:
    """a / b rounded up. (Triton's own takes 5 us on the host; a step calls it 20 times.)"""
    return -(-a // b)


def whole_groups(size: int) -> int:
    """The largest multiple of GROUP that is not above `size`, but GROUP at least."""
    return max(GROUP, size // GROUP * GROUP)


def parts(n: int, step: int) -> Iterator[slice]:
    """Slices of at most `step` that cover range(n)."""
    for start in range(0, n, step):
        yield slice(start, min(start + step, n))


def product_parts(n: int, step: int) -> Iterator[slice]:
    """As `parts`, for products: a last part below GROUP is one of its own.

    A product over an odd number of some thousand rows is slow: at b = 65,601 the loss took 53.8 ms
    with a block of 12,353 columns, 45.0 ms with one of 65.
    """
    whole = n - n % GROUP
    yield from parts(whole, step)
    if whole < n:
        yield slice(whole, n)


def cut(i: slice, j: slice, symmetric: bool) -> Iterator[tuple[slice, slice]]:
    """A block, in pieces where it lies on the diagonal of a symmetric matrix and is large.

    The piece below the diagonal is left out: at 65,536 rows in blocks of 16,384 that leaves 56% of
    the tiles instead of 62%. Smaller pieces leave less, but their products are slow.
    """
    if not symmetric or i != j or i.stop - i.start <= DIAGONAL:
        yield i, j
        return
    middle = i.start + whole_groups((i.stop - i.start) // 2)
    first, second = slice(i.start, middle), slice(middle, i.stop)
    yield first, first
    yield first, second
    yield second, second
