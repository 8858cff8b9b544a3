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

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megabatch.similarity import backends, eager, settings, states
from megabatch.similarity.arguments import (
    cast_for_autocast,
    check_same_rows,
    check_scalar,
    check_two,
)
from megabatch.similarity.distributed import schedule
from megabatch.similarity.distributed.comm import group_name
from megabatch.similarity.distributed.schedule import Ranks
from megabatch.similarity.eager import buffer_views
from megabatch.similarity.eager_softmax import (
    Masks,
    SoftmaxTiles,
    forward_tile,
    merge_sum,
    softmax_grad,
)
from megabatch.similarity.matrix import PAIRED, Matrix, Orders, Side
from megabatch.similarity.memory import Run, gradient_bytes
from megabatch.similarity.ops import Bundle, reduction
from megabatch.similarity.settings import applied
from megabatch.similarity.softmax import Stacks
from megabatch.similarity.states import TargetStates
from megabatch.similarity.sweep import SideGradient, Sweep, gradients, reduce

#: Buffers of a block's size for the teacher's logits, in torch operations.
TEACHER_BUFFERS = 2


# --- public functions -----------------------------------------------------------------------------


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
    backends.warn_of_float32(x)
    inputs, grad = {"x": x, "y": y, "scale": scale}, torch.is_grad_enabled()
    wanted = ", ".join(key for key, t in inputs.items() if grad and t.requires_grad)
    teacher, group = (teacher_x, teacher_y, teacher_scale), group_name(group)
    operands = Operands(x, y, scale, *teacher, wanted, group, settings.of_call(x))
    rows, columns, sizes = against_soft_targets(*operands)
    return Stacks(rows, columns, sizes[0].sum() if operands.group else None)


# --- the operators --------------------------------------------------------------------------------


class Operands(NamedTuple):
    """Operands of the operators."""

    x: Tensor
    y: Tensor
    scale: Tensor
    teacher_x: Tensor
    teacher_y: Tensor
    teacher_scale: Tensor
    wanted: str  #: names of the inputs that need gradients
    group: str
    settings: Sequence[int]


class Results(NamedTuple):
    """Results of the forward operator."""

    rows: Tensor  #: (7, m)
    columns: Tensor  #: (7, n)
    sizes: Tensor  #: of all ranks, see `schedule.new_sizes`


BUNDLE = Bundle(Operands, Results, wanted=3, outputs=2)


def _forward(*flat: Any) -> Results:
    o = Operands(*flat)
    with applied(o.settings, o.x), torch.cuda.device_of(o.x):
        own_sizes = len(o.x), len(o.y)
        terms = _terms(o) if o.group else ""
        ranks, sizes = schedule.agree(o.group, "soft_targets", terms, own_sizes, o.x, False)
        sweep = _sweep(o, ranks)
        tiles = sweep.make(sweep.matrix)
        if ranks is not None:
            rows, columns = reduce(sweep, tiles, True)
            assert columns is not None
            return Results(rows, columns, sizes)
        row_state, col_state = tiles.new_state(tiles.m), tiles.new_state(tiles.n)
        tiles.forward(row_state, col_state, (True, True), to_results=True)
        return Results(tiles.results(row_state), tiles.results(col_state), sizes)


def _forward_fake(*flat: Any) -> Results:
    o = Operands(*flat)
    rows, columns = (states.empty(states.TARGET_RESULTS, t.shape[0], o.x) for t in (o.x, o.y))
    return Results(rows, columns, schedule.new_sizes(o.group, o.x))


def _backward(*flat: Any) -> tuple[Tensor, ...]:
    o, results, upstream, need = BUNDLE.split(flat)
    sides = []
    for stack, gradient in zip(results[:2], upstream, strict=True):
        if o.group and gradient is None:  # other ranks wait for this one's part
            gradient = torch.zeros_like(stack)
        sides.append(SideGradient(stack, gradient))
    with applied(o.settings, o.x), torch.cuda.device_of(o.x):
        ranks = schedule.ranks_again(o.group, "soft_targets", results.sizes, o.x, False)
        need_x, need_y, need_scale = need
        rows, columns = sides
        return gradients(_sweep(o, ranks), o.scale, (rows, columns), (need_x, need_y, need_scale))


def _forward_bytes(run: Run, o: Operands) -> int:
    """A block of the student's logits and the teacher's buffers; on a GPU, the tiles' partials.

    A forward block of the kernels has twice the rows and columns of a block of dS, and 5 float32
    numbers a tile of 128 for each of its rows and columns.
    """
    block, _rows = run.block(o.x, o.y)
    both = block + _teacher_bytes(block) if run.on_cpu else block * 5 // 8
    return both + run.transfer_bytes(o.x) + run.transfer_bytes(o.teacher_x)


def _backward_bytes(run: Run, o: Operands) -> int:
    block, _rows = run.block(o.x, o.y)
    teacher = _teacher_bytes(block) if run.on_cpu else 0
    received = run.transfer_bytes(o.teacher_x)
    return gradient_bytes(run, o.x, o.y, states.TARGET_UPSTREAM) + teacher + received


def _teacher_bytes(block: int) -> int:
    """Bytes of the teacher's buffers in torch operations, from those of a block."""
    return block * TEACHER_BUFFERS // eager.BUFFERS


against_soft_targets = reduction(
    "soft_targets", BUNDLE, _forward, _forward_fake, _backward, (_forward_bytes, _backward_bytes)
)


def _terms(o: Operands) -> str:
    """Description of the call, on which all ranks must agree."""
    return (
        f"{backends.described(o.x)}, teacher's width {o.teacher_x.shape[1]}, "
        f"gradients wanted: {o.wanted or 'none'}"
    )


def _sweep(o: Operands, ranks: Ranks | None) -> Sweep:
    """The matrix, which is not sorted, and its tiles; the teacher's columns are sent with y."""
    start = 0 if ranks is None else ranks.start
    rows, cols = Side(o.x, guide=o.teacher_x), Side(o.y, guide=o.teacher_y)
    matrix = Matrix(rows, cols, PAIRED, start, start)
    tiles: Any = SoftTargetTiles
    if backends.uses_kernels(o.x):
        from megabatch.similarity.triton.soft_targets import SoftTargetKernelTiles

        tiles = SoftTargetKernelTiles
    make = partial(tiles, scale=o.scale, teacher_scale=o.teacher_scale)
    return Sweep(matrix, Orders(), make, ranks)


# --- blocks in torch operations -------------------------------------------------------------------


class SoftTargetTiles(TargetStates, SoftmaxTiles):
    """See `sweep.StateTiles`; an upstream is the tensor that is sent with the columns."""

    def __init__(self, matrix: Matrix, scale: Tensor, teacher_scale: Tensor) -> None:
        super().__init__(matrix, scale, scale.new_empty(0))
        self.teacher_scale = teacher_scale
        self._teacher_scratch = self._buffers(TEACHER_BUFFERS)

    def forward(
        self,
        rows: Tensor,
        cols: Tensor | None,
        overwrite: tuple[bool, bool],
        to_results: bool = False,
    ) -> None:
        self._clear_new(rows, cols, overwrite)
        for i in self.row_blocks():
            for j in self.col_blocks(i):
                s, scratch = self._logits(i, j)
                others = None if cols is None else cols[:, j]
                sides = [(rows[:, i], 1)] if others is None else [(rows[:, i], 1), (others, 0)]
                before = [states.student_largest(state) for state, _ in sides]
                students = rows[:6, i], None if others is None else others[:6]
                masks = self._masks(i, j, s, scratch)
                forward_tile(s, masks, *students, scratch)
                t, positive = self._teacher_logits(i, j), masks[0]
                for (state, dim), old in zip(sides, before, strict=True):
                    _merge_targets(state, old, s, t, positive, dim, scratch)

    def merge(self, parts: Tensor) -> Tensor:
        return states.merge_targets(parts)

    def write_results(self, parts: Tensor, out: Tensor) -> None:
        states.to_target_results(parts[0] if len(parts) == 1 else states.merge_targets(parts), out)

    def make_upstream(self, results: Tensor, gradient: Tensor) -> Tensor:
        return states.target_upstream(results, gradient)

    def gradient_block(
        self, i: slice, j: slice, rows: Tensor | None, cols: Tensor | None
    ) -> Tensor:
        own = None if rows is None else rows[:, i]
        others = None if cols is None else cols[:, j]
        s, scratch = self._logits(i, j)
        ds = softmax_grad(s, own, others, 0, (s, scratch))
        t = self._teacher_logits(i, j)
        teacher_own = None if own is None else own[2:4]
        teacher_others = None if others is None else others[2:4]
        buffers = self._teacher_views(i, j)
        ds.sub_(softmax_grad(t, teacher_own, teacher_others, 0, buffers))
        positive, _ = self._masks(i, j, ds, scratch)
        if positive is None:
            return ds
        gradient = torch.zeros_like(ds)
        for side, dim in ((own, 1), (others, 0)):
            if side is not None:
                gradient += side[4].unsqueeze(dim)
        return torch.where(positive, gradient, ds)

    def _teacher_logits(self, i: slice, j: slice) -> Tensor:
        teacher_x, teacher_y = self.matrix.rows.guide, self.matrix.cols.guide
        assert teacher_x is not None
        assert teacher_y is not None
        out = self._teacher_views(i, j)[0]
        return eager.logits(teacher_x[i], teacher_y[j], self.teacher_scale, out=out)

    def _teacher_views(self, i: slice, j: slice) -> tuple[Tensor, Tensor]:
        first, second = buffer_views(self._teacher_scratch, i, j)
        return first, second

    def _masks(self, i: slice, j: slice, s: Tensor, scratch: Tensor) -> Masks:
        return self.matrix.view(i, j).masks(s)


def _merge_targets(
    state: Tensor,
    old: Tensor,
    s: Tensor,
    t: Tensor,
    positive: Tensor | None,
    dim: int,
    scratch: Tensor,
) -> None:
    """Merge the teacher's logits `t` into a state that already has the student's, `s`.

    old: the student's largest logits before. positive: the pairs (i, i), if there are any here.
    """
    top = states.finite(states.student_largest(state))
    # The sum so far was relative to the old reference.
    state[8].addcmul_(top - torch.where(old == -torch.inf, top, old), state[7])
    if positive is not None:
        own = t.masked_fill(~positive, -torch.inf).amax(dim)
        torch.maximum(state[9], own, out=state[9])
        t = t.masked_fill(positive, -torch.inf)
    before = states.finite(state[6])
    shift = merge_sum(state[6:8], t, dim, scratch)  # leaves e^(t - shift) in scratch
    below = top.unsqueeze(dim) - s
    state[8].mul_((before - shift).clamp_(max=0).exp_()).add_((scratch * below).sum(dim))
