"""Sums over the pairs of equal ids: each positive against the negatives of its row.

Rows and columns are sorted by id, so that pairs of equal ids lie in a band of blocks; no other
block is computed. In a group each process holds the columns of all processes during the call.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from megabatch.similarity import settings
from megabatch.similarity.arguments import accumulator_dtype
from megabatch.similarity.distributed import comm
from megabatch.similarity.distributed.comm import group_name
from megabatch.similarity.distributed.layout import Layout
from megabatch.similarity.distributed.schedule import new_sizes
from megabatch.similarity.eager import block_shape
from megabatch.similarity.matrix import (
    DROPPED,
    PLAIN,
    Matrix,
    Orders,
    Side,
    restore,
    sort,
    sort_by_id,
    strips,
)
from megabatch.similarity.ops import Reduction

#: The operation's name.
CALL = "positive_softplus"


def positive_softplus(
    x: Tensor,
    y: Tensor | None,
    scale: Tensor,
    negative: Tensor,
    ids: Tensor | tuple[Tensor, Tensor],
    group: object = None,
) -> Tensor:
    """(m,) sums over each row's positives p of softplus(negative_i - scale * <x_i, y_p>).

    A term is -log of the positive's softmax probability among itself and the row's negatives.

    Args:
        x, y, scale, ids, group: as in `split_logsumexp`, already checked; y=None leaves out
            each row's pair with itself. negative: (m,) each row's log-sum-exp over negatives.

    Time and memory: O(d) for each pair of equal ids and each row; the blocks are bounded by the
    workspace. In a group, each process takes the columns of all processes and their gradient in
    the accumulator's dtype, O(rows of all processes * d), until the call ends.
    """
    row_ids, col_ids = (ids, None) if isinstance(ids, Tensor) else ids
    tensors = x, y, scale, negative, row_ids.contiguous(), col_ids
    sums: Tensor = positive_softplus_sums(*tensors, group_name(group), settings.of_call(x))[0]
    return sums


# --- the operators --------------------------------------------------------------------------------


class Operands(NamedTuple):
    """Operands of the operators; y None: x against itself."""

    x: Tensor
    y: Tensor | None
    scale: Tensor
    negative: Tensor
    row_ids: Tensor
    col_ids: Tensor | None
    group: str
    settings: Sequence[int]


class Results(NamedTuple):
    """Results of the forward operator."""

    sums: Tensor  #: (m,)
    sizes: Tensor  #: of all ranks, see `schedule.new_sizes`


def _forward(*flat: Any) -> Results:
    o = Operands(*flat)
    total, sizes = torch.zeros_like(o.negative), new_sizes(o.group, o.x)
    with settings.applied(o.settings, o.x):
        if o.group:
            y = o.x if o.y is None else o.y
            terms, mine = f"{CALL}, {y.shape[1]} wide, {y.dtype}", [len(o.x), len(y)]
            sizes = torch.tensor(comm.agree(o.group, terms, mine, y.device), device="cpu").T
        for matrix, orders, _ in _matrices(o, sizes):
            sums = torch.zeros_like(total)
            for i, _, gap in _gaps(matrix, o.scale, sort(o.negative, orders.rows, 0)):
                sums[i] += F.softplus(gap, threshold=50).sum(1)
            total += restore(sums, orders.rows, 0)
    return Results(total, sizes)


def _forward_fake(*flat: Any) -> Results:
    o = Operands(*flat)
    return Results(torch.empty_like(o.negative), new_sizes(o.group, o.x))


def _backward(*flat: Any) -> tuple[Tensor, ...]:
    o, results, (upstream,), need = positive_softplus_sums.split(flat)
    if upstream is None:  # other ranks wait for this one's part
        upstream = torch.zeros_like(o.negative)
    dtype, y = accumulator_dtype(o.x.dtype), o.x if o.y is None else o.y
    dx, dy = (torch.zeros_like(t, dtype=dtype) for t in (o.x, y))
    dscale, dnegative = torch.zeros_like(o.scale), torch.zeros_like(o.negative)
    with settings.applied(o.settings, o.x):
        for matrix, orders, layout in _matrices(o, results.sizes):
            sorted_x, sorted_y = matrix.rows.features, matrix.cols.features
            rows, cols = (torch.zeros_like(t, dtype=dtype) for t in (sorted_x, sorted_y))
            gradient, slopes = sort(upstream, orders.rows, 0), torch.zeros_like(dnegative)
            for i, j, gap in _gaps(matrix, o.scale, sort(o.negative, orders.rows, 0)):
                weights = torch.sigmoid(gap) * gradient[i, None]  # -dS
                slopes[i] += weights.sum(1)
                rows[i].addmm_(weights, sorted_y[j].to(dtype), alpha=-1)
                cols[j].addmm_(weights.T, sorted_x[i].to(dtype), alpha=-1)
            dscale += (sorted_x.to(dtype) * rows).sum()
            dnegative += restore(slopes, orders.rows, 0)
            dx += restore(rows, orders.rows, 0)
            dy += layout.sum(restore(cols, orders.cols, 0)).wait()
    dx, dy = dx.mul_(o.scale), dy.mul_(o.scale)
    if o.y is None:
        dx = dx.add_(dy)
    found = dx.to(o.x.dtype), dy.to(o.x.dtype), dscale, dnegative
    return tuple(t if needed else t.new_empty(0) for t, needed in zip(found, need, strict=True))


positive_softplus_sums = Reduction(
    CALL,
    Operands,
    Results,
    (_forward, _forward_fake, _backward),
    wanted=4,
    outputs=1,
)


def _matrices(o: Operands, sizes: Tensor) -> Iterator[tuple[Matrix, Orders, Layout]]:
    """This rank's rows against its own columns, then in a group against the others'.

    Each sorted by id, with its orders and the layout of its columns.
    """
    y, ids, diagonal = (o.x, o.row_ids, DROPPED) if o.y is None else (o.y, o.col_ids, PLAIN)
    rows, columns = Side(o.x, o.row_ids), Side(y, ids)
    yield *sort_by_id(Matrix(rows, columns, diagonal)), Layout(None, [len(y)], "")
    if o.group:
        layout = Layout(comm.resolve(o.group), sizes[1].tolist(), CALL)
        everyone = layout.gather(columns).wait()
        assert everyone.ids is not None
        everyone.ids[layout.own] = -1  # equal to no other
        yield *sort_by_id(Matrix(rows, everyone)), layout


def _gaps(matrix: Matrix, scale: Tensor, negative: Tensor) -> Iterator[tuple[slice, slice, Tensor]]:
    """Blocks (i, j) that hold positives, with negative_i - S_ij there and -inf elsewhere."""
    (x, row_ids, *_), (y, col_ids, *_) = matrix.rows, matrix.cols
    assert row_ids is not None
    assert col_ids is not None
    if not (len(x) and len(y)):
        return
    height, width = block_shape(x)
    dtype, rows = accumulator_dtype(x.dtype), list(strips(len(x), height))
    first = row_ids[::height].clamp(min=0)
    last = row_ids[[i.stop - 1 for i in rows]]
    begin = torch.searchsorted(col_ids, first)
    end = torch.searchsorted(col_ids, last, right=True)
    bounds = torch.stack([begin, end], 1).tolist()  # the only synchronisation
    for i, (start, stop) in zip(rows, bounds, strict=True):
        for inner in strips(max(0, stop - start), width):
            j = slice(start + inner.start, start + inner.stop)
            gap = negative[i, None] - (x[i].to(dtype) * scale) @ y[j].to(dtype).T
            positive, _ = matrix.view(i, j).masks(gap)
            if positive is not None:
                yield i, j, gap.masked_fill_(~positive, -torch.inf)
