"""Log-sum-exps over several processes: what a rank computes of them while columns come by.

The operators around it are in `statistics_ring`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from megabatch.similarity import id_order
from megabatch.similarity.distributed import comm
from megabatch.similarity.distributed.ring import Parts, Visit
from megabatch.similarity.shards import Blocks, Once, Shards, catch_up
from megabatch.similarity.states import clear, new_results, new_state

Pull: TypeAlias = Any  # of one side: whatever these blocks make of it


def forward(shards: Shards, scale: Tensor, kinds: int, columns: bool) -> tuple[Tensor, Tensor]:
    """The results of the rows and, where wanted, of the columns."""
    x, own, route = shards.x, shards.own, shards.route(columns)
    begun = Once()

    def unwritten(size: int) -> Tensor:
        state = new_state(size, kinds, x)
        return state if len(x) else clear(state)  # a rank without rows visits nobody

    def visit(piece: Visit, blocks: Blocks) -> None:
        blocks.forward(scale, row_state, piece.part, (begun.first(), True))

    def itself() -> None:
        own.forward(scale, row_state, None, (begun.first(), False))

    row_state = unwritten(len(x))
    far = new_results(new_state(len(shards.y) if columns else 0, kinds, x))
    parts = Parts(unwritten, 1, own.merged)
    for home, states in shards.tour(None, visit, route, parts, itself=itself):
        if shards.symmetric:
            row_state[:, home] = own.merged(torch.cat([row_state[None, :, home], states]))
        else:
            own.results(states, far[:, home])
    if begun.first():  # no rank has a column
        clear(row_state)
    near = new_results(row_state)
    own.results(row_state[None], near)
    return near, far if columns else near.new_empty(0)


def pull_of(
    own: Blocks, values: Tensor, gradient: Tensor | None, order: Tensor | None
) -> Pull | None:
    """What a side's `values` and their upstream gradient pull; None where there is none."""
    if gradient is None:
        return None
    return own.pull(id_order.sort(values, order, 1), id_order.sort(gradient, order, 1))


def _numbers(pull: Pull | None) -> Tensor | None:
    """What of a pull travels; `side` makes a pull of it."""
    return pull if pull is None or isinstance(pull, Tensor) else pull.pull


def gradients(
    shards: Shards,
    scale: Tensor,
    factor: Tensor,
    near: Pull | None,
    far: Pull | None,
    need_x: bool,
    need_y: bool,
    need_scale: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Of x, y and the scale; `near` and `far` are the pulls of this rank's rows and columns."""
    own, (x, y), route = shards.own, shards.features, shards.route(need_y)
    # The scale's gradient comes with dx, or with dy where x is frozen.
    total = own.buffer(len(x)) if need_x or not need_y else None
    dx, dy = x.new_empty(0), torch.empty_like(y) if need_y else y.new_empty(0)
    inners: list[Tensor] = []  # parts of the scale's gradient
    begun = Once()
    later: list[Callable[[], None]] = []  # the last product of x's gradient

    def visit(piece: Visit, blocks: Any) -> None:
        catch_up(later)
        far, first = blocks.side(piece.cargo[2]), begun.first()
        for i in blocks.strips():
            strip = None if total is None else total[i]
            last = later if i.stop == len(x) else None
            blocks.backward(i, scale, near, far, strip, piece.part, (first, i.start == 0), last)

    def complete() -> None:
        """x's gradient, which stays here."""
        nonlocal dx
        catch_up(later)
        if total is None:
            return
        if begun.first():  # no rank has a column
            total.zero_()
        dx = torch.empty_like(x) if need_x else dx
        inner = own.finish(total, "x", slice(0, len(x)), factor, need_scale, dx if need_x else None)
        inners.extend([] if inner is None else [inner])

    parts = Parts(own.buffer)
    for home, arrived in shards.tour(_numbers(far), visit, route, parts, meanwhile=complete):
        inner = own.finish(arrived, "y", home, factor, need_scale and total is None, dy[home])
        inners.extend([] if inner is None else [inner])
        del arrived  # a part of what this rank found for all
    # One launch less where there is one part.
    return dx, dy, inners[0] if len(inners) == 1 else sum(inners, torch.zeros_like(scale))


def mirrored_gradients(
    shards: Shards, scale: Tensor, factor: Tensor, pull: Pull | None, need_x: bool, need_scale: bool
) -> tuple[Tensor, Tensor]:
    """Gradients of x, held against itself, and of the scale; `pull` is that of this rank's rows."""
    own, x = shards.own, shards.features[0]
    total, begun = own.buffer(len(x)), Once()

    def visit(piece: Visit, blocks: Any) -> None:
        far, first = blocks.side(piece.cargo[2]), begun.first()
        for i in blocks.strips():
            fresh = first, i.start == 0
            blocks.backward(i, scale, pull, far, total[i], piece.part, fresh)

    def itself() -> None:
        begun.first()
        for i in own.strips():
            first = i.start == 0
            own.backward(i, scale, pull, pull, total[i], total, (first, first))

    route, parts = shards.route(False), Parts(own.buffer)
    for home, arrived in shards.tour(_numbers(pull), visit, route, parts, itself=itself):
        total[home] += arrived
    if begun.first():  # no rank has a row
        total.zero_()
    dx = torch.empty_like(x) if need_x else x.new_empty(0)
    rows = slice(0, len(x))
    inner = own.finish(total, "x", rows, factor, need_scale, dx if need_x else None)
    # Each pair is met as (i, j) and as (j, i).
    return dx, torch.zeros_like(scale) if inner is None else inner / 2


def common_size(shards: Shards, near: Pull | None, far: Pull | None) -> Tensor | None:
    """`Blocks.prepare` with one factor for all ranks, since their gradients are added up."""
    size = shards.own.prepare(near, far)
    if shards.x.dtype != torch.float16:  # the only type whose range asks for one
        return size
    largest = shards.x.new_zeros((), dtype=torch.float32) if size is None else size.clone()
    comm.all_reduce(largest, shards.ring.name, shards.ring.operation, dist.ReduceOp.MAX)
    largest = torch.where(largest == 0, 1.0, largest)
    for pull in map(_numbers, (near, far)):
        if pull is not None and size is not None:
            pull[1::2] *= size / largest
            pull[4:] *= size / largest
    return largest
