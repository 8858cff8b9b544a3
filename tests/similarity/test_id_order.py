from __future__ import annotations

import pytest
import torch

from megabatch.similarity.id_order import IdOrder, restore, sort
from megabatch.similarity.pairs import DROPPED, PAIRED, PLAIN, Pairs


def some(n: int) -> torch.Tensor:
    return torch.randint(-1, 5, (n,))


@pytest.mark.parametrize("diagonal", [PLAIN, PAIRED, DROPPED])
def test_each_row_keeps_its_features_id_and_ceiling(diagonal: str) -> None:
    x, y, ids, ceiling = (
        torch.randn(20, 3),
        torch.randn(20, 3),
        (some(20), some(20)),
        torch.rand(20),
    )
    matrix = IdOrder.of(x, y, Pairs(diagonal, *ids, ceiling))
    assert matrix.rows is not None
    assert matrix.columns is not None
    assert torch.equal(matrix.x, x[matrix.rows])
    assert torch.equal(matrix.y, y[matrix.columns])
    assert matrix.pairs.row_ids is not None
    assert torch.equal(matrix.pairs.row_ids, ids[0].sort(stable=True).values)
    assert matrix.pairs.column_ids is not None
    assert torch.equal(matrix.pairs.column_ids, ids[1][matrix.columns])
    assert matrix.pairs.ceiling is not None
    assert torch.equal(matrix.pairs.ceiling, ceiling[matrix.rows])
    if diagonal == PLAIN:
        assert torch.equal(matrix.pairs.column_ids, ids[1].sort(stable=True).values)
    else:  # pairs (i, i) stay on the diagonal
        assert torch.equal(matrix.rows, matrix.columns)


def test_against_itself_one_copy_serves_both_sides() -> None:
    x, ids = torch.randn(9, 2), some(9)
    matrix = IdOrder.of(x, x, Pairs(DROPPED, ids, ids))
    assert matrix.y is matrix.x


def test_without_ids_nothing_is_copied() -> None:
    x, y = torch.randn(4, 2), torch.randn(5, 2)
    matrix = IdOrder.of(x, y, Pairs())
    assert matrix.x is x
    assert matrix.y is y
    assert sort(x, matrix.rows, 0) is x
    assert restore(x, matrix.rows, 0) is x


@pytest.mark.parametrize("dim", [0, 1])
def test_restore_undoes_sort(dim: int) -> None:
    values, order = torch.randn(6, 6), torch.randperm(6)
    assert torch.equal(restore(sort(values, order, dim), order, dim), values)
