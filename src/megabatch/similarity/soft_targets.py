"""Cross-entropies of rows and columns against soft targets, with the split log-sum-exps.

A teacher's features give the targets T = softmax(scale' * x' y'^T) of each row, and of each column
along the other axis; neither T nor the logits S are formed. One sweep computes a tile of both
matrices and serves both directions: 2 m n (d + d') operations forward, 6 m n d + 2 m n d' backward.

A row's cross-entropy is the sum over j of T_ij (L_i - S_ij), L_i its log-sum-exp; no term is
negative, so nothing cancels if teacher and student agree. In a running state the largest logit so
far stands for L_i. The gradient is dS_ij = g_i (P_ij - T_ij), P the student's softmax. The teacher
gets none.

Row i belongs to column i. Results of a side are the four of `states`, the cross-entropy, and the
teacher's log-sum-exp over negatives and logit of the pair (i, i). A state has the six numbers of
`states`, then `[the teacher's largest logit of a negative, its sum of e^(t - largest), the sum of
e^(t - largest) * (the student's largest logit - s), the teacher's logit of (i, i)]`. An upstream is
`[log-sum-exp over negatives, its upstream gradient, the teacher's log-sum-exp, upstream gradient of
the cross-entropy, gradient of the logit (i, i)]`.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from megabatch.similarity.arguments import (
    cast_for_autocast,
    check_same_rows,
    check_scalar,
    check_two,
)
from megabatch.similarity.matrix import PAIRED
from megabatch.similarity.softmax import Stacks, logsumexps, make_operands


class SoftTargets(NamedTuple):
    """One side of a student's similarity matrix, compared with a teacher's; each (rows,)."""

    negative: Tensor  #: as in `Split`
    positive: Tensor  #: as in `Split`
    positive_sum: Tensor  #: as in `Split`
    positive_count: Tensor  #: as in `Split`
    cross_entropy: Tensor  #: of the student's softmax along this side against the teacher's

    @classmethod
    def of(cls, stack: Tensor) -> SoftTargets:
        """The parts of a side of `soft_target_stacks`."""
        negative, positive, positive_sum, positive_count, cross_entropy, *_ = stack.unbind()
        return cls(negative, positive, positive_sum, positive_count.detach(), cross_entropy)


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
    rows, columns, _ = soft_target_stacks(x, y, scale, *teacher, group=group)
    assert columns is not None
    return SoftTargets.of(rows), SoftTargets.of(columns)


def soft_target_stacks(
    x: Tensor,
    y: Tensor,
    scale: Tensor,
    teacher_x: Tensor,
    teacher_y: Tensor,
    teacher_scale: Tensor,
    *,
    names: tuple[str, str] = ("teacher_x", "teacher_y"),
    group: object = None,
) -> Stacks:
    """`soft_targets` for losses: each side as one tensor, and the number of all rows.

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
    teacher = teacher_x, teacher_y, teacher_scale
    tensors = x, y, scale, None, None, None, *teacher, None, None, PAIRED
    operands = make_operands(*tensors, cols=True, group=group, call="soft_targets")
    rows, columns, sizes, _ = logsumexps(*operands)
    return Stacks(rows, columns, sizes[0].sum() if operands.group else None)
