from __future__ import annotations

import pytest
import torch

from megabatch.similarity.masks import (
    DROPPED,
    PAIRED,
    PLAIN,
    Guide,
    Pairs,
    SortedMatrix,
    restore,
    sort,
)


def random_ids(n: int) -> torch.Tensor:
    return torch.randint(-1, 5, (n,))


@pytest.mark.parametrize("diagonal", [PLAIN, PAIRED, DROPPED])
def test_features_ids_ceilings_and_guides_are_sorted_alike(diagonal: str) -> None:
    x, y, u, v = (torch.randn(20, d) for d in (3, 3, 2, 2))
    ids, ceiling = (random_ids(20), random_ids(20)), torch.rand(20)
    matrix = SortedMatrix.of(x, y, Pairs(diagonal, *ids, ceiling, Guide(u, v)))
    assert matrix.row_order is not None
    assert matrix.col_order is not None
    assert torch.equal(matrix.x, x[matrix.row_order])
    assert torch.equal(matrix.y, y[matrix.col_order])
    assert matrix.pairs.row_ids is not None
    assert torch.equal(matrix.pairs.row_ids, ids[0].sort(stable=True).values)
    assert matrix.pairs.col_ids is not None
    assert torch.equal(matrix.pairs.col_ids, ids[1][matrix.col_order])
    assert matrix.pairs.ceiling is not None
    assert torch.equal(matrix.pairs.ceiling, ceiling[matrix.row_order])
    assert matrix.pairs.guide is not None
    assert torch.equal(matrix.pairs.guide.rows, u[matrix.row_order])
    assert torch.equal(matrix.pairs.guide.cols, v[matrix.col_order])
    if diagonal == PLAIN:
        assert torch.equal(matrix.pairs.col_ids, ids[1].sort(stable=True).values)
    else:  # one order for both sides keeps pairs (i, i) on the diagonal
        assert torch.equal(matrix.row_order, matrix.col_order)


def test_self_similarity_sorts_one_copy_for_both_sides() -> None:
    x, ids = torch.randn(9, 2), random_ids(9)
    matrix = SortedMatrix.of(x, x, Pairs(DROPPED, ids, ids))
    assert matrix.y is matrix.x


def test_without_ids_nothing_is_copied() -> None:
    x, y = torch.randn(4, 2), torch.randn(5, 2)
    matrix = SortedMatrix.of(x, y, Pairs())
    assert matrix.x is x
    assert matrix.y is y
    assert sort(x, matrix.row_order, 0) is x
    assert restore(x, matrix.row_order, 0) is x


@pytest.mark.parametrize("dim", [0, 1])
def test_restore_undoes_sort(dim: int) -> None:
    values, order = torch.randn(6, 6), torch.randperm(6)
    assert torch.equal(restore(sort(values, order, dim), order, dim), values)
