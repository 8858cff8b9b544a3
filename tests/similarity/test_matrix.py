from __future__ import annotations

import pytest
import torch

from megabatch.similarity.matrix import (
    DROPPED,
    PAIRED,
    PLAIN,
    Matrix,
    Side,
    sort_by_id,
)


def random_ids(n: int) -> torch.Tensor:
    return torch.randint(-1, 5, (n,))


@pytest.mark.parametrize("diagonal", [PLAIN, PAIRED, DROPPED])
def test_all_tensors_of_a_side_are_sorted_in_the_same_way(diagonal: str) -> None:
    x, y, u, v = (torch.randn(20, d) for d in (3, 3, 2, 2))
    ids, ceiling = (random_ids(20), random_ids(20)), torch.rand(20)
    given = Matrix(Side(x, ids[0], ceiling, None, u), Side(y, ids[1], None, None, v), diagonal)
    matrix, orders = sort_by_id(given)
    for side, before, order in zip(matrix[:2], given[:2], orders, strict=True):
        assert order is not None
        for tensor, unsorted in zip(side, before, strict=True):
            assert (tensor is None) == (unsorted is None)
            assert tensor is None or torch.equal(tensor, unsorted[order])
    assert torch.equal(matrix.rows.ids, ids[0].sort(stable=True).values)
    if diagonal == PLAIN:
        assert torch.equal(matrix.cols.ids, ids[1].sort(stable=True).values)
    else:  # one order for both sides keeps pairs (i, i) on the diagonal
        assert torch.equal(*orders)


def test_self_similarity_sorts_one_copy_for_both_sides() -> None:
    side = Side(torch.randn(9, 2), random_ids(9))
    matrix, _ = sort_by_id(Matrix(side, side, DROPPED))
    assert matrix.cols is matrix.rows
