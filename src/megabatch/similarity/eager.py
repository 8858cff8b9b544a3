"""Blocks of log-sum-exps and of soft targets in torch operations, on any device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from megabatch.similarity import settings, states
from megabatch.similarity.arguments import accumulator_dtype
from megabatch.similarity.matrix import Matrix
from megabatch.similarity.tiles import State, StateTiles, Tiles, rounds_left

#: (positive, dropped) of a block, as `Matrix.masks` returns them.
Masks: TypeAlias = "tuple[Tensor | None, Tensor | None]"
#: Buffers of a block's size that live at once in the worst case (ids with a ceiling).
BUFFERS = 6


# --- products -------------------------------------------------------------------------------------


def logits(x: Tensor, y: Tensor, scale: Tensor | None = None, out: Tensor | None = None) -> Tensor:
    """scale * x @ y.T, with products and sums as accurate as the dtype's accumulator.

    Raw logits are never rounded to half precision (at 16-32 a bf16 step is 0.125: probabilities
    off by 6%). The CPU has no half-precision product with a wider result, so it multiplies in
    float32, in which products of halves are exact. The result is written to `out` if it is given,
    except for half precisions on a GPU.
    """
    wide = accumulator_dtype(x.dtype)
    if x.dtype != wide and x.device.type == "cuda":
        s = torch.mm(x, y.T, out_dtype=torch.float32)
        return s if scale is None else s.mul_(scale)
    if scale is not None:
        x = x * scale if x.dtype == wide else x.to(wide).mul_(scale)
    return torch.mm(x.to(wide), y.to(wide).T, out=out)


def whole_groups(y: Tensor) -> Tensor:
    """y (n, ...) with zeros up to a multiple of 16 rows: equal rows then have equal products.

    For columns left over from groups of 8, and for few rows, MKL uses other kernels, which round
    differently: among 1,027 equal columns, a query's own could score less than nearly all others.
    """
    missing = -len(y) % 16
    return F.pad(y, (*(2 * y.dim() - 1) * (0,), missing)) if missing else y


# --- blocks ---------------------------------------------------------------------------------------


def block_shape(like: Tensor, limit: int | None = None) -> tuple[int, int]:
    """Rows and columns of a block for features like `like` (m, d) in a workspace of `limit`."""
    # The CPU is fastest if a block stays in its last-level cache: 512 × 1,024 float32 does
    # (measured: 1,024 × 2,048 is 8% slower on a busy machine). A GPU wants large products.
    rows, cols = (512, 1024) if like.device.type == "cpu" else (8192, 8192)
    limit = settings.workspace(like) if limit is None else limit
    while block_bytes(rows, cols, like) > limit and (rows > 16 or cols > 16):
        rows, cols = max(16, rows // 2), max(16, cols // 2)
    return rows, cols


def block_bytes(rows: int, cols: int, like: Tensor) -> int:
    """Bytes of a block of features like `like` (m, d): its buffers, and wider copies of halves."""
    dtype = accumulator_dtype(like.dtype)
    width = 0 if like.dtype == dtype else like.shape[1]
    return dtype.itemsize * (BUFFERS * rows * cols + width * (rows + cols))


class EagerTiles(Tiles):
    """The blocks of a matrix in torch operations."""

    def __init__(self, matrix: Matrix) -> None:
        self.matrix, self.symmetric = matrix, matrix.symmetric
        self.x, self.y = matrix.rows.features, matrix.cols.features
        self.m, self.n = matrix.shape
        self.block_rows, self.block_cols = self._block_shape()
        if self.symmetric:  # square blocks, so that each is on the diagonal, above it, or below it
            self.block_rows = self.block_cols = min(self.block_rows, self.block_cols)
        # On the CPU dS stays in float32; a GPU's products take float16.
        self.half_ds = self.x.dtype == torch.float16 and rounds_left(self.x)

    def _block_shape(self) -> tuple[int, int]:
        return block_shape(self.x)

    def _buffers(self, count: int) -> Tensor:
        """(count, elements of the largest block), uninitialised."""
        size = min(self.block_rows, self.m) * min(self.block_cols, self.n)
        return self.x.new_empty(count, size, dtype=accumulator_dtype(self.x.dtype))


def buffer_views(buffers: Tensor, i: slice, j: slice) -> list[Tensor]:
    """The first elements of each buffer as a block of rows `i` and columns `j`."""
    m, n = i.stop - i.start, j.stop - j.start
    return [buffer[: m * n].view(m, n) for buffer in buffers]


# --- log-sum-exps ---------------------------------------------------------------------------------


class SoftmaxTiles(StateTiles, EagerTiles):
    """Tiles whose upstream is the tensor that is sent with the columns."""

    def __init__(self, matrix: Matrix, scale: Tensor, saved: Tensor) -> None:
        """`saved`: a tensor for the logits of the first blocks, which the backward pass reads."""
        super().__init__(matrix)
        self.numbers = states.SPLIT if matrix.has_positives else states.NEGATIVES
        self.forward_blocks = self.block_rows, self.block_cols
        self.scale = scale
        self._scratch = self._buffers(2)
        self._saved = self._saved_blocks(saved)

    def forward_block(self, i: slice, j: slice, rows: State, cols: State | None) -> None:
        sides = (rows,) if cols is None else (rows, cols)
        for side in sides:
            if side.is_first:
                self.clear(side.numbers)
        out, scratch = self._place(i, j)
        s = self._logits(i, j, out)
        self.merge_block(i, j, s, scratch, [side.numbers for side in sides])
        for side in sides:
            if side.is_last:
                self.write_results(side.numbers[None].clone(), self.results(side.numbers))

    def merge_block(
        self, i: slice, j: slice, s: Tensor, scratch: Tensor, sides: Sequence[Tensor]
    ) -> None:
        """Merge a block of logits into the states of its rows and, if given, of its columns."""
        forward_tile(s, self._masks(i, j, s, scratch), sides, scratch)

    def gradient_block(
        self, i: slice, j: slice, rows: Tensor | None, cols: Tensor | None
    ) -> Tensor:
        """Destroys the block's logits."""
        s, scratch = self._logits_again(i, j)
        rows = None if rows is None else rows[:, i]
        cols = None if cols is None else cols[:, j]
        buffers = buffer_views(self._scratch, i, j)[0], scratch
        return gradient_tile(s, self._masks(i, j, s, scratch), rows, cols, buffers)

    def _logits_again(self, i: slice, j: slice) -> tuple[Tensor, Tensor]:
        """A block's logits, saved or computed again, and another buffer of its size."""
        s, scratch = self._place(i, j)
        if (i.start, j.start) not in self._saved:
            s = self._logits(i, j, s)
        return s, scratch

    def _logits(self, i: slice, j: slice, out: Tensor) -> Tensor:
        """The logits of a block, in `out` if `logits` can write them there."""
        return logits(self.x[i], self.y[j], self.scale, out)

    def _masks(self, i: slice, j: slice, s: Tensor, scratch: Tensor) -> Masks:
        """Masks of a block of logits `s`; a guide's products overwrite `scratch`."""
        block = self.matrix.view(i, j)
        guide_x, guide_y = block.rows.guide, block.cols.guide
        if guide_x is None or guide_y is None:
            return block.masks(s)
        return block.masks(logits(guide_x, guide_y, out=scratch))

    def _place(self, i: slice, j: slice) -> tuple[Tensor, Tensor]:
        """A block's place for its logits, and another buffer of its size."""
        first, second = buffer_views(self._scratch, i, j)
        return self._saved.get((i.start, j.start), first), second

    def _saved_blocks(self, saved: Tensor) -> dict[tuple[int, int], Tensor]:
        """Views of `saved` for the blocks that fit into it, by their first pair."""
        blocks: dict[tuple[int, int], Tensor] = {}
        used = 0
        for i in self.row_blocks():
            for j in self.col_blocks(i):
                m, n = i.stop - i.start, j.stop - j.start
                if used + m * n > saved.numel():
                    return blocks
                blocks[i.start, j.start] = saved[used : used + m * n].view(m, n)
                used += m * n
        return blocks


def forward_tile(s: Tensor, masks: Masks, sides: Sequence[Tensor], scratch: Tensor) -> None:
    """Merge a block of logits `s` (m, n) into the states of its rows and, if given, columns."""
    positive, dropped = masks
    if positive is None and dropped is None:
        shift = merge_sum(sides[0][:2], s, 1, scratch)
        for cols in sides[1:]:
            if not _merge_shared(cols[:2], scratch, shift):
                merge_sum(cols[:2], s, 0, scratch)
        return
    negatives = s.clone()
    for mask in masks:
        if mask is not None:
            negatives.masked_fill_(mask, -torch.inf)
    for state, dim in zip(sides, (1, 0), strict=False):
        merge_sum(state[:2], negatives, dim, scratch)
        if positive is not None:
            merge_sum(state[2:4], s.masked_fill(~positive, -torch.inf), dim, scratch)
            state[4] += s.masked_fill(~positive, 0).sum(dim)
            state[5] += positive.sum(dim)


def gradient_tile(
    s: Tensor,
    masks: Masks,
    rows: Tensor | None,
    cols: Tensor | None,
    buffers: tuple[Tensor, Tensor],
) -> Tensor:
    """dS of a block of logits `s`, in their dtype; destroys `s` if that is the first buffer.

    `rows` and `cols` are upstreams; both are combined before dS is rounded for the products.
    """
    positive, dropped = masks
    if positive is None:
        ds = softmax_grad(s, rows, cols, 0, buffers)
    else:
        ds = torch.where(
            positive,
            softmax_grad(s, rows, cols, 2, (torch.empty_like(s), torch.empty_like(s))),
            softmax_grad(s, rows, cols, 0, buffers),
        )
    return ds if dropped is None else ds.masked_fill(dropped, 0)


def merge_sum(state: Tensor, s: Tensor, dim: int, out: Tensor) -> Tensor:
    """Merge the exponentials of `s` along `dim` into (largest, shifted sum).

    Leaves e^(s - shift) in `out` and returns the shift.
    """
    largest = torch.maximum(state[0], s.amax(dim))
    # A row without any pair yet keeps -inf as its largest; shift by 0 there, not by -inf.
    shift = largest.masked_fill(largest == -torch.inf, 0)
    exponentials = torch.sub(s, shift.unsqueeze(dim), out=out).exp_()
    state[1].mul_((state[0] - shift).exp_()).add_(exponentials.sum(dim))
    state[0].copy_(largest)
    return shift


def _merge_shared(state: Tensor, exponentials: Tensor, shift: Tensor) -> bool:
    """Merge the columns' sums from the rows' e^(s - shift), if these are accurate enough.

    This takes one exponential per logit instead of two. Weighting each row by
    e^(shift - reference) gives the columns' sums relative to one reference. Terms that underflow
    are below the smallest normal number, so a sum above its power 2/3 has lost nothing relevant.
    """
    if exponentials.device.type != "cpu":  # the check would stall a GPU's stream
        return False
    reference = shift.max()
    sums = (shift - reference).exp_() @ exponentials
    if (sums < torch.finfo(sums.dtype).tiny ** (2 / 3)).any():
        return False
    largest = torch.maximum(state[0], reference)
    state[1].mul_((state[0] - largest).exp_()).add_(sums.mul_((reference - largest).exp_()))
    state[0].copy_(largest)
    return True


def softmax_grad(
    s: Tensor,
    rows: Tensor | None,
    cols: Tensor | None,
    start: int,
    buffers: tuple[Tensor, Tensor],
) -> Tensor:
    """The gradient of each logit in `s`, as a negative pair (start 0) or a positive one (2).

    The first buffer may be `s` itself, which is then destroyed.
    """
    scratch, out = buffers
    if rows is not None and cols is not None and start == 0 and _shareable(rows, cols):
        reference = rows[0].max()
        row_factor = (reference - rows[0]).exp_().mul_(rows[1])
        col_factor = (reference - cols[0]).exp_().mul_(cols[1])
        torch.add(row_factor[:, None], col_factor, out=out)
        return out.mul_(torch.sub(s, reference, out=scratch).exp_())
    if rows is not None:
        torch.sub(s, rows[start, :, None], out=out).exp_().mul_(rows[start + 1, :, None])
    else:
        out.zero_()
    if cols is not None:
        exponentials = torch.sub(s, cols[start], out=scratch).exp_()
        out.addcmul_(exponentials, cols[start + 1])
    if start == 2 and rows is not None:
        out += rows[4, :, None]
    if start == 2 and cols is not None:
        out += cols[4]
    return out


def _shareable(rows: Tensor, cols: Tensor) -> bool:
    """Whether one exponential serves both sides of a block: their log-sum-exps differ little.

    If they are within 40 of each other, terms that underflow relative to the largest (e^-87 in
    float32) are probabilities below e^-47.
    """
    if rows.device.type != "cpu":  # the check would stall a GPU's stream
        return False
    low, high = torch.aminmax(torch.cat([rows[0], cols[0]]))
    return bool(high - low < 40)


# --- soft targets ---------------------------------------------------------------------------------


class SoftTargetTiles(SoftmaxTiles):
    """Tiles whose sides' guides are the teacher's features."""

    def __init__(self, matrix: Matrix, scale: Tensor, teacher_scale: Tensor) -> None:
        super().__init__(matrix, scale, scale.new_empty(0))
        self.numbers, self.teacher_scale = states.TARGETS, teacher_scale
        self._teacher_scratch = self._buffers(2)

    def merge_block(
        self, i: slice, j: slice, s: Tensor, scratch: Tensor, sides: Sequence[Tensor]
    ) -> None:
        before = [states.student_largest(state) for state in sides]
        masks = self.matrix.view(i, j).masks(s)
        forward_tile(s, masks, [state[:6] for state in sides], scratch)
        t, positive = self._teacher_logits(i, j), masks[0]
        for state, old, dim in zip(sides, before, (1, 0), strict=False):
            _merge_targets(state, old, s, t, positive, dim, scratch)

    def gradient_block(
        self, i: slice, j: slice, rows: Tensor | None, cols: Tensor | None
    ) -> Tensor:
        own = None if rows is None else rows[:, i]
        others = None if cols is None else cols[:, j]
        out, scratch = self._place(i, j)
        s = logits(self.x[i], self.y[j], self.scale, out)
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
        return logits(teacher_x[i], teacher_y[j], self.teacher_scale, out=out)


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
