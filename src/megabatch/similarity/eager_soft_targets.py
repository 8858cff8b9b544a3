"""Blocks of soft targets in torch operations."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megabatch.similarity import eager, states
from megabatch.similarity.eager import buffer_views
from megabatch.similarity.eager_softmax import SoftmaxTiles, forward_tile, merge_sum, softmax_grad
from megabatch.similarity.matrix import Matrix

#: Buffers of a block's size for the teacher's logits.
TEACHER_BUFFERS = 2


class SoftTargetTiles(SoftmaxTiles):
    """Tiles whose sides' guides are the teacher's features."""

    def __init__(self, matrix: Matrix, scale: Tensor, teacher_scale: Tensor) -> None:
        super().__init__(matrix, scale, scale.new_empty(0))
        self.numbers, self.teacher_scale = states.TARGETS, teacher_scale
        self._teacher_scratch = self._buffers(TEACHER_BUFFERS)

    def merge_block(
        self, i: slice, j: slice, s: Tensor, scratch: Tensor, sides: Sequence[Tensor]
    ) -> None:
        before = [states.student_largest(state) for state in sides]
        masks = self.matrix.view(i, j).masks(s)
        forward_tile(s, masks, [state[:6] for state in sides], scratch)
        t, positive = self._teacher_logits(i, j), masks[0]
        for state, old, dim in zip(sides, before, (1, 0), strict=False):
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
        out, scratch = self._place(i, j)
        s = eager.logits(self.x[i], self.y[j], self.scale, out)
        ds = softmax_grad(s, own, others, 0, (s, scratch))
        t, buffer = self._teacher_logits(i, j), buffer_views(self._teacher_scratch, i, j)[1]
        teacher_own = None if own is None else own[2:4]
        teacher_others = None if others is None else others[2:4]
        ds.sub_(softmax_grad(t, teacher_own, teacher_others, 0, (t, buffer)))
        positive, _ = self.matrix.view(i, j).masks(ds)
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
        out = buffer_views(self._teacher_scratch, i, j)[0]
        return eager.logits(teacher_x[i], teacher_y[j], self.teacher_scale, out=out)


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
