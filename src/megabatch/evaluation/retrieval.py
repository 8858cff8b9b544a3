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
(`chance_metrics`), neither 0% nor 100%.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from megabatch.evaluation.answers import Answers, Right, place
from megabatch.ranks import all_gather_rows
from megabatch.similarity.distributed.comm import agree, group_name


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
    _check_ks(ks)
    if name := group_name(group):
        _check_features(x, y, rows_here=False)
        given = [kind for kind, ids in (("x_ids", x_ids), ("y_ids", y_ids)) if ids is not None]
        terms = f"retrieval_metrics, width {x.shape[1]}, {x.dtype}, {given or 'no ids'}, ks {[*ks]}"
        agree(name, terms, [], x.device)
        x, y = all_gather_rows(x, group), all_gather_rows(y, group)
        x_ids, y_ids = (i if i is None else all_gather_rows(i, group) for i in (x_ids, y_ids))
    answers = _answers_by_ids(x, y, x_ids, y_ids)
    return metrics_by_answers(x, y, answers, ks=ks, group=group)


@torch.no_grad()
def metrics_by_answers(
    x: Tensor, y: Tensor, answers: Answers, *, ks: Sequence[int], group: object = "local"
) -> dict[str, float]:
    """`retrieval_metrics` of finite features, with right answers of any kind.

    Every rank of the group holds all rows already.
    """
    return {
        **_one_way("x_to_y", x, y, answers.there, ks, group),
        **_one_way("y_to_x", y, x, answers.back, ks, group),
    }


def chance_metrics(
    x_ids: Tensor, y_ids: Tensor, *, ks: Sequence[int] = (1, 5, 10)
) -> dict[str, float]:
    """The figures of answers in random order, with the keys of `retrieval_metrics`, from ids alone.

    Raises:
        TypeError, ValueError: ids are not int64 (m,) and (n,), or no row has a right answer.
    """
    _check_ks(ks)
    for name, ids in (("x_ids", x_ids), ("y_ids", y_ids)):
        _check_ids(name, ids)
    return chance_by_answers(Answers.by_ids(x_ids, y_ids), ks=ks)


def chance_by_answers(answers: Answers, *, ks: Sequence[int]) -> dict[str, float]:
    """`chance_metrics` with right answers of any kind."""
    metrics: dict[str, float] = {}
    m, n = len(answers.there.counts), len(answers.back.counts)
    for name, right, among in (("x_to_y", answers.there, n), ("y_to_x", answers.back, m)):
        counts = right.counts[_answerable(name, right)]
        metrics |= summarise(name, torch.zeros_like(counts), among - counts, counts, ks)
    return metrics


def summarise(
    name: str, above: Tensor, equal: Tensor, tied: Tensor, ks: Sequence[int]
) -> dict[str, float]:
    """The figures of one direction from each query's counts, int64 (q,) (see the module)."""
    return {
        **{f"{name}/recall@{k}": r for k, r in expected_recalls(above, equal, tied, ks).items()},
        f"{name}/median_rank": _median(above + 1 + equal.double() / (tied + 1)),
        f"{name}/queries": len(above),
    }


def expected_recalls(
    above: Tensor, equal: Tensor, tied: Tensor, ks: Sequence[int]
) -> dict[int, float]:
    """Mean over queries of the probability of a right answer among the first k, for each k."""
    within = answered_within(above, equal, tied, ks)
    return {k: float(right.mean()) for k, right in within.items()}


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


def _answers_by_ids(x: Tensor, y: Tensor, x_ids: Tensor | None, y_ids: Tensor | None) -> Answers:
    """The right answers that `retrieval_metrics` is given, with all its arguments checked."""
    _check_features(x, y)
    if (x_ids is None) != (y_ids is None):
        missing = "x_ids" if x_ids is None else "y_ids"
        raise ValueError(f"x_ids and y_ids go together, but {missing} is None")
    if x_ids is None or y_ids is None:
        if len(x) != len(y):
            raise ValueError(
                f"without ids row i of x belongs to row i of y, so both need the same number of "
                f"rows; got {len(x)} and {len(y)}"
            )
        x_ids = y_ids = torch.arange(len(x), device=x.device)
    else:
        _check_ids_of("x_ids", x_ids, x)
        _check_ids_of("y_ids", y_ids, y)
    return Answers.by_ids(x_ids, y_ids)


def _one_way(
    name: str, x: Tensor, y: Tensor, right: Right, ks: Sequence[int], group: object | None
) -> dict[str, float]:
    answerable = _answerable(name, right)
    placed = place(x[answerable], y, right.of(answerable), group)
    return summarise(name, placed.above, placed.equal, placed.tied, ks)


def _answerable(name: str, right: Right) -> Tensor:
    """A mask (m,) of the rows that have a right answer."""
    answerable = right.counts > 0
    if not bool(answerable.any()):
        raise ValueError(f"{name}: no row has a right answer: no id of x_ids occurs in y_ids")
    return answerable


def _median(values: Tensor) -> float:
    """The middle value, or the mean of the middle two (torch.median takes the lower)."""
    ordered = values.sort().values
    n = len(ordered)
    return float((ordered[(n - 1) // 2] + ordered[n // 2]) / 2)


def _check_features(x: Tensor, y: Tensor, *, rows_here: bool = True) -> None:
    for name, features in (("x", x), ("y", y)):
        if not isinstance(features, Tensor):
            raise TypeError(f"{name} must be a tensor, got {type(features).__name__}")
        if features.ndim != 2:
            raise ValueError(f"{name} must have shape (rows, d), got {tuple(features.shape)}")
        if not features.is_floating_point():
            raise TypeError(f"{name} must have a floating dtype, got {features.dtype}")
        if rows_here and not len(features):
            raise ValueError(f"{name} has no rows")
    if x.shape[1] != y.shape[1]:
        raise ValueError(f"x and y must have the same width, got {x.shape[1]} and {y.shape[1]}")
    if x.dtype != y.dtype:
        raise TypeError(f"x and y must have the same dtype, got {x.dtype} and {y.dtype}")
    if x.device != y.device:
        raise ValueError(f"x and y must be on the same device, got {x.device} and {y.device}")
    for name, features in (("x", x), ("y", y)) if rows_here else ():
        # Comparisons with NaN are false, so such a row would rank first: refuse to give a figure.
        broken = int((~features.isfinite().all(1)).sum())
        if broken:
            raise ValueError(f"{name} has {broken} of {len(features)} rows that are not finite")


def _check_ids(name: str, ids: Tensor) -> None:
    if not isinstance(ids, Tensor) or ids.dtype != torch.int64:
        came = ids.dtype if isinstance(ids, Tensor) else type(ids).__name__
        raise TypeError(f"{name} must be an int64 tensor, got {came}")
    if ids.ndim != 1:
        raise ValueError(f"{name} must have one dimension, got shape {tuple(ids.shape)}")


def _check_ids_of(name: str, ids: Tensor, features: Tensor) -> None:
    _check_ids(name, ids)
    if ids.shape != (len(features),):
        raise ValueError(f"{name} must have shape ({len(features)},), got {tuple(ids.shape)}")
    if ids.device != features.device:
        raise ValueError(f"{name} must be on {features.device} as the features, got {ids.device}")


def _check_ks(ks: Sequence[int]) -> None:
    if not isinstance(ks, Collection):
        raise TypeError(f"ks must be a sequence of integers, got {ks!r}")
    if not len(ks):
        raise ValueError("ks must name at least one k")
    for k in ks:
        if isinstance(k, bool) or not isinstance(k, int):
            raise TypeError(f"ks must be integers, got {k!r}")
        if k < 1:
            raise ValueError(f"ks must be at least 1, got {k}")
