"""Recall@k and median rank in both directions, without the matrix of all scores.

A query's answers are ranked by score and ties are broken at random; every figure here is the
expectation over those random orders, in closed form. For one query let

- `above` be the wrong columns that score strictly more than its best right column,
- `equal` be the wrong columns that score the same as it, and
- `tied` the right columns that score the same as it, itself included (at least 1).

The `equal + tied` columns come in random order after the first `above`, so

- a right answer is among the first k with probability `1 - C(equal, s) / C(equal + tied, s)`,
  where `s = k - above` is the number of tied columns that still fit (0 if s <= 0, 1 if s > equal);
- its expected rank is `above + 1 + equal / (tied + 1)`; with one right column a tie counts half.

A collapsed model, all of whose features are equal, therefore scores exactly what guessing scores
(`figures_and_chance`), neither 0% nor 100%.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from megabatch.evaluation.tokens import Features, Tokens, scores
from megabatch.ranks import all_gather_rows, local_range
from megabatch.similarity import eager, settings
from megabatch.similarity.arguments import (
    accumulator_dtype,
    check_integers,
    check_same_rows,
    check_two,
)
from megabatch.similarity.distributed.comm import agree, group_name
from megabatch.similarity.matrix import strips

# Scores that are in memory at a time, whole rows of them; on a CPU they stay in its cache. Those of
# 16 rows take less than features, and products of fewer are slow.
_CPU_SCORES, _GPU_SCORES, _ROWS = 2**22, 2**26, 16
# Texts whose tokens are padded to the longest of them, and scored, at a time.
_CPU_TEXTS, _GPU_TEXTS = 256, 1024


@dataclass(frozen=True)
class Right:
    """The right columns of each of m rows: for row i `columns[start[i] : start[i] + counts[i]]`.

    columns: int64, in ascending order within a row. start, counts: int64 (m,).
    """

    columns: Tensor
    start: Tensor
    counts: Tensor

    def of(self, rows: Tensor | slice) -> Right:
        """The right columns of some rows."""
        return Right(self.columns, self.start[rows], self.counts[rows])

    def pairs(self) -> tuple[Tensor, Tensor]:
        """All pairs by row, int64 (p,) each: rows and columns."""
        rows = torch.repeat_interleave(self.counts)
        first = self.counts.cumsum(0) - self.counts
        within = torch.arange(len(rows), device=rows.device) - first[rows]
        return rows, self.columns[self.start[rows] + within]

    def of_row(self, row: int) -> Tensor:
        """The right columns of one row."""
        start = int(self.start[row])
        return self.columns[start : start + int(self.counts[row])]


class Answers(NamedTuple):
    """The right columns of rows, and the right rows of columns."""

    there: Right
    back: Right


def answers_by_ids(row_ids: Tensor, column_ids: Tensor) -> Answers:
    """Columns with the row's id are right, int64 (m,) and (n,); a negative id equals nothing."""

    def one_way(row_ids: Tensor, column_ids: Tensor) -> Right:
        sorted_ids, order = column_ids.sort(stable=True)
        start = torch.searchsorted(sorted_ids, row_ids)
        counts = torch.searchsorted(sorted_ids, row_ids, right=True) - start
        return Right(order, start, torch.where(row_ids >= 0, counts, 0))

    return Answers(one_way(row_ids, column_ids), one_way(column_ids, row_ids))


def answers_by_pairs(rows: Tensor, columns: Tensor, m: int, n: int) -> Answers:
    """The pairs (rows[i], columns[i]) are right, int64 (p,), each once; of m rows and n columns.

    So a column may be right for rows that do not share their other columns, which ids cannot say.
    """

    def one_way(rows: Tensor, columns: Tensor, m: int) -> Right:
        columns, order = columns.sort()
        rows, by_row = rows[order].sort(stable=True)
        counts = rows.bincount(minlength=m)
        return Right(columns[by_row], counts.cumsum(0) - counts, counts)

    return Answers(one_way(rows, columns, m), one_way(columns, rows, n))


@torch.no_grad()
def place(
    x: Features, y: Features, answers: Answers, group: object = "local"
) -> tuple[Tensor, Tensor]:
    """`above`, `equal` and `tied` of each row and of each column, int64 (3, m) and (3, n).

    Those of one without a right answer mean nothing. Of two sweeps over the matrix the first finds
    the scores of the best right pairs. Equal columns score the same, and equal rows.

    Args:
        x: (m, d). y: (n, d). Or tokens, scored by late interaction.
        answers: their right answers.
        group: ranks that share the work; each holds all of x and y, and gets all results.
    """
    like = x.features if isinstance(x, Tokens) else x
    dtype, sizes = accumulator_dtype(like.dtype), (len(x), len(y))
    best = [like.new_full((size,), -torch.inf, dtype=dtype) for size in sizes]
    counts = [torch.zeros(3, size, dtype=torch.int64, device=like.device) for size in sizes]
    with settings.without_autocast(like):
        for s, parts, right in _blocks(x, y, answers.there, group, right_only=True):
            for side, part in enumerate(parts):
                best[side][part].scatter_reduce_(0, right[side], s[right], "amax")
        best = [all_gather_rows(one[None], group).amax(0) for one in best]
        for s, parts, right in _blocks(x, y, answers.there, group):
            for side, part in enumerate(parts):
                _count(counts[side][:, part], s, best[side][part], right, side)
    rows, columns = (all_gather_rows(one[None], group).sum(0) for one in counts)
    return rows, columns


def _blocks(
    x: Features, y: Features, right: Right, group: object, *, right_only: bool = False
) -> Iterator[tuple[Tensor, tuple[slice, slice], tuple[Tensor, Tensor]]]:
    """Scores of this rank's rows, their rows and columns, and where the right pairs' scores are.

    `right_only`: leave out blocks without a right pair.
    """
    n = len(y)
    if isinstance(x, Tokens):
        height = width = _GPU_TEXTS if x.lengths.is_cuda else _CPU_TEXTS
    else:
        height = _ROWS * max(1, (_GPU_SCORES if x.is_cuda else _CPU_SCORES) // n // _ROWS)
        y = eager.whole_groups(y) if isinstance(y, Tensor) else y  # once, not in each block
        width = len(y)
    mine = local_range(len(x), group, block=height)
    for start in mine[::height]:
        i = slice(start, min(mine.stop, start + height))
        rows, columns = right.of(i).pairs()
        for j in strips(n, width):
            here = (columns >= j.start) & (columns < j.stop)
            if right_only and not bool(here.any()):
                continue
            s = scores(x, y, i, slice(j.start, j.start + width))[:, : j.stop - j.start]
            yield s, (i, j), (rows[here], columns[here] - j.start)


def _count(
    counts: Tensor, s: Tensor, best: Tensor, right: tuple[Tensor, Tensor], side: int
) -> None:
    """Add a block of scores to the counts of its rows (`side` 0) or columns (1), (3, m).

    best: (m,) scores of their best right pairs; right: where in the block those pairs are.
    """
    (above, equal, tied), limit = counts, best.unsqueeze(1 - side)
    # As bytes into int32: on the CPU 16 times as fast as the sum of a boolean mask.
    above += (~(s <= limit)).view(torch.uint8).sum(1 - side, dtype=torch.int32)  # NaN, too
    equal += (s == limit).view(torch.uint8).sum(1 - side, dtype=torch.int32)
    is_best = (s[right] == best[right[side]]).long()
    tied.scatter_add_(0, right[side], is_best)
    equal.scatter_add_(0, right[side], -is_best)


@torch.no_grad()
def retrieval_metrics(
    x: Tensor,
    y: Tensor,
    *,
    x_ids: Tensor | None = None,
    y_ids: Tensor | None = None,
    ks: Sequence[int] = (1, 5, 10),
    group: object | None = None,
) -> dict[str, float]:
    """Recall@k and median rank of the inner products `x @ y.T`, in both directions.

    Args:
        x: features (m, d), any floating-point dtype, compared as they are, without normalisation.
        y: features (n, d), of the same dtype and device.
        x_ids, y_ids: int64 (m,) and (n,), both or neither. All columns whose id equals the row's
            are right answers, and the best-ranked of them counts. A negative id equals no other id.
            Without ids, row i belongs to column i, and m must equal n.
        ks: the k of recall@k, each at least 1. If k exceeds the number of columns, recall@k is 1.
        group: as in `megabatch.similarity.ranks`. Each rank passes any number of rows of its own;
            they are gathered, the ranks share the queries, and each returns the figures of all
            rows, concatenated in the order of ranks. "local": this process's rows alone.

    Returns:
        For `x_to_y` and `y_to_x` each: `x_to_y/recall@k` (a fraction), `x_to_y/median_rank`
        (1 is best; mid-ranks for ties) and `x_to_y/queries`, the number of rows that have a right
        answer at all; the others are left out of the figures.

    Raises:
        TypeError, ValueError: arguments have wrong types, shapes or lengths; features are not
            finite; no row has a right answer.
    """
    wrong = not isinstance(ks, Collection) or any(type(k) is not int or k < 1 for k in ks)
    if wrong or not len(ks):
        raise ValueError(f"ks: expected integers from 1, got {ks!r}")
    check_two(x, y, autocast=False)
    if name := group_name(group):
        given = [kind for kind, ids in (("x_ids", x_ids), ("y_ids", y_ids)) if ids is not None]
        terms = f"retrieval_metrics, width {x.shape[1]}, {x.dtype}, {given or 'no ids'}, ks {[*ks]}"
        agree(name, terms, [], x.device)
        x, y = all_gather_rows(x, group), all_gather_rows(y, group)
        x_ids, y_ids = (i if i is None else all_gather_rows(i, group) for i in (x_ids, y_ids))
    for name, features in (("x", x), ("y", y)):
        # Comparisons with NaN are false, so such a row would rank first: refuse to give a figure.
        broken = int((~features.isfinite().all(1)).sum())
        if broken or not len(features):
            why = f"{broken} of {len(features)} rows that are not finite" if broken else "no rows"
            raise ValueError(f"{name} has {why}")
    if x_ids is None and y_ids is None:
        check_same_rows(x, y)
        x_ids = y_ids = torch.arange(len(x), device=x.device)
    x_ids = check_integers("x_ids", x_ids, len(x), x)
    y_ids = check_integers("y_ids", y_ids, len(y), y)
    return figures_and_chance(x, y, answers_by_ids(x_ids, y_ids), ks=ks, group=group)[0]


@torch.no_grad()
def figures_and_chance(
    x: Features,
    y: Features,
    answers: Answers,
    *,
    ks: Sequence[int],
    group: object = "local",
    ways: tuple[str, str] = ("x_to_y", "y_to_x"),
) -> tuple[dict[str, float], dict[str, float]]:
    """The figures of finite features, and of answers in random order.

    Every rank of the group holds all rows already. `ways`: the directions' names in the keys.
    """
    if not bool((answers.there.counts > 0).any()):
        raise ValueError(f"{ways[0]}: no row has a right answer: no id of x_ids occurs in y_ids")
    figures: dict[str, float] = {}
    chance: dict[str, float] = {}
    placed = place(x, y, answers, group)
    for name, columns, right, found in zip(ways, (y, x), answers, placed, strict=True):
        answerable = right.counts > 0
        figures |= _summarise(name, found[:, answerable], ks)
        tied = right.counts[answerable]
        wrong = len(columns) - tied
        chance |= _summarise(name, torch.stack([torch.zeros_like(tied), wrong, tied]), ks)
    return figures, chance


def _summarise(name: str, counts: Tensor, ks: Sequence[int]) -> dict[str, float]:
    """The figures of one direction from each query's counts, int64 (3, q) (see the module)."""
    above, equal, tied = counts
    ranks = (above + 1 + equal.double() / (tied + 1)).sort().values
    middle = ranks[[(len(ranks) - 1) // 2, len(ranks) // 2]]  # torch.median takes the lower
    return {
        **{f"{name}/recall@{k}": float(answered_within(counts, k).mean()) for k in ks},
        f"{name}/median_rank": float(middle.mean()),
        f"{name}/queries": len(above),
    }


def answered_within(counts: Tensor, k: int) -> Tensor:
    """Each query's probability of a right answer among the first k, float64 (q,), from `place`."""
    above, equal, tied = counts
    missed = torch.ones(len(above), dtype=torch.float64, device=above.device)
    last = int((above + equal).max()) + 1  # from that rank on, every query has been answered
    for position in range(min(k, last)):
        # Of the tied columns, `drawn` wrong ones came before this position.
        drawn = position - above
        wrong_left = (equal - drawn).clamp(min=0)
        miss_here = wrong_left.double() / (wrong_left + tied)
        missed = torch.where(drawn >= 0, missed * miss_here, missed)
    return 1 - missed
