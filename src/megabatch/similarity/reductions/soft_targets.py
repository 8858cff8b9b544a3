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
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor

from megabatch.similarity import backends, engine
from megabatch.similarity.backends import eager
from megabatch.similarity.backends.eager import buffer_views
from megabatch.similarity.distributed import comm, ranks
from megabatch.similarity.distributed.schedule import Chunk, Gathered, Schedule, Shard
from megabatch.similarity.engine import Side
from megabatch.similarity.masks import PAIRED, Pairs, SortedMatrix
from megabatch.similarity.memory import Run, gradient_bytes
from megabatch.similarity.ops import Body, reduction_operators
from megabatch.similarity.reductions import states
from megabatch.similarity.reductions.base import handshake, new_sizes, schedule_again
from megabatch.similarity.reductions.operands import Teacher
from megabatch.similarity.reductions.softmax_tiles import (
    SoftmaxTiles,
    forward_tile,
    merge_sum,
    softmax_grad,
)
from megabatch.similarity.reductions.states import TargetStates
from megabatch.similarity.settings import AppliedSettings

if TYPE_CHECKING:
    from megabatch.similarity.backends.triton.soft_target_tiles import SoftTargetKernelTiles

Tiles: TypeAlias = "SoftTargetTiles | SoftTargetKernelTiles"

#: Buffers of a block's size for the teacher's logits, in torch operations.
TEACHER_BUFFERS = 2


# --- the operators --------------------------------------------------------------------------------


def _forward(
    x: Tensor,
    y: Tensor,
    scale: Tensor,
    teacher_x: Tensor,
    teacher_y: Tensor,
    teacher_scale: Tensor,
    call: str,
    wanted: str,
    group: str,
    settings: Sequence[int],
) -> tuple[Tensor, Tensor, Tensor]:
    """The results of rows and columns, and the numbers of rows and columns of each rank.

    Arguments are those of `softmax`, without ids.
    """
    with AppliedSettings(settings, x), torch.cuda.device_of(x):
        terms = _terms(x, teacher_x, wanted) if group else ""
        schedule, sizes = handshake(group, call, terms, len(x), len(y), x)
        teacher = Teacher(teacher_x, teacher_y, teacher_scale)
        _, sweep = _sweep(x, y, scale, teacher, schedule)
        rows, columns = engine.reduce(sweep, True)
    assert columns is not None
    return rows, columns, sizes


def _forward_fake(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    x, y, *_, group, _ = arguments
    rows, columns = (states.new_targets(states.TARGET_RESULTS, t.shape[0], x) for t in (x, y))
    n = comm.resolve(group).size() if group else 0
    return rows, columns, new_sizes(x, n)


def _backward(
    x: Tensor,
    y: Tensor,
    scale: Tensor,
    teacher_x: Tensor,
    teacher_y: Tensor,
    teacher_scale: Tensor,
    rows: Tensor,
    columns: Tensor,
    sizes: Tensor,
    row_gradient: Tensor | None,
    col_gradient: Tensor | None,
    need_x: bool,
    need_y: bool,
    need_scale: bool,
    call: str,
    wanted: str,
    group: str,
    settings: Sequence[int],
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of x, y and scale, empty if not needed: see `engine.gradients`."""
    if group:  # other ranks wait for this one's part
        row_gradient = torch.zeros_like(rows) if row_gradient is None else row_gradient
        col_gradient = torch.zeros_like(columns) if col_gradient is None else col_gradient
    with AppliedSettings(settings, x), torch.cuda.device_of(x):
        schedule = schedule_again(group, call, sizes, x, x.new_empty(0))
        teacher = Teacher(teacher_x, teacher_y, teacher_scale)
        matrix, sweep = _sweep(x, y, scale, teacher, schedule)
        sides = Side(rows, row_gradient), Side(columns, col_gradient)
        return engine.gradients(sweep, matrix, x, y, scale, sides, (need_x, need_y, need_scale))


def _backward_fake(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    x, y, scale = arguments[:3]
    dx, dy = engine.new_gradients(x, y, *arguments[11:13])
    return dx, dy, torch.empty_like(scale)


def _forward_bytes(run: Run, x: Tensor, y: Tensor, _: Tensor, teacher_x: Tensor, *__: Any) -> int:
    """A block of the student's logits and the teacher's buffers; on a GPU, the tiles' partials.

    A forward block of the kernels has twice the rows and columns of a block of dS, and 5 float32
    numbers a tile of 128 for each of its rows and columns.
    """
    block, _rows = run.block(x, y)
    both = block + _teacher_bytes(block) if run.on_cpu else block * 5 // 8
    return both + run.transfer_bytes(x, y) + run.transfer_bytes(teacher_x, teacher_x)


def _backward_bytes(run: Run, x: Tensor, y: Tensor, _: Tensor, teacher_x: Tensor, *__: Any) -> int:
    block, _rows = run.block(x, y)
    teacher = (_teacher_bytes(block) if run.on_cpu else 0) + run.transfer_bytes(
        teacher_x, teacher_x
    )
    return gradient_bytes(run, x, y, states.TARGET_UPSTREAM) + teacher


def _teacher_bytes(block: int) -> int:
    """Bytes of the teacher's buffers in torch operations, from those of a block."""
    return block * TEACHER_BUFFERS // eager.BUFFERS


against_soft_targets, against_soft_targets_backward = reduction_operators(
    "soft_targets",
    Body(_forward, _forward_fake, _forward_bytes),
    Body(_backward, _backward_fake, _backward_bytes),
    tensors=6,
    differentiable=(3, 2),
)


# --- around the sweep -----------------------------------------------------------------------------


def _terms(x: Tensor, teacher: Tensor, wanted: str) -> str:
    """Description of the call, on which all ranks must agree."""
    return (
        f"width {x.shape[1]}, {str(x.dtype).removeprefix('torch.')}, {x.device.type}, "
        f"teacher's width {teacher.shape[1]}, gradients wanted: {wanted or 'none'}, "
        f"{backends.arithmetic(x)}, {ranks.plan(x)}"
    )


def _sweep(
    x: Tensor,
    y: Tensor,
    scale: Tensor,
    teacher: Teacher,
    schedule: Schedule,
) -> tuple[SortedMatrix, engine.Sweep[Tiles]]:
    """The matrix, which is not sorted, and its sweep; the teacher's columns are sent with y."""
    start = schedule.starts[schedule.rank]
    matrix = SortedMatrix(x, y, Pairs(PAIRED, row_start=start, col_start=start))
    own = _tiles(matrix, scale, teacher)

    def make_tiles(rows: Gathered, chunk: Chunk) -> Tiles:
        x, teacher_x, *_ = rows
        y, teacher_y, *_ = chunk.tensors
        assert x is not None
        assert y is not None
        assert teacher_x is not None
        assert teacher_y is not None
        pairs = Pairs(PAIRED, row_start=schedule.rows.start, col_start=chunk.start)
        block = SortedMatrix(x, y, pairs)
        return _tiles(block, scale, Teacher(teacher_x, teacher_y, teacher.scale))

    rows = [Shard(own.x), Shard(own.teacher.x)]
    cols = [Shard(own.y), Shard(own.teacher.y)]
    return matrix, engine.Sweep(schedule, own, (rows, cols), make_tiles)


def _tiles(matrix: SortedMatrix, scale: Tensor, teacher: Teacher) -> Tiles:
    """The blocks of x (m, d) against y (n, d), with the teacher's."""
    if not backends.uses_kernels(matrix.x):
        return SoftTargetTiles(matrix.x, matrix.y, matrix.pairs, scale, teacher)
    from megabatch.similarity.backends.triton.soft_target_tiles import SoftTargetKernelTiles

    return SoftTargetKernelTiles(matrix.x, matrix.y, matrix.pairs, scale, teacher)


# --- blocks in torch operations -------------------------------------------------------------------


class SoftTargetTiles(TargetStates, SoftmaxTiles):
    """See `base.StateTiles`; an upstream is the tensor that is sent with the columns."""

    def __init__(
        self,
        x: Tensor,
        y: Tensor,
        pairs: Pairs,
        scale: Tensor,
        teacher: Teacher,
    ) -> None:
        super().__init__(x, y, pairs, scale)
        self.teacher = teacher
        self._teacher_scratch = self._buffers(TEACHER_BUFFERS)

    def reduce(self, cols: bool) -> tuple[Tensor, Tensor | None]:
        """See `base.StateTiles`."""
        rows, columns = (self.new_state(len(side)) for side in (self.x, self.y))
        self.forward(rows, columns, (True, True))
        results = [self.new_results(state.shape[1]) for state in (rows, columns)]
        row_results, col_results = map(states.to_target_results, (rows, columns), results)
        return row_results, col_results

    def forward(
        self, rows: Tensor, cols: Tensor | None, overwrite: tuple[bool, bool] = (False, False)
    ) -> None:
        """See `base.StateTiles`."""
        for state, new in zip((rows, cols), overwrite, strict=True):
            if new and state is not None:
                states.clear_targets(state)
        for i in self.row_blocks():
            for j in self.col_blocks(i):
                s, scratch = self._logits(i, j)
                others = None if cols is None else cols[:, j]
                sides = [(rows[:, i], 1)] if others is None else [(rows[:, i], 1), (others, 0)]
                before = [states.student_largest(state) for state, _ in sides]
                students = rows[:6, i], None if others is None else others[:6]
                masks = self.pairs.view(i, j).masks(s)
                forward_tile(s, masks, *students, scratch)
                t, positive = self._teacher_logits(i, j), masks[0]
                for (state, dim), old in zip(sides, before, strict=True):
                    _merge_targets(state, old, s, t, positive, dim, scratch)

    def merge(self, parts: Tensor) -> Tensor:
        """See `base.StateTiles`."""
        return states.merge_targets(parts)

    def write_results(self, parts: Tensor, out: Tensor) -> None:
        """See `base.StateTiles`."""
        states.to_target_results(parts[0] if len(parts) == 1 else states.merge_targets(parts), out)

    def make_upstream(self, results: Tensor, gradient: Tensor) -> Tensor:
        """See `base.StateTiles`."""
        return states.target_upstream(results, gradient)

    def gradient_block(
        self, i: slice, j: slice, rows: Tensor | None, cols: Tensor | None
    ) -> Tensor:
        """See `base.Tiles`."""
        own = None if rows is None else rows[:, i]
        others = None if cols is None else cols[:, j]
        s, scratch = self._logits(i, j)
        ds = softmax_grad(s, own, others, 0, (s, scratch))
        t = self._teacher_logits(i, j)
        teacher_own = None if own is None else own[2:4]
        teacher_others = None if others is None else others[2:4]
        buffers = self._teacher_views(i, j)
        ds.sub_(softmax_grad(t, teacher_own, teacher_others, 0, buffers))
        positive, _ = self.pairs.view(i, j).masks(ds)
        if positive is None:
            return ds
        gradient = torch.zeros_like(ds)
        for side, dim in ((own, 1), (others, 0)):
            if side is not None:
                gradient += side[4].unsqueeze(dim)
        return torch.where(positive, gradient, ds)

    def _teacher_logits(self, i: slice, j: slice) -> Tensor:
        out = self._teacher_views(i, j)[0]
        return eager.logits(self.teacher.x[i], self.teacher.y[j], self.teacher.scale, out=out)

    def _teacher_views(self, i: slice, j: slice) -> tuple[Tensor, Tensor]:
        first, second = buffer_views(self._teacher_scratch, i, j)
        return first, second


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
