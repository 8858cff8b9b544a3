"""Rank of each row's target column, and each row's top k columns, without forming the matrix."""

from __future__ import annotations

import numbers
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megabatch.similarity import backends, eager
from megabatch.similarity.arguments import accumulator_dtype, check_integers, check_two
from megabatch.similarity.distributed import comm
from megabatch.similarity.distributed.comm import group_name
from megabatch.similarity.distributed.schedule import Ranks, terms
from megabatch.similarity.matrix import Matrix, Side
from megabatch.similarity.slices import strips
from megabatch.torch_internals import transforms_active

if TYPE_CHECKING:
    from megabatch.similarity.triton.ranking import FusedScores


@torch.no_grad()
def ranks(
    x: Tensor,
    y: Tensor,
    target: Tensor,
    *,
    ids: tuple[Tensor, Tensor] | None = None,
    group: object = None,
) -> tuple[Tensor, Tensor]:
    """Count the columns that score above, and equal to, each row's target column. No gradient.

    Args:
        x: (m, d) queries. y: (n, d) candidates, same dtype and device.
        target: (m,) integers, each row's target column, which is not counted itself. Over several
            processes, indices continue from one process's y to the next.
        ids: `(row_ids (m,), col_ids (n,))`, integers; columns with the row's own id are not
            counted. A negative id equals no other id.
        group: processes that share the columns, each with its own rows of x and of y: None for the
            default group if torch.distributed is initialised, a process group, or "local" for this
            process alone.

    Returns:
        `(above, equal)`, int64 (m,). The target's score is computed in the same block of the same
        product as the scores that it is compared with, so rounding cannot separate equal scores
        (except with MKL's float64 on a CPU, which rounds equal columns of one product differently).
        If a row's target scores NaN, every column counts as above.

    Raises:
        TypeError, ValueError: the message names the argument, its value and what was expected.
        IndexError: a target is out of range, on any process.
        CommunicationError: another process is gone, or did not make its call in time.
    """
    _check_no_transform("ranks")
    check_two(x, y, autocast=False)
    backends.warn_of_float32(x)
    target = check_integers("target", target, x.shape[0], x)
    row_ids, col_ids = _check_ids(ids, x, y)
    if x.is_meta:
        return torch.empty_like(target), torch.empty_like(target)
    extremes = (int(target.min()), int(target.max())) if x.shape[0] else (0, -1)
    columns = _Columns(y, col_ids, group, "ranks", extremes)
    _check_targets(columns)
    above = x.new_zeros(x.shape[0], dtype=torch.int64)
    equal = torch.zeros_like(above)
    score = x.new_empty(x.shape[0], dtype=accumulator_dtype(x.dtype))
    scores = _scores_of(x, row_ids)
    with torch.cuda.device_of(x):
        for start, some, _ in columns.chunks():
            scores.find(some, target - start, score)
        for start, some, some_ids in columns.chunks():
            scores.count(some, target - start, score, some_ids, above, equal)
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
    """The k best-scoring columns of each row, best first. No gradient.

    Args:
        x: (m, d). y: (n, d), same dtype and device. k: from 1 to n (of all processes).
        ids: `(row_ids (m,), col_ids (n,))`, integers; pairs of equal ids are left out. If fewer
            than k columns remain, the last scores are -inf and their indices -1.
        group: as in `ranks`; indices continue from process to process.

    Returns:
        `(scores, indices)`, each (m, k): float32 (float64 for float64 features) and int64.

    Raises:
        TypeError, ValueError, CommunicationError: as `ranks`.
    """
    _check_no_transform("topk")
    check_two(x, y, autocast=False)
    backends.warn_of_float32(x)
    if not isinstance(k, numbers.Integral) or isinstance(k, bool):
        raise TypeError(f"k: expected an integer, got {type(k).__name__}")
    k = int(k)
    row_ids, col_ids = _check_ids(ids, x, y)
    columns = _Columns(y, col_ids, group, f"topk, k {k}")
    if not 1 <= k <= columns.number:
        raise ValueError(f"k: expected 1 to {columns.number}, the number of columns, got {k}")
    scores = x.new_full((x.shape[0], k), -torch.inf, dtype=accumulator_dtype(x.dtype))
    indices = torch.full_like(scores, -1, dtype=torch.int64)
    if x.is_meta:
        return scores, indices
    blocks = _scores_of(x, row_ids)
    with torch.cuda.device_of(x):
        for start, some, some_ids in columns.chunks():
            for i, value, column in blocks.best(some, some_ids, k):
                scores[i], order = torch.cat([scores[i], value], dim=1).topk(k, dim=1)
                indices[i] = torch.cat([indices[i], column + start], dim=1).gather(1, order)
    return scores, indices.masked_fill_(scores == -torch.inf, -1)


class _Columns:
    """The columns of all processes, chunk by chunk as a schedule brings them."""

    def __init__(
        self,
        y: Tensor,
        ids: Tensor | None,
        group: object,
        call: str,
        numbers: Sequence[int] = (),
    ) -> None:
        """`numbers`: integers that all processes exchange; the attribute has every process's."""
        self.y, self.ids = y, ids
        table, self.ranks = [[y.shape[0], *numbers]], None
        name = group_name(group)
        if name:
            description = (
                f"{call}, {backends.described(y)}, ids: {'none' if ids is None else 'given'}, "
                f"{terms()}"
            )
            table = comm.agree(name, description, table[0], y.device)
            sizes = [size for size, *_ in table]
            self.ranks = Ranks(name, [sizes, sizes], call, y, grid=False)
        self.number = sum(size for size, *_ in table)
        self.numbers = [rest for _, *rest in table]

    def chunks(self) -> Iterator[tuple[int, Tensor, Tensor | None]]:
        """(index of the first column, columns (n, d), their ids); the next are on their way."""
        if self.ranks is None:
            yield 0, self.y, self.ids
            return
        for each in self.ranks.rounds(Side(self.y, self.ids)):
            for start, side in each.by_rank():
                yield start, side.features, side.ids


class Scores:
    """Scores of x (m, d), with ids (m,) or None, against one chunk of columns at a time."""

    def __init__(self, x: Tensor, ids: Tensor | None) -> None:
        self.x, self.ids = x, ids
        self.rows, self.step = eager.block_shape(x)

    def find(self, y: Tensor, target: Tensor, score: Tensor) -> None:
        """Write each row's target score to `score` if `target` (m,) is one of these columns."""
        for i in strips(len(self.x), self.rows):
            _target_scores(self.x[i], y, target[i], self.step, score[i])

    def count(
        self,
        y: Tensor,
        target: Tensor,
        score: Tensor,
        ids: Tensor | None,
        above: Tensor,
        equal: Tensor,
    ) -> None:
        """Add the counts of these columns to `above` and `equal`, int64 (m,); see `ranks`."""
        matrix = Matrix(Side(self.x, self.ids), Side(y, ids))
        for i in strips(len(self.x), self.rows):
            for j, s in _scores(self.x[i], y, self.step):
                own = torch.arange(j.start, j.stop, device=s.device) == target[i, None]
                skip = own if ids is None else own | _same(matrix.view(i, j), s)
                above[i] += _count(~(s <= score[i, None]) & ~skip)
                equal[i] += _count((s == score[i, None]) & ~skip)

    def best(self, y: Tensor, ids: Tensor | None, k: int) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """Yield blocks: a slice of rows, their best scores (rows, at most k), and the columns.

        A block need not cover all columns: the same rows may be yielded again. A pair of equal ids
        scores -inf, and its column index is meaningless.
        """
        matrix = Matrix(Side(self.x, self.ids), Side(y, ids))
        for i in strips(len(self.x), self.rows):
            for j, s in _scores(self.x[i], y, self.step):
                if self.ids is not None:
                    s.masked_fill_(_same(matrix.view(i, j), s), -torch.inf)
                value, column = s.topk(min(k, s.shape[1]), dim=1)
                yield i, value, column + j.start


def _scores_of(x: Tensor, ids: Tensor | None) -> Scores | FusedScores:
    if not backends.uses_kernels(x):
        return Scores(x, ids)
    from megabatch.similarity.triton.ranking import FusedScores

    return FusedScores(x, ids)


def _check_targets(columns: _Columns) -> None:
    for rank, (low, high) in enumerate(columns.numbers):
        if low < 0 or high >= columns.number:
            where = f" on rank {rank} of the group" if columns.ranks is not None else ""
            raise IndexError(
                f"target: expected columns in [0, {columns.number}), got {low} to {high}{where}"
            )


def _check_no_transform(call: str) -> None:
    if transforms_active():
        raise NotImplementedError(
            f"{call}: expected a call outside torch.func's transforms, as its control flow depends "
            "on values; for several inputs, loop over them"
        )


def _count(mask: Tensor) -> Tensor:
    # As bytes into int32: on the CPU 16 times as fast as the sum of a boolean mask.
    return mask.view(torch.uint8).sum(1, dtype=torch.int32)


def _check_ids(
    ids: tuple[Tensor, Tensor] | None, x: Tensor, y: Tensor
) -> tuple[Tensor | None, Tensor | None]:
    if ids is None:
        return None, None
    if not isinstance(ids, (tuple, list)) or len(ids) != 2:
        raise TypeError(f"ids: expected (row_ids, col_ids), got {type(ids).__name__}")
    row_ids = check_integers("ids[0]", ids[0], x.shape[0], x)
    return row_ids, check_integers("ids[1]", ids[1], y.shape[0], x)


def _same(block: Matrix, scores: Tensor) -> Tensor:
    positive, _ = block.masks(scores)
    return torch.zeros_like(scores, dtype=torch.bool) if positive is None else positive


def _scores(x: Tensor, y: Tensor, columns: int) -> Iterator[tuple[slice, Tensor]]:
    for j in strips(y.shape[0], columns):
        yield j, _block(x, y[j])


def _block(x: Tensor, y: Tensor) -> Tensor:
    """x @ y.T, in which equal columns score the same.

    For the columns left over from groups of 8, MKL uses other kernels, which round differently:
    among 1,027 equal columns, a query's own could score less than nearly all others.
    """
    one = x.new_ones((), dtype=accumulator_dtype(x.dtype))
    n = len(y)
    if missing := -n % 16:
        y = torch.cat([y, y.new_zeros(missing, y.shape[1])])
    return eager.logits(x, y, one)[:, :n]


def _target_scores(x: Tensor, y: Tensor, target: Tensor, step: int, out: Tensor) -> None:
    """Each row's score of its target, from the same block in which the sweep will compute it.

    Rows whose target is none of these columns stay unchanged.
    """
    block = torch.where((target >= 0) & (target < y.shape[0]), target // step, -1)
    for number in block.unique().tolist():
        if number < 0:
            continue
        start = number * step
        s = _block(x, y[start : start + step])
        rows = (block == number).nonzero().squeeze(1)
        out[rows] = s[rows, target[rows] - start]
