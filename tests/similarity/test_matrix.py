from __future__ import annotations

import pytest
import torch

from megabatch.similarity.matrix import (
    DROPPED,
    PAIRED,
    PLAIN,
    Matrix,
    Orders,
    Side,
    restore,
    sort,
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


def test_without_ids_nothing_is_copied() -> None:
    given = Matrix(Side(torch.randn(4, 2)), Side(torch.randn(5, 2)))
    matrix, orders = sort_by_id(given)
    assert matrix is given
    assert orders == Orders()
    x = given.rows.features
    assert sort(x, None, 0) is x
    assert restore(x, None, 0) is x


def test_a_view_of_a_whole_matrix_is_the_matrix() -> None:
    matrix = Matrix(Side(torch.randn(4, 2)), Side(torch.randn(5, 2)), PAIRED)
    assert matrix.view(slice(0, 4), slice(0, 5)) is matrix
    block = matrix.view(slice(1, 4), slice(4, 5))
    assert block.shape == (3, 1)
    assert (block.row_start, block.col_start) == (1, 4)


@pytest.mark.parametrize("dim", [0, 1])
def test_restore_undoes_sort(dim: int) -> None:
    values, order = torch.randn(6, 6), torch.randperm(6)
    assert torch.equal(restore(sort(values, order, dim), order, dim), values)
