"""The public reductions of a similarity matrix, differentiable: checks, then the operators."""

from __future__ import annotations

import math
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from megabatch.similarity import backends, settings
from megabatch.similarity.arguments import (
    cast_for_autocast,
    check_features,
    check_guide,
    check_integers,
    check_same_rows,
    check_scalar,
    check_teacher,
    check_two,
    check_vector,
)
from megabatch.similarity.distributed.comm import group_name
from megabatch.similarity.distributed.means import replicated
from megabatch.similarity.masks import DROPPED, PAIRED, PLAIN, Guide, Pairs
from megabatch.similarity.reductions.sigmoid import softplus_sums
from megabatch.similarity.reductions.soft_targets import against_soft_targets
from megabatch.similarity.reductions.softmax import logsumexps
from megabatch.torch_internals import transforms_active

Ids: TypeAlias = "str | Tensor | tuple[Tensor, Tensor]"
Guides: TypeAlias = "Tensor | tuple[Tensor, Tensor]"


class Split(NamedTuple):
    """One side of a similarity matrix, split by whether the ids of a pair are equal; each
    (rows,)."""

    negative: Tensor  #: log-sum-exp over pairs of different ids; -inf if there are none
    positive: Tensor  #: log-sum-exp over pairs of equal ids; -inf if there are none
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
            dtypes may differ if it casts both to one.
        scale: a number, or a tensor of shape () or (1,); differentiable.
        sides: "both", or "rows" to leave out the columns' side, which then costs nothing.
        group: the processes that share the matrix, each with its own rows of x and of y: None for
            the default group where torch.distributed is initialised, a process group, a
            DeviceMesh of one dimension, or of two with all processes (a grid, see
            docs/distributed.md), or "local" for this process alone. `rows` and `columns` are those
            of this process's x and y.

    Returns:
        `(rows (m,), columns (n,))` in float32 (float64 for float64 features); columns is None
        with `sides="rows"`. A side without any pair is -inf and has zero gradient.

    Raises:
        TypeError, ValueError: the message names the argument, its value and what was expected, or
            what each process had where they disagree.
        CommunicationError: another process is gone, or did not make its call in time.
    """
    check_two(x, y)
    both = _both(sides)
    x, y = cast_for_autocast(x, y)
    scale = check_scalar("scale", scale, x)
    rows, columns, _ = _reduce(x, y, scale, Pairs(), both, group, "logsumexp")
    return rows[0], columns[0] if both else None


def split_logsumexp(
    x: Tensor,
    y: Tensor | None = None,
    scale: float | Tensor = 1.0,
    *,
    ids: Ids = "paired",
    positives: str = "ids",
    ceiling: Tensor | None = None,
    guide: Guides | None = None,
    sides: str = "both",
    group: object = None,
) -> tuple[Split, Split | None]:
    """Log-sum-exps of scale * x @ y.T split by whether the ids of a pair are equal.

    Args:
        x: (m, d) features, any floating dtype.
        y: (n, d), as in `logsumexp`. None: x against itself, without each row's pair with itself,
            and at half the cost, as the matrix is symmetric.
        scale: a number, or a tensor of shape () or (1,); differentiable.
        ids: "paired" (row i belongs to column i), or `(row_ids (m,), column_ids (n,))`, integers;
            with y=None one vector of ids serves both. A negative id equals no other id.
        positives: "ids": all pairs of equal ids are positives; or "paired": only (i, i) is, and
            other pairs of equal ids are left out (known false negatives).
        ceiling: (m,) logits; pairs of different ids whose logit exceeds their row's ceiling are
            left out (margin-based false negatives). No gradient flows into it.
        guide: `(guide_x (m, d'), guide_y (n, d'))`, another model's features of any width; with
            y=None one matrix serves both. The ceiling then applies to their products <guide_x_i,
            guide_y_j>, without the scale, instead of the logits. Any floating-point dtype, but
            float64 if and only if x is; autocast does not cast them. Products and sums are in
            float32; NaN exceeds no ceiling. No gradient flows into them.
        sides: "both", or "rows" to leave out the columns' side, which then costs nothing.
        group: as in `logsumexp`. "paired" means row i and column i of the same process; ids are
            compared across all processes.

    Returns:
        `(rows, columns)`, each a `Split`, in float32 (float64 for float64 features); columns is
        None with `sides="rows"`. A log-sum-exp over no pairs is -inf and has zero gradient.

    Raises:
        TypeError, ValueError, CommunicationError: as `logsumexp`.
    """
    options = {"positives": positives, "ceiling": ceiling, "guide": guide, "sides": sides}
    return split_and_count(x, y, scale, ids=ids, group=group, **options)[:2]


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
    guide: Guides | None = None,
    sides: str = "both",
    group: object = None,
    terms: str = "",
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Each side as `split_of` takes it, and the number of rows of all processes.

    That is () int64 on the CPU, known from the handshake; None where this process is alone.
    `terms`: a description of more on which all processes must agree; if it differs, each raises.
    """
    both = _both(sides)
    if y is None:
        check_features("x", x)
        (x,) = cast_for_autocast(x)
    else:
        check_two(x, y)
        x, y = cast_for_autocast(x, y)
    row_ids, col_ids = _check_ids(ids, x, y)
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
    if guide is not None and ceiling is None:
        raise ValueError("ceiling: expected one for the guide's similarities, got None")
    checked_guide = None if guide is None else Guide(*check_guide(guide, x, y))
    diagonal = DROPPED if y is None else PAIRED if paired else PLAIN
    if y is None and (ceiling is not None or row_ids is not col_ids):
        y = x  # these make the matrix asymmetric: the general path, on all tiles
    cols = both and y is not None
    call = f"split_logsumexp, {terms}" if terms else "split_logsumexp"
    pairs = Pairs(diagonal, row_ids, col_ids, ceiling, checked_guide)
    rows, columns, sizes = _reduce(x, y, scale, pairs, cols, group, call)
    batch = None if sizes is None else sizes[0].sum()
    return rows, (columns if cols else rows) if both else None, batch


def softplus_sum(
    x: Tensor,
    y: Tensor,
    scale: float | Tensor,
    bias: float | Tensor,
    *,
    ids: Ids = "paired",
    weight: Tensor | None = None,
    teacher: tuple[Tensor, Tensor, float | Tensor, float | Tensor] | None = None,
    group: object = None,
) -> Tensor:
    """Sum over all pairs (i, j) of weight_i * softplus(-z_ij * (scale * <x_i, y_j> + bias)).

    z_ij is +1 if the ids of a pair are equal and -1 otherwise. If gradients are needed, the forward
    pass computes those of x and y in the same sweep and stores them for the backward pass in the
    dtype of x, in as much memory as x and y take.

    Args:
        x: (m, d) features, any floating dtype. y: (n, d), same device and dtype; under autocast
            dtypes may differ if it casts both to one.
        scale, bias: numbers, or tensors of shape () or (1,); differentiable.
        ids: "paired" (row i belongs to column i), or `(row_ids (m,), column_ids (n,))`, integers. A
            negative id equals nothing.
        weight: (m,) factors, one for all pairs of a row of x, without a gradient.
        teacher: `(u (m, d'), v (n, d'), scale, bias)`, for soft labels T_ij = sigmoid(scale *
            <u_i, v_j> + bias) instead of `ids`: a pair's loss is T softplus(-logit) + (1 - T)
            softplus(logit). Dtypes as of a guide in `split_logsumexp`. Torch operations compute
            this, even on GPUs.
        group: the processes that share the matrix, each with its own rows of x and of y; as in
            `logsumexp`. The sum is over this process's rows and all columns. The gradients are
            computed before the upstream gradient is known, so it must be the same on all
            processes; if it differs, the gradient of y is NaN.

    Returns:
        A scalar in float32 (float64 for float64 features).

    Raises:
        TypeError, ValueError: the message names the argument, its value and what was expected, or
            what each process had where they disagree.
        CommunicationError: another process is gone, or did not make its call in time.
    """
    check_two(x, y)
    x, y = cast_for_autocast(x, y)
    row_ids, col_ids = _check_ids(ids, x, y)
    labels: tuple[Tensor | None, ...] = (None,) * 4
    if teacher is not None:
        if row_ids is not None:
            raise ValueError("ids: expected 'paired' with a teacher's labels, got tensors")
        labels = check_teacher(teacher, x, y)
    elif row_ids is None:
        check_same_rows(x, y)
    scale, bias = check_scalar("scale", scale, x), check_scalar("bias", bias, x)
    if weight is not None:
        weight = check_vector("weight", weight, x.shape[0], x)
        if weight.requires_grad:
            raise ValueError("weight: expected a tensor that needs no gradient, got one that does")
    backends.warn_of_float32(x)
    wanted = [torch.is_grad_enabled() and t.requires_grad for t in (x, y, scale, bias)]
    if not torch.compiler.is_compiling() and transforms_active():
        wanted = [True] * 4  # torch.func.vmap hides what needs a gradient outside of it
    diagonal = PAIRED if row_ids is None and teacher is None else PLAIN
    name = group_name(group)
    if name:
        scale, bias = replicated(scale, group), replicated(bias, group)
    plain = (diagonal, *wanted, name, settings.of_call(x))
    return softplus_sums(x, y, scale, bias, row_ids, col_ids, weight, *labels, *plain)[0]


class SoftTargets(NamedTuple):
    """One side of a student's similarity matrix, compared with a teacher's; each (rows,)."""

    negative: Tensor  #: as in `Split`
    positive: Tensor  #: as in `Split`
    positive_sum: Tensor  #: as in `Split`
    positive_count: Tensor  #: as in `Split`
    cross_entropy: Tensor  #: of the student's softmax along this side against the teacher's


def soft_targets(
    x: Tensor,
    y: Tensor,
    scale: float | Tensor,
    teacher_x: Tensor,
    teacher_y: Tensor,
    teacher_scale: float | Tensor,
    *,
    group: object = None,
) -> tuple[SoftTargets, SoftTargets]:
    """Cross-entropies of scale * x @ y.T against a teacher's softmax, and the log-sum-exps.

    The targets are the softmax of teacher_scale * teacher_x @ teacher_y.T: for each row along the
    columns, and for each column along the rows. Neither matrix is formed. Row i belongs to column
    i.

    Args:
        x, y: (m, d) features, any floating dtype, same device and dtype; under autocast dtypes may
            differ if it casts both to one.
        scale: a number, or a tensor of shape () or (1,); differentiable.
        teacher_x, teacher_y: (m, d'), of any width, in the dtype of x. They get no gradient.
        teacher_scale: as `scale`; it gets no gradient.
        group: as in `logsumexp`.

    Returns:
        `(rows, columns)` in float32 (float64 for float64 features).

    Raises:
        TypeError, ValueError, CommunicationError: as `logsumexp`.
    """
    check_two(x, y)
    check_same_rows(x, y)
    check_two(teacher_x, teacher_y, ("teacher_x", "teacher_y"))
    x, y = cast_for_autocast(x, y)
    scale = check_scalar("scale", scale, x)
    teacher_scale = check_scalar("teacher_scale", teacher_scale, x).detach()
    teacher = teacher_x.detach(), teacher_y.detach(), teacher_scale
    rows, columns, _ = soft_targets_and_count(x, y, scale, *teacher, group=group)
    return _soft_targets_of(rows), _soft_targets_of(columns)


def _soft_targets_of(stack: Tensor) -> SoftTargets:
    negative, positive, positive_sum, positive_count, cross_entropy, *_ = stack.unbind()
    split = negative, positive, positive_sum, positive_count.detach()
    return SoftTargets(*split, cross_entropy)


def soft_targets_and_count(
    x: Tensor,
    y: Tensor,
    scale: Tensor,
    teacher_x: Tensor,
    teacher_y: Tensor,
    teacher_scale: Tensor,
    *,
    names: tuple[str, str] = ("teacher_x", "teacher_y"),
    group: object = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Each side as a stack, and the number of rows of all processes as in `stacks_and_count`.

    A stack (7, m) has the parts of `SoftTargets`, then the teacher's log-sum-exp over negatives and
    logit of the pair (i, i). `names`: of the teacher's features in errors; they may have a dtype
    that autocast casts.
    """
    teacher_x, teacher_y = cast_for_autocast(teacher_x, teacher_y)
    for name, features in zip(names, (teacher_x, teacher_y), strict=True):
        if features.dtype != x.dtype:
            raise TypeError(f"{name}: expected {x.dtype} as the student has, got {features.dtype}")
        check_same_rows(x, features, ("x", name))
        if features.device != x.device:
            raise ValueError(f"{name}: expected device {x.device}, got {features.device}")
    name = group_name(group)
    inputs = {"x": x, "y": y, "scale": scale}
    grad = torch.is_grad_enabled()
    wanted = ", ".join(key for key, t in inputs.items() if grad and t.requires_grad)
    backends.warn_of_float32(x)
    plain = ("soft_targets", wanted, name, settings.of_call(x))
    teacher = teacher_x, teacher_y, teacher_scale
    rows, columns, sizes = against_soft_targets(x, y, scale, *teacher, *plain)
    return rows, columns, sizes[0].sum() if name else None


def _reduce(
    x: Tensor,
    y: Tensor | None,
    scale: Tensor,
    pairs: Pairs,
    cols: bool,
    group: object,
    call: str,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Stacks of rows and columns as `split_of` takes them, and the ranks' sizes, None alone."""
    name = group_name(group)
    inputs = {"x": x, "y": y, "scale": scale}
    grad = torch.is_grad_enabled()
    wanted = [key for key, t in inputs.items() if grad and t is not None and t.requires_grad]
    backends.warn_of_float32(x)
    # Nothing is saved under torch.func, which may hold any number of calls' logits.
    save = bool(wanted) and (torch.compiler.is_compiling() or not transforms_active())
    guide = (None, None) if pairs.guide is None else pairs.guide
    tensors = (x, y, scale, pairs.row_ids, pairs.col_ids, pairs.ceiling, *guide)
    plain = (pairs.diagonal, cols, save, call, ", ".join(wanted), name, settings.of_call(x))
    rows, columns, sizes, _ = logsumexps(*tensors, *plain)
    return rows, columns, sizes if name else None


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
    """`Split` of an operator's stack: (4, rows), or (1, rows) if no pair can be positive."""
    if values.shape[0] == 4:
        negative, positive, positive_sum, positive_count = values.unbind()
        return Split(negative, positive, positive_sum, positive_count.detach())
    (negative,) = values.unbind()  # no pair can be positive
    nothing = torch.zeros_like(negative)
    return Split(negative, torch.full_like(negative, -math.inf), nothing, nothing)
