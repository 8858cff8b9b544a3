"""Rows and columns in the order of their ids, so that pairs of equal ids meet in few tiles.

The fused kernels pass over a tile with one exponential a logit and no mask where the ids of its
rows and columns cannot meet; in any order of rows, most tiles of a large batch hold some pair.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from megabatch.similarity.pairs import PLAIN, Pairs


class IdOrder(NamedTuple):
    """A matrix whose rows and columns are sorted by id; ids are None where nothing is sorted."""

    x: Tensor
    y: Tensor
    pairs: Pairs
    rows: Tensor | None = None  #: (m,) the row of the given matrix that each sorted row is
    columns: Tensor | None = None  #: (n,) likewise

    @classmethod
    def of(cls, x: Tensor, y: Tensor, pairs: Pairs) -> IdOrder:
        """Sort a whole matrix x (m, d) against y (n, d); copies both, if there are ids.

        Its vectors are contiguous, as kernels want them: not strided, not expanded.
        """
        if pairs.row_ids is None or pairs.column_ids is None:
            ceiling = None if pairs.ceiling is None else pairs.ceiling.contiguous()
            return cls(x, y, replace(pairs, ceiling=ceiling))
        rows = torch.argsort(pairs.row_ids, stable=True)
        # Pairs (i, i) stay on the diagonal only if both sides are sorted alike.
        alike = pairs.diagonal != PLAIN or pairs.column_ids is pairs.row_ids
        columns = rows if alike else torch.argsort(pairs.column_ids, stable=True)
        ceiling = None if pairs.ceiling is None else pairs.ceiling[rows]
        ids = pairs.row_ids[rows], pairs.column_ids[columns]
        ordered = x[rows]
        return cls(
            ordered,
            ordered if y is x and alike else y[columns],
            Pairs(pairs.diagonal, *ids, ceiling),
            rows,
            columns,
        )


def sort(values: Tensor, order: Tensor | None, dim: int) -> Tensor:
    """`values` in the sorted matrix's order along `dim`."""
    return values if order is None else values.index_select(dim, order)


def restore(values: Tensor, order: Tensor | None, dim: int) -> Tensor:
    """`values` of the sorted matrix in the given one's order along `dim`."""
    return values if order is None else torch.empty_like(values).index_copy_(dim, order, values)
