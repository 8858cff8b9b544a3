"""Ranks of target columns and the best columns of each row, without the matrix; no gradient."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from megabatch.similarity import sweep, tile_torch
from megabatch.similarity.arguments import accumulator_dtype, check_integers, check_two
from megabatch.similarity.pairs import Pairs
from megabatch.similarity.ring import check_group


@torch.no_grad()
def ranks(
    x: Tensor,
    y: Tensor,
    target: Tensor,
    *,
    ids: tuple[Tensor, Tensor] | None = None,
    group: object = None,
) -> tuple[Tensor, Tensor]:
    """How many columns score above, and how many equal to, each row's target column.

    Args:
        x: (m, d) queries. y: (n, d) candidates, same dtype and device.
        target: (m,) int64, the column each row is held against; itself never counted.
        ids: `(row_ids (m,), column_ids (n,))` int64; columns whose id equals the row's are not
            counted. A negative id equals nothing.
        group: None or "local"; more than one process is not supported yet.

    Returns:
        `(above, equal)`, int64 (m,). The target's score comes from the same block of the same
        product as the scores it is held against, so it neither ties with nor loses to itself.
        A row whose target's score is NaN counts every column as above.

    Raises:
        TypeError, ValueError: the message names the argument, what came and what was expected.
        IndexError: a target is no column of y.
    """
    check_two(x, y)
    check_group(group)
    target = check_integers("target", target, x.shape[0], x)
    if x.shape[0] and (int(target.min()) < 0 or int(target.max()) >= y.shape[0]):
        raise IndexError(
            f"target: expected columns in [0, {y.shape[0]}), "
            f"got {int(target.min())} to {int(target.max())}"
        )
    pairs = _pairs(ids, x, y)
    above = x.new_zeros(x.shape[0], dtype=torch.int64)
    equal = torch.zeros_like(above)
    rows, columns = sweep.block_shape(x)
    for i in sweep.strips(x.shape[0], rows):
        score = _target_scores(x[i], y, target[i], columns)
        for j, s in _scores(x[i], y, columns):
            here = target[i] - j.start
            own = torch.arange(s.shape[1], device=x.device) == here[:, None]
            skip = own if pairs is None else own | _same(pairs.view(i, j), s)
            above[i] += _count(~(s <= score[:, None]) & ~skip)
            equal[i] += _count((s == score[:, None]) & ~skip)
    return above, equal


@torch.no_grad()
def topk(
    x: Tensor,
    y: Tensor,
    k: int,
    *,
    ids: tuple[Tensor, Tensor] | None = None,
    group: object = None,
) -> tuple[Tensor, Tensor]:
    """The k best-scoring columns of each row, best first.

    Args:
        x: (m, d). y: (n, d), same dtype and device. k: from 1 to n.
        ids: `(row_ids (m,), column_ids (n,))` int64; pairs of equal ids are left out. Where
            fewer than k columns remain, the last scores are -inf and their indices -1.
        group: None or "local"; more than one process is not supported yet.

    Returns:
        `(scores, indices)`, each (m, k): float32 (float64 for float64 features) and int64.

    Raises:
        TypeError, ValueError: the message names the argument, what came and what was expected.
    """
    check_two(x, y)
    check_group(group)
    if not isinstance(k, int) or isinstance(k, bool):
        raise TypeError(f"k: expected an integer, got {type(k).__name__}")
    if not 1 <= k <= y.shape[0]:
        raise ValueError(f"k: expected 1 to {y.shape[0]}, the number of columns, got {k}")
    pairs = _pairs(ids, x, y)
    rows, columns = sweep.block_shape(x)
    scores = x.new_empty((x.shape[0], k), dtype=accumulator_dtype(x.dtype))
    indices = torch.empty_like(scores, dtype=torch.int64)
    for i in sweep.strips(x.shape[0], rows):
        best = scores.new_empty((i.stop - i.start, 0))
        where = indices.new_empty((i.stop - i.start, 0))
        for j, s in _scores(x[i], y, columns):
            if pairs is not None:
                s.masked_fill_(_same(pairs.view(i, j), s), -torch.inf)
            value, column = s.topk(min(k, s.shape[1]), dim=1)
            best = torch.cat([best, value], dim=1)
            where = torch.cat([where, column + j.start], dim=1)
            best, order = best.topk(min(k, best.shape[1]), dim=1)
            where = where.gather(1, order)
        scores[i], indices[i] = best, where.masked_fill(best == -torch.inf, -1)
    return scores, indices


def _count(mask: Tensor) -> Tensor:
    # As bytes into int32: on the CPU 16 times as fast as the sum of a boolean mask.
    return mask.view(torch.uint8).sum(1, dtype=torch.int32)


def _pairs(ids: tuple[Tensor, Tensor] | None, x: Tensor, y: Tensor) -> Pairs | None:
    if ids is None:
        return None
    if not isinstance(ids, (tuple, list)) or len(ids) != 2:
        raise TypeError(f"ids: expected (row_ids, column_ids), got {type(ids).__name__}")
    return Pairs(
        row_ids=check_integers("ids[0]", ids[0], x.shape[0], x),
        column_ids=check_integers("ids[1]", ids[1], y.shape[0], x),
    )


def _same(pairs: Pairs, scores: Tensor) -> Tensor:
    positive, _ = pairs.masks(scores)
    return torch.zeros_like(scores, dtype=torch.bool) if positive is None else positive


def _scores(x: Tensor, y: Tensor, columns: int) -> Iterator[tuple[slice, Tensor]]:
    one = x.new_ones((), dtype=accumulator_dtype(x.dtype))
    for j in sweep.strips(y.shape[0], columns):
        yield j, tile_torch.logits(x, y[j], one)


def _target_scores(x: Tensor, y: Tensor, target: Tensor, columns: int) -> Tensor:
    """Each row's score of its target, from the very block that the sweep will meet it in."""
    one = x.new_ones((), dtype=accumulator_dtype(x.dtype))
    out = x.new_empty(x.shape[0], dtype=one.dtype)
    home = target // columns
    for number in home.unique().tolist():
        start = number * columns
        s = tile_torch.logits(x, y[start : start + columns], one)
        rows = (home == number).nonzero().squeeze(1)
        out[rows] = s[rows, target[rows] - start]
    return out
