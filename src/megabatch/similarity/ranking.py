"""Rank of each row's target column, and each row's top k columns, without forming the matrix."""

from __future__ import annotations

import numbers
from collections.abc import Iterator

import torch
from torch import Tensor

from megabatch.similarity import backends, eager, settings
from megabatch.similarity.arguments import (
    accumulator_dtype,
    check_id_pair,
    check_integers,
    check_two,
)
from megabatch.similarity.distributed import comm
from megabatch.similarity.distributed.comm import group_name
from megabatch.similarity.distributed.schedule import Ranks, terms
from megabatch.similarity.matrix import Matrix, Side, strips
from megabatch.similarity.softmax import check_matrix, maxsim_tiles
from megabatch.torch_internals import transforms_active


@torch.no_grad()
def ranks(
    x: Tensor,
    y: Tensor,
    target: Tensor,
    *,
    ids: tuple[Tensor, Tensor] | None = None,
    col_lengths: Tensor | None = None,
    group: object = None,
) -> tuple[Tensor, Tensor]:
    """Count the columns that score above, and equal to, each row's target column. No gradient.

    Args:
        x: (m, d) queries. y: (n, d) candidates, same dtype and device. Or (m, l, d) and (n, k, d),
            late interaction: a score is the sum over the query's tokens of the largest product with
            a token of the candidate. Zeros in place of a token add nothing.
        target: (m,) integers, each row's target column, which is not counted itself. Over several
            processes, indices continue from one process's y to the next.
        ids: `(row_ids (m,), col_ids (n,))`, integers; columns with the row's own id are not
            counted. A negative id equals no other id.
        col_lengths: (n,) integers: of late interaction's candidates, how many of the first tokens
            count. One without any scores -inf.
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
    rows, cols = _checked("ranks", x, y, ids, col_lengths)
    target = check_integers("target", target, x.shape[0], x)
    if x.is_meta:
        return torch.empty_like(target), torch.empty_like(target)
    bounds = [int(target.min()), int(target.max())] if len(x) else [0, -1]
    columns = _Columns(cols, group, "ranks", bounds)
    for rank, (low, high) in enumerate(columns.numbers):
        if low < 0 or high >= columns.number:
            where = f" on rank {rank} of the group" if columns.ranks is not None else ""
            raise IndexError(
                f"target: expected columns in [0, {columns.number}), got {low} to {high}{where}"
            )
    counts = target.new_zeros(2, len(x))
    score = x.new_empty(len(x), dtype=accumulator_dtype(x.dtype))
    with torch.cuda.device_of(x), settings.without_autocast(x):
        for start, some in columns.chunks():
            Scores(rows, some).find(target - start, score)
        for start, some in columns.chunks():
            Scores(rows, some).count(target - start, score, counts)
    return counts[0], counts[1]


@torch.no_grad()
def topk(
    x: Tensor,
    y: Tensor,
    k: int,
    *,
    ids: tuple[Tensor, Tensor] | None = None,
    col_lengths: Tensor | None = None,
    group: object = None,
) -> tuple[Tensor, Tensor]:
    """The k best-scoring columns of each row, best first. No gradient.

    Args:
        x, y, col_lengths: as in `ranks`. k: from 1 to n (of all processes).
        ids: `(row_ids (m,), col_ids (n,))`, integers; pairs of equal ids are left out. If fewer
            than k columns remain, the last scores are -inf and their indices -1, as for
            candidates without tokens.
        group: as in `ranks`; indices continue from process to process.

    Returns:
        `(scores, indices)`, each (m, k): float32 (float64 for float64 features) and int64.

    Raises:
        TypeError, ValueError, CommunicationError: as `ranks`.
    """
    rows, cols = _checked("topk", x, y, ids, col_lengths)
    if not isinstance(k, numbers.Integral) or isinstance(k, bool):
        raise TypeError(f"k: expected an integer, got {type(k).__name__}")
    k = int(k)
    columns = _Columns(cols, group, f"topk, k {k}", [])
    if not 1 <= k <= columns.number:
        raise ValueError(f"k: expected 1 to {columns.number}, the number of columns, got {k}")
    best = x.new_full((len(x), k), -torch.inf, dtype=accumulator_dtype(x.dtype))
    indices = torch.full_like(best, -1, dtype=torch.int64)
    if x.is_meta:
        return best, indices
    with torch.cuda.device_of(x), settings.without_autocast(x):
        for start, some in columns.chunks():
            for i, value, column in Scores(rows, some).best(k):
                best[i], order = torch.cat([best[i], value], dim=1).topk(k, dim=1)
                indices[i] = torch.cat([indices[i], column + start], dim=1).gather(1, order)
    return best, indices.masked_fill_(best == -torch.inf, -1)


def _checked(
    call: str,
    x: Tensor,
    y: Tensor,
    ids: tuple[Tensor, Tensor] | None,
    col_lengths: Tensor | None,
) -> tuple[Side, Side]:
    """Both sides of the matrix."""
    if transforms_active():
        raise NotImplementedError(
            f"{call}: expected a call outside torch.func's transforms, as its control flow depends "
            "on values; for several inputs, loop over them"
        )
    check_two(x, y, autocast=False, tokens=isinstance(x, Tensor) and x.dim() == 3)
    _, lengths = check_matrix(x, y, None, col_lengths)
    if ids is None:
        return Side(x), Side(y, lengths=lengths)
    row_ids, col_ids = check_id_pair(ids, x, y, "(row_ids, col_ids)")
    return Side(x, row_ids), Side(y, col_ids, lengths=lengths)


class _Columns:
    """The columns of all processes, chunk by chunk as a schedule brings them."""

    def __init__(self, own: Side, group: object, call: str, numbers: list[int]) -> None:
        """`numbers`: integers that all processes exchange; the attribute has every process's."""
        self.own, self.ranks, y, name = own, None, own.features, group_name(group)
        table = [[len(y), *numbers]]
        if name:
            ids, lengths = ("none" if t is None else "given" for t in (own.ids, own.lengths))
            description = f"{call}, {backends.described(y)}, ids: {ids}, lengths: {lengths}"
            description = f"{description}, {terms()}"
            table = comm.agree(name, description, table[0], y.device)
            sizes = [size for size, *_ in table]
            self.ranks = Ranks(name, [sizes, sizes], call, y, grid=False)
        self.number = sum(size for size, *_ in table)
        self.numbers = [rest for _, *rest in table]

    def chunks(self) -> Iterator[tuple[int, Side]]:
        """(index of the first column, some columns); the next are on their way."""
        if self.ranks is None:
            yield 0, self.own
            return
        for each in self.ranks.rounds(self.own):
            yield from each.by_rank()


class Scores:
    """Scores of rows against a chunk of columns, block by block."""

    def __init__(self, rows: Side, cols: Side) -> None:
        self._matrix, x = Matrix(rows, cols), rows.features
        self._tiles = None
        if x.dim() == 2:
            self._height, self._width = eager.block_shape(x)
        else:
            none = x.new_empty(0, dtype=accumulator_dtype(x.dtype))
            self._tiles = maxsim_tiles(x)(self._matrix, none, none)
            self._height, self._width = self._tiles.block_rows, self._tiles.block_cols

    def find(self, target: Tensor, score: Tensor) -> None:
        """Write each row's target score to `score` if `target` (m,) is one of these columns.

        It is computed in the block in which `count` computes it again.
        """
        m, n = self._matrix.shape
        here = (target >= 0) & (target < n)
        block = torch.where(here, target // self._width, -1)
        for i in strips(m, self._height):
            for number in block[i][here[i]].unique().tolist():
                start, rows = number * self._width, (block[i] == number).nonzero().squeeze(1)
                s = self._block(i, slice(start, min(start + self._width, n)))
                score[i][rows] = s[rows, target[i][rows] - start]

    def count(self, target: Tensor, score: Tensor, counts: Tensor) -> None:
        """Add to `counts` (2, m), int64, how many columns score above and equal; see `ranks`."""
        for i, j, s, same in self._blocks():
            skip = torch.arange(j.start, j.stop, device=s.device) == target[i, None]
            skip = skip if same is None else skip | same
            for k, counted in enumerate((~(s <= score[i, None]), s == score[i, None])):
                # As bytes into int32: on the CPU 16 times as fast as the sum of a boolean mask.
                counts[k, i] += (counted & ~skip).view(torch.uint8).sum(1, dtype=torch.int32)

    def best(self, k: int) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """Yield blocks: a slice of rows, their best scores (rows, at most k), and the columns.

        A block need not cover all columns: the same rows may be yielded again. A pair of equal ids
        scores -inf, and its column index is meaningless.
        """
        for i, j, s, same in self._blocks():
            if same is not None:
                s.masked_fill_(same, -torch.inf)
            value, column = s.topk(min(k, s.shape[1]), dim=1)
            yield i, value, column + j.start

    def whole(self) -> Tensor:
        """All scores, (m, n)."""
        x = self._matrix.rows.features
        found = x.new_empty(self._matrix.shape, dtype=accumulator_dtype(x.dtype))
        for i, j, s, _ in self._blocks():
            found[i, j] = s
        return found

    def _blocks(self) -> Iterator[tuple[slice, slice, Tensor, Tensor | None]]:
        """Rows, columns, their scores, and which pairs have equal ids, None if there are none."""
        m, n = self._matrix.shape
        for i in strips(m, self._height):
            for j in strips(n, self._width):
                s = self._block(i, j)
                yield i, j, s, self._matrix.view(i, j).masks(s)[0]

    def _block(self, i: slice, j: slice) -> Tensor:
        if self._tiles is not None:
            return self._tiles.scores(i, j)
        x, y = self._matrix.rows.features[i], self._matrix.cols.features[j]
        return eager.logits(x, eager.whole_groups(y))[:, : len(y)]
