"""The division of a matrix into blocks."""

import math

import hypothesis.strategies as st
from hypothesis import given

from megabatch.similarity import settings
from megabatch.similarity.triton.blocking import GROUP, VECTORS, block_shape

GPU = settings.DEFAULT_WORKSPACE["cuda"]
sizes = st.integers(0, 1 << 25)


@given(sizes, sizes, st.integers(1, 4096), st.sampled_from([2, 4]), st.integers(12, 34))
def test_blocks_fit_and_are_large(m: int, n: int, d: int, item: int, bits: int) -> None:
    workspace = 1 << bits
    rows, cols = block_shape(m, n, d, item, False, workspace)
    assert rows % GROUP == cols % GROUP == 0
    assert item * rows * cols <= max(workspace, item * GROUP**2)
    # However much vectors of rows and columns take. Even parts are at least half of the limit.
    half = workspace // 2 // (item * rows)
    assert cols >= max(GROUP, min(half, n) // 2)


def test_a_block_of_many_rows_is_no_thin_strip() -> None:
    """Vectors of 4M pairs take more than the whole workspace; columns were 512 then."""
    b = 1 << 22
    assert VECTORS * 2 * b > GPU
    rows, cols = block_shape(b, b, 512, 2, False, GPU)
    assert rows == int(math.sqrt(GPU / 2))
    assert cols == rows // 2


def test_columns_make_room_for_vectors_beside_them() -> None:
    rows, cols = block_shape(1 << 21, 1 << 21, 768, 2, False, GPU)
    beside = 4 * 768 * rows + VECTORS * (2 << 21)
    assert 2 * rows * cols + beside <= GPU * 5 // 4
