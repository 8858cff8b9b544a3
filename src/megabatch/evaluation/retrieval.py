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
(`chance_by_answers`), neither 0% nor 100%.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from megabatch.ranks import all_gather_rows, local_range
from megabatch.similarity import ranks
from megabatch.similarity.arguments import check_integers, check_same_rows, check_two
from megabatch.similarity.distributed.comm import agree, group_name
from megabatch.similarity.eager import block_shape

# Elements of one gathered block of features: 64 MiB in fp32.
_CHUNK_ELEMENTS = 2**24


@dataclass(frozen=True)
class Right:
    """The right columns of each of m rows: for row i `columns[start[i] : start[i] + counts[i]]`.

    columns: int64; those of a row are in ascending order. start, counts: int64 (m,). ids: int64
    (m,) and (n,), if the right columns are those of the row's own id, as for images with captions;
    None if they are given by pairs, as for two texts, where one text may answer several others that
    do not share all of their answers.
    """

    columns: Tensor
    start: Tensor
    counts: Tensor
    ids: tuple[Tensor, Tensor] | None = None

    def of(self, rows: Tensor | slice) -> Right:
        """The right columns of some rows."""
        ids = None if self.ids is None else (self.ids[0][rows], self.ids[1])
        return Right(self.columns, self.start[rows], self.counts[rows], ids)

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
        return Right(order, start, torch.where(row_ids >= 0, counts, 0), (row_ids, column_ids))

    return Answers(one_way(row_ids, column_ids), one_way(column_ids, row_ids))


def answers_by_pairs(rows: Tensor, columns: Tensor, m: int, n: int) -> Answers:
    """The pairs (rows[i], columns[i]) are right, int64 (p,), each once; of m rows and n columns."""

    def one_way(rows: Tensor, columns: Tensor, m: int) -> Right:
        columns, order = columns.sort()
        rows, by_row = rows[order].sort(stable=True)
        counts = rows.bincount(minlength=m)
        return Right(columns[by_row], counts.cumsum(0) - counts, counts)

    return Answers(one_way(rows, columns, m), one_way(columns, rows, n))


class Placed(NamedTuple):
    """Each row's best right column and the columns that compete with it, int64 (m,) each.

    above, equal: the wrong columns that score higher than it, and the same; tied: the right ones
    that score the same, itself included.
    """

    best: Tensor
    above: Tensor
    equal: Tensor
    tied: Tensor


def place(x: Tensor, y: Tensor, right: Right, group: object = "local") -> Placed:
    """Place each row's best right column among the wrong ones; each row must have a right one.

    Args:
        x: (m, d); y: (n, d); right: their right answers.
        group: ranks that share the work; each holds all of these tensors, and gets all results.
    """
    if right.ids is None:
        return _place_by_pairs(x, y, right, group)
    part = local_range(len(x), group, block=block_shape(x)[0])
    mine = slice(part.start, part.stop)
    x, right = x[mine], right.of(mine)
    best, tied = _best_right_columns(x, y, right)
    above, equal = ranks(x, y, best, ids=right.ids, group="local")
    gathered = all_gather_rows(torch.stack([best, above, equal, tied], dim=1), group)
    return Placed(*gathered.unbind(1))


def _place_by_pairs(x: Tensor, y: Tensor, right: Right, group: object) -> Placed:
    """Count the columns above and equal to each right one, and keep the best one's counts.

    Wrong and right columns need not be distinguished: no right column of a row is above its best,
    and those equal to it have the same number of columns above.
    """
    rows, columns = right.pairs()
    block = block_shape(x)[0]
    part = local_range(len(rows), group, block=block)
    step = block * max(1, _CHUNK_ELEMENTS // (block * x.shape[1]))  # bounds x[rows]
    counted = [rows.new_zeros(0, 2)]
    for start in range(part.start, part.stop, step):
        some = slice(start, min(part.stop, start + step))
        counted.append(torch.stack(ranks(x[rows[some]], y, columns[some], group="local"), dim=1))
    above_each, equal_each = all_gather_rows(torch.cat(counted), group).unbind(1)
    above = torch.full_like(right.counts, len(y)).scatter_reduce(0, rows, above_each, "amin")
    is_best = above_each == above[rows]
    zeros = torch.zeros_like(right.counts)
    tied = zeros.scatter_add(0, rows, is_best.long())
    best = zeros.scatter_reduce(0, rows[is_best], columns[is_best], "amax")
    equal = zeros.scatter_reduce(0, rows[is_best], equal_each[is_best], "amax")
    return Placed(best, above, (equal - (tied - 1)).clamp(min=0), tied)


def _best_right_columns(x: Tensor, y: Tensor, right: Right) -> tuple[Tensor, Tensor]:
    """Per row, its best-scoring right column, and how many of them share that score.

    Only right pairs are scored, a bounded number at a time, at least in fp32.
    """
    best, tied = torch.zeros_like(right.counts), torch.zeros_like(right.counts)
    dtype = torch.promote_types(x.dtype, torch.float32)
    for rows in _chunks(right.counts, max(1, _CHUNK_ELEMENTS // x.shape[1])):
        row, column = right.of(rows).pairs()
        score = (x[rows][row].to(dtype) * y[column].to(dtype)).sum(1)
        zeros = torch.zeros_like(right.counts[rows])
        lowest = score.new_full((len(zeros),), -torch.inf)
        is_best = score == lowest.scatter_reduce(0, row, score, "amax")[row]
        tied[rows] = zeros.scatter_add(0, row, is_best.long())
        best[rows] = zeros.scatter_reduce(0, row[is_best], column[is_best], "amax")
    return best, tied


def _chunks(counts: Tensor, most: int) -> Iterator[slice]:
    """Runs of rows with about `most` pairs in total; a single row may have more."""
    sizes = torch.unique_consecutive(counts.cumsum(0) // most, return_counts=True)[1].tolist()
    end = 0
    for size in sizes:
        yield slice(end, end + size)
        end += size


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
    return metrics_by_answers(x, y, answers_by_ids(x_ids, y_ids), ks=ks, group=group)


@torch.no_grad()
def metrics_by_answers(
    x: Tensor,
    y: Tensor,
    answers: Answers,
    *,
    ks: Sequence[int],
    group: object = "local",
    ways: tuple[str, str] = ("x_to_y", "y_to_x"),
) -> dict[str, float]:
    """`retrieval_metrics` of finite features, with right answers of any kind.

    Every rank of the group holds all rows already. `ways`: the directions' names in the keys.
    """
    metrics: dict[str, float] = {}
    for name, queries, columns, right in zip(ways, (x, y), (y, x), answers, strict=True):
        some = _answerable(name, right)
        placed = place(queries[some], columns, right.of(some), group)
        metrics |= _summarise(name, placed.above, placed.equal, placed.tied, ks)
    return metrics


def chance_by_answers(
    answers: Answers, *, ks: Sequence[int], ways: tuple[str, str] = ("x_to_y", "y_to_x")
) -> dict[str, float]:
    """The figures of answers in random order, with the keys of `metrics_by_answers`."""
    metrics: dict[str, float] = {}
    for name, right, others in zip(ways, answers, reversed(answers), strict=True):
        counts = right.counts[_answerable(name, right)]
        wrong = len(others.counts) - counts
        metrics |= _summarise(name, torch.zeros_like(counts), wrong, counts, ks)
    return metrics


def _summarise(
    name: str, above: Tensor, equal: Tensor, tied: Tensor, ks: Sequence[int]
) -> dict[str, float]:
    """The figures of one direction from each query's counts, int64 (q,) (see the module)."""
    ranks = (above + 1 + equal.double() / (tied + 1)).sort().values
    middle = ranks[[(len(ranks) - 1) // 2, len(ranks) // 2]]  # torch.median takes the lower
    within = answered_within(above, equal, tied, ks)
    return {
        **{f"{name}/recall@{k}": float(right.mean()) for k, right in within.items()},
        f"{name}/median_rank": float(middle.mean()),
        f"{name}/queries": len(above),
    }


def answered_within(
    above: Tensor, equal: Tensor, tied: Tensor, ks: Sequence[int]
) -> dict[int, Tensor]:
    """Each query's probability of a right answer among the first k, float64 (q,), for each k."""
    missed = torch.ones(len(above), dtype=torch.float64, device=above.device)
    chances: dict[int, Tensor] = {}
    last = int((above + equal).max()) + 1  # from that rank on, every query has been answered
    done = 0
    for k in sorted(set(ks)):
        for position in range(done, min(k, last)):
            # Of the tied columns, `drawn` wrong ones came before this position.
            drawn = position - above
            wrong_left = (equal - drawn).clamp(min=0)
            miss_here = wrong_left.double() / (wrong_left + tied)
            missed = torch.where(drawn >= 0, missed * miss_here, missed)
        done = max(done, min(k, last))
        chances[k] = 1 - missed
    return {k: chances[k] for k in ks}


def _answerable(name: str, right: Right) -> Tensor:
    """A mask (m,) of the rows that have a right answer."""
    answerable = right.counts > 0
    if not bool(answerable.any()):
        raise ValueError(f"{name}: no row has a right answer: no id of x_ids occurs in y_ids")
    return answerable
