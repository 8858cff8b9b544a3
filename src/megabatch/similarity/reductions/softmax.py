"""Log-sum-exps of the rows and columns of a matrix, split by whether a pair's ids are equal.

The method is Inf-CL's (arXiv 2410.17243, section 3: tiles that are never stored) with one sweep
for both directions, and FlashAttention's running sums (arXiv 2205.14135). y=None means x against
itself. The operators return stacks of results (`states`): one row, or the four of `Split`.
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
from megabatch.similarity.distributed import comm, gathered, ranks
from megabatch.similarity.distributed.ranks import Ranks
from megabatch.similarity.distributed.schedule import Chunk, Gathered, Schedule, Shard
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
from megabatch.similarity.reductions.softmax_tiles import SoftmaxTiles
from megabatch.similarity.settings import AppliedSettings, Settings

if TYPE_CHECKING:
    from megabatch.similarity.backends.triton.softmax import SoftmaxKernelTiles

Tiles: TypeAlias = "SoftmaxTiles | SoftmaxKernelTiles"


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
    The fourth is saved for the backward pass if `save`: the first blocks' logits, or in a group all
    ranks' columns.

    Args:
        diagonal: of `masks.Pairs`. cols: whether the columns' side is wanted.
        call: the public function's name, and more on which all ranks must agree.
        wanted: names of the inputs that need gradients.
        group: its name, "" for this process alone.
        settings: of the call, see `settings.Settings`.
    """
    pairs = Pairs(diagonal, row_ids, col_ids, ceiling, _guide(guide_x, guide_y))
    with AppliedSettings(settings, x), torch.cuda.device_of(x):
        terms = _terms(x, y, pairs, cols, wanted) if group else ""
        own_sizes = x.shape[0], (x if y is None else y).shape[0]
        schedule, sizes = handshake(group, call, terms, *own_sizes, x, y is None)
        saved = _new_saved(x, y, sizes.shape[1], save, settings)
        if isinstance(schedule, Ranks) and y is None and len(saved):
            schedule.use_buffer(saved, filled=False)
        matrix, sweep = _sweep(x, y, scale, pairs, schedule, saved)
        row_results, col_results = engine.reduce(sweep, cols)
    if isinstance(schedule, Ranks) and y is not None and len(saved):
        gathered_features = schedule.gathered
        saved = saved if gathered_features is None else gathered_features
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
    if group:  # other ranks wait for this one's part, whether or not its own loss used it
        if row_gradient is None:
            row_gradient = torch.zeros_like(rows)
        if cols and col_gradient is None:
            col_gradient = torch.zeros_like(columns)
    with AppliedSettings(settings, x), torch.cuda.device_of(x):
        schedule = schedule_again(group, call, sizes, x, saved, y is None)
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
    return block + run.transfer_bytes(x, y) + _guide_bytes(run, *rest)


def _backward_bytes(run: Run, x: Tensor, y: Tensor | None, *rest: Any) -> int:
    return gradient_bytes(run, x, y, 5) + _guide_bytes(run, *rest)


def _guide_bytes(run: Run, *rest: Any) -> int:
    """Bytes of the guide's columns from other ranks, and of copies for the kernels.

    In torch operations its products and wider copies reuse the logits' buffers.
    """
    guide, columns = rest[4:6]
    if guide is None:
        return 0
    return run.transfer_bytes(guide, guide) + (0 if run.on_cpu else padded_bytes(guide, columns))


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
    """Description of the call, on which all ranks must agree."""
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
    """An empty tensor for what is saved for the backward pass; n: ranks of the group, 0 alone.

    One process saves the first blocks' logits (`saved_logits`), a group other ranks' features
    (`saved_shards`). The shape must be known without the other ranks, so the tensor may remain
    unused: those of shards of different sizes are not saved.
    """
    limits = Settings(*settings)
    if not save:
        return x.new_empty(0)
    if n == 0:
        size = saved_logits(x, x if y is None else y, limits.workspace)
        return x.new_empty(size, dtype=accumulator_dtype(x.dtype))
    columns = x if y is None else y
    shards = gathered.saved_shards(columns, n, y is None, limits.gather)
    return columns.new_empty(shards * columns.shape[0], columns.shape[1])


def saved_logits(x: Tensor, y: Tensor, limit: int) -> int:
    """Number of logits saved for the backward pass: as many as fit next to a block.

    Both passes must have this workspace, of `limit` bytes, as it decides the shape of blocks. Only
    the CPU saves logits, where blocks take little of the workspace.
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
        # Each rank sorts its own shard, so that its pairs (i, i) stay on the diagonal.
        start = schedule.starts[schedule.rank]
        pairs, saved = replace(pairs, row_start=start, col_start=start), saved[:0]
    own = _tiles(matrix.x, matrix.y, pairs, scale, y is None, saved)
    guide_x, guide_columns = (None, None) if pairs.guide is None else pairs.guide

    def make_tiles(rows: Gathered, chunk: Chunk) -> Tiles:
        x, row_ids, ceiling, guide_x, *_ = rows
        y, col_ids, guide_y, *_ = chunk.tensors
        assert x is not None
        assert y is not None
        guide, places = _guide(guide_x, guide_y), (schedule.rows.start, chunk.start)
        block = Pairs(pairs.diagonal, row_ids, col_ids, ceiling, guide, *places)
        return _tiles(x, y, block, scale)

    rows = [Shard(own.x), Shard(pairs.row_ids), Shard(pairs.ceiling), Shard(guide_x)]
    cols = [Shard(own.y), Shard(pairs.col_ids), Shard(guide_columns)]
    return matrix, engine.Sweep(schedule, own, (rows, cols), make_tiles)


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
