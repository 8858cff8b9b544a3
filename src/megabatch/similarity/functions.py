"""Log-sum-exps along both sides of a similarity matrix, from one sweep, differentiable.

The method is Inf-CL's (arXiv 2410.17243, section 3: tiles that are never stored) with one sweep
for both directions, and FlashAttention's running sums (arXiv 2205.14135).
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from megabatch.similarity import sweep
from megabatch.similarity.arguments import (
    cast_for_autocast,
    check_features,
    check_integers,
    check_same_rows,
    check_scalar,
    check_two,
    check_vector,
)
from megabatch.similarity.distributed.comm import group_name
from megabatch.similarity.ops import ops
from megabatch.similarity.pairs import DROPPED, PAIRED, PLAIN
from megabatch.torch_internals import transforms_active

Ids: TypeAlias = "str | Tensor | tuple[Tensor, Tensor]"


class Split(NamedTuple):
    """One side of a similarity matrix, split by whether a pair's ids are equal; each (rows,)."""

    negative: Tensor  #: log-sum-exp over pairs of different ids; -inf where there is none
    positive: Tensor  #: log-sum-exp over pairs of equal ids; -inf where there is none
    positive_sum: Tensor  #: sum of the logits of the pairs of equal ids
    positive_count: Tensor  #: number of the pairs of equal ids; no gradient


def logsumexp(
    x: Tensor,
    y: Tensor,
    scale: float | Tensor = 1.0,
    *,
    sides: str = "both",
    group: object = None,
) -> tuple[Tensor, Tensor | None]:
    """Log-sum-exp of scale * x @ y.T along each axis, from one sweep that never stores it.

    Args:
        x: (m, d) features, any floating dtype. y: (n, d), same device and dtype; under autocast
            two that it casts to one.
        scale: a number, or a tensor of shape () or (1,); differentiable.
        sides: "both", or "rows" where the columns' side is not wanted and costs nothing.
        group: the processes that share the matrix, each with its own rows of x and of y: None for
            the default group where torch.distributed is initialised, a process group, or "local"
            for this process alone. `rows` and `columns` are those of this process's x and y.

    Returns:
        `(rows (m,), columns (n,))` in float32 (float64 for float64 features); columns is None
        with `sides="rows"`. A side without any pair is -inf and has zero gradient.

    Raises:
        TypeError, ValueError: the message names the argument, what came and what was expected, or
            what each process had where they disagree.
        CommunicationError: another process is gone or did not come in time.
    """
    check_two(x, y)
    both = _both(sides)
    x, y = cast_for_autocast(x, y)
    scale = check_scalar("scale", scale, x)
    matrix = (x, y, scale, None, None, None, PLAIN, both)
    rows, columns, _ = _statistics(matrix, group, "logsumexp")
    return rows[0], columns[0] if both else None


def split_logsumexp(
    x: Tensor,
    y: Tensor | None = None,
    scale: float | Tensor = 1.0,
    *,
    ids: Ids = "paired",
    positives: str = "ids",
    ceiling: Tensor | None = None,
    sides: str = "both",
    group: object = None,
) -> tuple[Split, Split | None]:
    """Log-sum-exps of scale * x @ y.T split by whether the ids of a pair are equal.

    Args:
        x: (m, d) features, any floating dtype.
        y: (n, d), as in `logsumexp`; None: x against itself, each row's pair with itself
            left out everywhere, and half the work, as the matrix is symmetric.
        scale: a number, or a tensor of shape () or (1,); differentiable.
        ids: "paired" (row i belongs to column i), or `(row_ids (m,), column_ids (n,))`, integers;
            with y=None one vector of ids serves both. A negative id equals nothing.
        positives: "ids", pairs of equal ids; or "paired", row i's is column i alone, and other
            pairs of equal ids are left out (known false negatives).
        ceiling: (m,) logits; pairs of different ids whose logit exceeds their row's ceiling are
            left out (margin-based false negatives). No gradient flows into it.
        sides: "both", or "rows" where the columns' side is not wanted and costs nothing.
        group: as in `logsumexp`. "paired" means row i and column i of the same process; ids are
            compared over all processes.

    Returns:
        `(rows, columns)`, a `Split` each, in float32 (float64 for float64 features); columns is
        None with `sides="rows"`. A part without any pair is -inf and has zero gradient.

    Raises:
        TypeError, ValueError, CommunicationError: as `logsumexp`.
    """
    return split_and_count(
        x, y, scale, ids=ids, positives=positives, ceiling=ceiling, sides=sides, group=group
    )[:2]


def split_and_count(
    x: Tensor, y: Tensor | None, scale: float | Tensor, **options: Any
) -> tuple[Split, Split | None, Tensor | None]:
    """`split_logsumexp`, and the number of rows of all processes: see `stacks_and_count`."""
    rows, columns, batch = stacks_and_count(x, y, scale, **options)
    first = split_of(rows)
    if columns is None or columns is rows:
        return first, None if columns is None else first, batch
    return first, split_of(columns), batch


def stacks_and_count(
    x: Tensor,
    y: Tensor | None,
    scale: float | Tensor,
    *,
    ids: Ids = "paired",
    positives: str = "ids",
    ceiling: Tensor | None = None,
    sides: str = "both",
    group: object = None,
    terms: str = "",
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Each side as `split_of` takes it, and the number of rows of all processes.

    That is () int64 on the CPU, known from the handshake; None where this process is alone.
    `terms`: what else all processes must do alike, in words; where these differ each is told so.
    """
    both = _both(sides)
    if y is None:
        check_features("x", x)
        (x,) = cast_for_autocast(x)
    else:
        check_two(x, y)
        x, y = cast_for_autocast(x, y)
    row_ids, column_ids = _check_ids(ids, x, y)
    if positives not in ("ids", "paired"):
        raise ValueError(f"positives: expected 'ids' or 'paired', got {positives!r}")
    if positives == "paired" and y is None:
        raise ValueError("positives: expected 'ids' with y=None, got 'paired'")
    paired = positives == "paired" or row_ids is None
    if paired and y is not None:
        check_same_rows(x, y)
    scale = check_scalar("scale", scale, x)
    if ceiling is not None:
        ceiling = check_vector("ceiling", ceiling, x.shape[0], x)
    diagonal = DROPPED if y is None else PAIRED if paired else PLAIN
    if y is None and (ceiling is not None or row_ids is not column_ids):
        y = x  # these make the matrix asymmetric: the general path, on all tiles
    columns_wanted = both and y is not None
    matrix = (x, y, scale, row_ids, column_ids, ceiling, diagonal, columns_wanted)
    call = f"split_logsumexp, {terms}" if terms else "split_logsumexp"
    rows, columns, sizes = _statistics(matrix, group, call)
    batch = None if sizes is None else sizes[0].sum()
    return rows, (columns if columns_wanted else rows) if both else None, batch


def _statistics(
    matrix: tuple[Any, ...], group: object, call: str
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The operator of one process, or the one of `statistics_ring` with the ranks' sizes."""
    name = group_name(group)
    x, y, scale, *_ = matrix
    inputs = {"x": x, "y": y, "scale": scale}
    grad = torch.is_grad_enabled()
    wanted = [key for key, t in inputs.items() if grad and t is not None and t.requires_grad]
    settings = sweep.settings_of_call(x)
    if not name:
        # Not under torch.func, which may hold any number of calls' logits.
        keep = bool(wanted) and (torch.compiler.is_compiling() or not transforms_active())
        rows, columns, _ = ops.statistics(*matrix, keep, settings)
        return rows, columns, None
    rows, columns, sizes, _ = ops.ring_statistics(*matrix, name, call, ", ".join(wanted), settings)
    return rows, columns, sizes


def _both(sides: str) -> bool:
    if sides not in ("both", "rows"):
        raise ValueError(f"sides: expected 'both' or 'rows', got {sides!r}")
    return sides == "both"


def _check_ids(ids: Ids, x: Tensor, y: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    if isinstance(ids, str):
        if ids != "paired":
            raise ValueError(f"ids: expected 'paired' or int64 tensors, got {ids!r}")
        return None, None
    if isinstance(ids, Tensor):
        if y is not None:
            raise TypeError("ids: expected 'paired' or (row_ids, column_ids), got one tensor")
        both = check_integers("ids", ids, x.shape[0], x)
        return both, both
    if not isinstance(ids, (tuple, list)) or len(ids) != 2:
        came = f"{len(ids)} items" if isinstance(ids, (tuple, list)) else type(ids).__name__
        raise TypeError(f"ids: expected 'paired' or (row_ids, column_ids), got {came}")
    row_ids = check_integers("ids[0]", ids[0], x.shape[0], x)
    return row_ids, check_integers("ids[1]", ids[1], (x if y is None else y).shape[0], x)


def split_of(values: Tensor) -> Split:
    """Of what the operators return: (4, rows), or (1, rows) where no pair can be positive."""
    if values.shape[0] == 4:
        negative, positive, positive_sum, positive_count = values.unbind()
        return Split(negative, positive, positive_sum, positive_count.detach())
    (negative,) = values.unbind()  # no pair can be positive
    nothing = torch.zeros_like(negative)
    return Split(negative, torch.full_like(negative, -math.inf), nothing, nothing)
