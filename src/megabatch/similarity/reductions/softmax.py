"""Log-sum-exps of the rows and columns of a matrix, split by whether a pair's ids are equal.

The method is Inf-CL's (arXiv 2410.17243, section 3: tiles that are never stored) with one sweep
for both directions, and FlashAttention's running sums (arXiv 2205.14135). y=None means x against
itself. The operators return stacks of results (`states`), of one row each or the four of `Split`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor

from megabatch.similarity import backends, engine, masks
from megabatch.similarity.arguments import accumulator_dtype
from megabatch.similarity.backends import eager
from megabatch.similarity.backends.eager import EagerTiles, buffer_views, without_autocast
from megabatch.similarity.distributed import comm, gathered, ranks
from megabatch.similarity.distributed.ranks import Ranks
from megabatch.similarity.distributed.schedule import Chunk, Schedule, Shard
from megabatch.similarity.engine import Side
from megabatch.similarity.masks import Guide, Pairs, SortedMatrix
from megabatch.similarity.memory import Run, gradient_bytes, padded_bytes
from megabatch.similarity.ops import Body, reduction_operators
from megabatch.similarity.reductions import states
from megabatch.similarity.reductions.base import (
    handshake,
    kind_of,
    new_sizes,
    schedule_again,
    sort_by_id,
)
from megabatch.similarity.settings import Holding, Settings

if TYPE_CHECKING:
    from megabatch.similarity.backends.triton.softmax import SoftmaxKernelTiles

Tiles: TypeAlias = "SoftmaxTiles | SoftmaxKernelTiles"
#: (positive, dropped) of a block, as `Pairs.masks` gives them.
Masks: TypeAlias = "tuple[Tensor | None, Tensor | None]"


# --- the operators --------------------------------------------------------------------------------


def _forward(
    x: Tensor,
    y: Tensor | None,
    scale: Tensor,
    row_ids: Tensor | None,
    col_ids: Tensor | None,
    ceiling: Tensor | None,
    guide_x: Tensor | None,
    guide_y: Tensor | None,
    diagonal: str,
    cols: bool,
    save: bool,
    call: str,
    wanted: str,
    group: str,
    settings: Sequence[int],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The results of rows and columns; see `split_logsumexp`. Without `cols` the second is empty.

    The third is the number of rows and columns of each rank, see `base.Handshake`.
    The fourth stays for the backward pass if `save`: the first blocks' logits, or in a group all
    ranks' columns.

    Args:
        diagonal: of `masks.Pairs`. cols: whether the columns' side is wanted.
        call: the public function's name and what else all ranks must do alike. wanted: names of the
            inputs that need gradients. group: its name, "" for this process alone.
        settings: of the call, see `settings.Settings`.
    """
    pairs = Pairs(diagonal, row_ids, col_ids, ceiling, _guide(guide_x, guide_y))
    with Holding(settings, x), torch.cuda.device_of(x):
        terms = _terms(x, y, pairs, cols, wanted) if group else ""
        own_sizes = x.shape[0], (x if y is None else y).shape[0]
        schedule, sizes = handshake(group, call, terms, *own_sizes, x)
        saved = _new_saved(x, y, sizes.shape[1], save, settings)
        matrix, sweep = _sweep(x, y, scale, pairs, schedule, saved)
        row_results, col_results = engine.reduce(sweep, cols)
    if isinstance(schedule, Ranks) and schedule.gathered is not None and len(saved):
        saved = schedule.gathered
    rows = masks.restore(row_results, matrix.row_order, 1)
    if col_results is None:
        return rows, rows.new_empty(0), sizes, saved
    return rows, masks.restore(col_results, matrix.col_order, 1), sizes, saved


def _forward_fake(*arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    x, y, _, row_ids, _, _, _, _, diagonal, cols, save, _, _, group, settings = arguments
    has_positives = Pairs(diagonal, row_ids).has_positives
    rows = states.new_results(x.shape[0], has_positives, x)
    columns = rows.new_empty(0)
    if cols:
        columns = states.new_results((x if y is None else y).shape[0], has_positives, x)
    n = comm.resolve(group).size() if group else 0
    saved = _new_saved(x, y, n, save, settings)
    return rows, columns, new_sizes(x, n), saved


def _backward(
    x: Tensor,
    y: Tensor | None,
    scale: Tensor,
    row_ids: Tensor | None,
    col_ids: Tensor | None,
    ceiling: Tensor | None,
    guide_x: Tensor | None,
    guide_y: Tensor | None,
    rows: Tensor,
    columns: Tensor,
    sizes: Tensor,
    saved: Tensor,
    row_gradient: Tensor | None,
    col_gradient: Tensor | None,
    need_x: bool,
    need_y: bool,
    need_scale: bool,
    diagonal: str,
    cols: bool,
    save: bool,
    call: str,
    wanted: str,
    group: str,
    settings: Sequence[int],
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of x, y and scale, empty if not needed: see `engine.gradients`."""
    pairs = Pairs(diagonal, row_ids, col_ids, ceiling, _guide(guide_x, guide_y))
    if group:  # other ranks count on this one's part, whether or not its own loss used it
        if y is None and row_gradient is None:
            row_gradient = torch.zeros_like(rows)
        if cols and col_gradient is None:
            col_gradient = torch.zeros_like(columns)
    with Holding(settings, x), torch.cuda.device_of(x):
        schedule = schedule_again(group, call, sizes, saved)
        matrix, sweep = _sweep(x, y, scale, pairs, schedule, saved)
        sides = Side(rows, row_gradient), Side(columns, col_gradient if cols else None)
        return engine.gradients(sweep, matrix, x, y, scale, sides, (need_x, need_y, need_scale))


def _backward_fake(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    x, y, scale = arguments[:3]
    need_x, need_y = arguments[14:16]
    dx, dy = engine.new_gradients(x, y, need_x, need_y)
    return dx, dy, torch.empty_like(scale)


def _forward_bytes(run: Run, x: Tensor, y: Tensor | None, *rest: Any) -> int:
    block, _rows = run.block(x, y)
    block = block if run.on_cpu else block // 4
    return block + run.travelling(x, y) + _guide_bytes(run, *rest)


def _backward_bytes(run: Run, x: Tensor, y: Tensor | None, *rest: Any) -> int:
    return gradient_bytes(run, x, y, 5) + _guide_bytes(run, *rest)


def _guide_bytes(run: Run, *rest: Any) -> int:
    """The guide's columns that travel, and copies for the kernels.

    In torch operations its products and wider copies take the place of those of the logits.
    """
    guide, columns = rest[4:6]
    if guide is None:
        return 0
    return run.travelling(guide, guide) + (0 if run.on_cpu else padded_bytes(guide, columns))


logsumexps, logsumexps_backward = reduction_operators(
    "logsumexps",
    Body(_forward, _forward_fake, _forward_bytes),
    Body(_backward, _backward_fake, _backward_bytes),
    tensors=8,
    differentiable=(3, 2),
)


# --- around the sweep -----------------------------------------------------------------------------


def _guide(x: Tensor | None, y: Tensor | None) -> Guide | None:
    return None if x is None or y is None else Guide(x, y)


def _terms(x: Tensor, y: Tensor | None, pairs: Pairs, cols: bool, wanted: str) -> str:
    """What all ranks must do alike, in words."""
    return (
        f"{'x against itself' if y is None else 'x against y'}, width {x.shape[1]}, "
        f"{str(x.dtype).removeprefix('torch.')}, {x.device.type}, "
        f"gradients wanted: {wanted or 'none'}, "
        f"sides: {'both' if cols or y is None else 'rows'}, "
        f"ids: {'given' if pairs.row_ids is not None else 'none'}, diagonal: {pairs.diagonal}, "
        f"ceiling: {'none' if pairs.ceiling is None else 'given'}, "
        f"guide: {kind_of(None if pairs.guide is None else pairs.guide.cols)}, "
        f"{backends.arithmetic(x)}, {ranks.plan(x)}"
    )


def _new_saved(x: Tensor, y: Tensor | None, n: int, save: bool, settings: Sequence[int]) -> Tensor:
    """Room for what stays for the backward pass; n: ranks of the group, 0 alone.

    Alone the first blocks' logits (`saved_logits`). In a group all ranks' columns, if they fit one
    round; the shape must be known without the other ranks, so it may be there and hold nothing:
    shards of several sizes are not gathered.
    """
    limits = Settings(*settings)
    if not save:
        return x.new_empty(0)
    if n == 0:
        size = saved_logits(x, x if y is None else y, limits.workspace)
        return x.new_empty(size, dtype=accumulator_dtype(x.dtype))
    # Otherwise the gathered columns are padded to whole 16 bytes.
    whole_lines = y is not None and y.shape[1] * y.element_size() % 16 == 0
    if y is None or not whole_lines or not gathered.fits_one_round(y, n, limits.gather):
        return x.new_empty(0)
    return y.new_empty(n * y.shape[0], y.shape[1])


def saved_logits(x: Tensor, y: Tensor, limit: int) -> int:
    """Number of logits that stay for the backward pass: as many as a block leaves of the workspace.

    Both passes must have this workspace, of `limit` bytes: it decides which blocks the logits are
    of. On the CPU alone, where blocks take little of it; each block kept is not computed twice.
    """
    if x.device.type != "cpu":
        return 0
    left = limit - eager.block_bytes(*eager.block_shape(x, limit), x)
    return max(0, min(left // accumulator_dtype(x.dtype).itemsize, x.shape[0] * y.shape[0]))


def _sweep(
    x: Tensor, y: Tensor | None, scale: Tensor, pairs: Pairs, schedule: Schedule, saved: Tensor
) -> tuple[SortedMatrix, engine.Sweep[Tiles]]:
    """The matrix in the order of its ids, and its sweep."""
    matrix = sort_by_id(x, y, pairs)
    pairs = matrix.pairs
    if not schedule.alone:
        # Each shard in an order of its own: pairs (i, i) of one rank stay on the diagonal.
        start = schedule.starts[schedule.rank]
        pairs, saved = replace(pairs, row_start=start, col_start=start), saved[:0]
    own = _tiles(matrix.x, matrix.y, pairs, scale, y is None, saved)
    guide_x, guide_columns = (None, None) if pairs.guide is None else pairs.guide

    def against(chunk: Chunk) -> Tiles:
        features, ids, guide_y, *_ = chunk.tensors
        assert features is not None
        guide = _guide(guide_x, guide_y)
        theirs = replace(pairs, col_ids=ids, guide=guide, col_start=chunk.start)
        return _tiles(own.x, features, theirs, scale)

    shards = [Shard(own.y), Shard(pairs.col_ids), Shard(guide_columns)]
    return matrix, engine.Sweep(schedule, own, shards, against)


def _tiles(
    x: Tensor,
    y: Tensor,
    pairs: Pairs,
    scale: Tensor,
    symmetric: bool = False,
    saved: Tensor | None = None,
) -> Tiles:
    """The blocks of x (m, d) against y (n, d); kernels save no logits."""
    if not all(map(backends.uses_kernels, (x, *(pairs.guide or ())))):
        return SoftmaxTiles(x, y, pairs, scale, symmetric, saved)
    from megabatch.similarity.backends.triton.softmax import SoftmaxKernelTiles

    return SoftmaxKernelTiles(x, y, pairs, scale, symmetric)


# --- blocks in torch operations -------------------------------------------------------------------


class SoftmaxTiles(EagerTiles):
    """See `base.StateTiles`; an upstream is the tensor that travels."""

    def __init__(
        self,
        x: Tensor,
        y: Tensor,
        pairs: Pairs,
        scale: Tensor,
        symmetric: bool = False,
        saved: Tensor | None = None,
    ) -> None:
        """`saved`: room for the logits of the first blocks; the backward pass reads them there."""
        super().__init__(x, y, pairs, symmetric)
        self.scale = scale
        self._scratch = self._buffers(2)
        self._saved = {} if saved is None else self._saved_blocks(saved)

    # Forward.

    def reduce(self, cols: bool) -> tuple[Tensor, Tensor | None]:
        """The results of all rows and, if wanted, of all columns."""
        rows = self.new_state(self.m)
        columns = self.new_state(self.n) if cols else None
        self.forward(rows, columns, (True, True))
        sides = [state for state in (rows, columns) if state is not None]
        results = [states.to_logsumexp(state, self.new_results(state.shape[1])) for state in sides]
        return results[0], results[1] if cols else None

    def new_state(self, size: int) -> Tensor:
        """See `base.StateTiles`."""
        return states.new_state(size, self.pairs.has_positives, self.x)

    def clear(self, state: Tensor) -> Tensor:
        """See `base.StateTiles`."""
        return states.clear(state)

    def new_results(self, size: int) -> Tensor:
        """See `base.StateTiles`."""
        return states.new_results(size, self.pairs.has_positives, self.x)

    def forward(
        self, rows: Tensor, cols: Tensor | None, overwrite: tuple[bool, bool] = (False, False)
    ) -> None:
        """See `base.StateTiles`."""
        states.clear_if(rows, cols, overwrite)
        for i in self.row_blocks():
            for j in self.col_blocks(i):
                mirrored = self.symmetric and i != j
                other = rows if mirrored else cols
                others = None if other is None else other[:, j]
                s, scratch = self._logits(i, j, save=True)
                forward_tile(s, self._masks(i, j, s, scratch), rows[:, i], others, scratch)

    def merge(self, parts: Tensor) -> Tensor:
        """See `base.StateTiles`."""
        return states.merge(parts)

    def write_results(self, parts: Tensor, out: Tensor) -> None:
        """See `base.StateTiles`."""
        states.to_logsumexp(parts[0] if len(parts) == 1 else states.merge(parts), out)

    # Backward.

    def make_upstream(self, results: Tensor, gradient: Tensor) -> Tensor:
        """A side's upstream from its results and their gradients."""
        return states.upstream(results, gradient)

    def upstream(self, numbers: Tensor | None) -> Tensor | None:
        """See `base.Tiles`."""
        return numbers

    def numbers(self, upstream: Tensor | None) -> Tensor | None:
        """See `base.Tiles`."""
        return upstream

    def upstream_size(self, rows: Tensor | None, cols: Tensor | None) -> Tensor | None:
        """See `base.StateTiles`. On the CPU dS stays in float32; a GPU's products take float16."""
        if self.x.dtype != torch.float16 or not eager.rounds_left(self.x):
            return None
        return states.upstream_size([side for side in (rows, cols) if side is not None])

    def divide_upstream(self, numbers: Tensor, size: Tensor) -> None:
        """See `base.StateTiles`."""
        states.divide_upstream(numbers, size)

    def gradient_block(
        self, i: slice, j: slice, rows: Tensor | None, cols: Tensor | None
    ) -> Tensor:
        """See `base.Tiles`."""
        s, scratch = self._logits(i, j)
        return gradient_tile(
            s,
            self._masks(i, j, s, scratch),
            None if rows is None else rows[:, i],
            None if cols is None else cols[:, j],
            (buffer_views(self._scratch, i, j)[0], scratch),
        )

    def _masks(self, i: slice, j: slice, s: Tensor, scratch: Tensor) -> Masks:
        """Of a block of logits `s`; a guide's products overwrite `scratch`."""
        pairs = self.pairs.view(i, j)
        judged = s if pairs.guide is None else eager.products(*pairs.guide, scratch)
        return pairs.masks(judged)

    def _logits(self, i: slice, j: slice, save: bool = False) -> tuple[Tensor, Tensor]:
        """The logits of a block, and a buffer of its size; `save` writes saved ones first."""
        saved = self._saved.get((i.start, j.start))
        first, second = buffer_views(self._scratch, i, j)
        if saved is not None and not save:
            return saved, second
        out = first if saved is None else saved
        return eager.logits(self.x[i], self.y[j], self.scale, out=out), second

    def _saved_blocks(self, saved: Tensor) -> dict[tuple[int, int], Tensor]:
        """Room for the logits of the blocks that fit into `saved`, by their first pair."""
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


@without_autocast
def forward_tile(
    s: Tensor, masks: Masks, rows: Tensor, cols: Tensor | None, scratch: Tensor
) -> None:
    """Merge a block of logits `s` (m, n) into the states `rows` and `cols`, in place."""
    positive, dropped = masks
    if positive is None and dropped is None:
        shift = merge_sum(rows[:2], s, 1, scratch)
        if cols is not None and not _merge_shared(cols[:2], scratch, shift):
            merge_sum(cols[:2], s, 0, scratch)
        return
    excluded = either(positive, dropped)
    negatives = s.masked_fill(excluded, -torch.inf)
    for state, dim in ((rows, 1), (cols, 0)):
        if state is None:
            continue
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
    """Merge the columns' sums of the rows' e^(s - shift), if they are as good as their own.

    One exponential a logit instead of two. Weighting each row by e^(shift - reference) gives the
    columns' sums relative to one reference. Terms that underflowed on the way are below the
    smallest normal number, so a sum above its power 2/3 has lost nothing that counts.
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
    """Whether one exponential serves both sides of a block: all their log-sum-exps lie close.

    Within 40 of each other, terms that underflow relative to the largest (e^-87 in float32) are
    probabilities below e^-47.
    """
    if rows.device.type != "cpu":  # the check would stall a GPU's stream
        return False
    low, high = torch.aminmax(torch.cat([rows[0], cols[0]]))
    return bool(high - low < 40)


def either(first: Tensor | None, second: Tensor | None) -> Tensor:
    """The union of two masks, of which one may be None."""
    if first is None or second is None:
        return second if first is None else first  # type: ignore[return-value]
    return first | second
