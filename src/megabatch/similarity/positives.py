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
    Matrix,
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
    sums, sizes = torch.zeros_like(o.negative), new_sizes(o.group, o.x)
    with settings.applied(o.settings, o.x):
        if o.group:
            y = o.x if o.y is None else o.y
            terms, mine = f"{CALL}, {y.shape[1]} wide, {y.dtype}", [len(o.x), len(y)]
            sizes = torch.tensor(comm.agree(o.group, terms, mine, y.device), device="cpu").T
        pairs = _Pairs(o, sizes)
        for i, _, gap in pairs.gaps():
            sums[i] += F.softplus(gap, threshold=50).sum(1)
        return Results(restore(sums, pairs.orders.rows, 0), sizes)


def _forward_fake(*flat: Any) -> Results:
    o = Operands(*flat)
    return Results(torch.empty_like(o.negative), new_sizes(o.group, o.x))


def _backward(*flat: Any) -> tuple[Tensor, ...]:
    o, results, (upstream,), need = positive_softplus_sums.split(flat)
    if upstream is None:  # other ranks wait for this one's part
        upstream = torch.zeros_like(o.negative)
    dtype, dnegative = accumulator_dtype(o.x.dtype), torch.zeros_like(o.negative)
    with settings.applied(o.settings, o.x):
        pairs = _Pairs(o, results.sizes)
        x, y, gradient = pairs.x, pairs.y, sort(upstream, pairs.orders.rows, 0)
        dx, dy = (torch.zeros_like(t, dtype=dtype) for t in (x, y))
        for i, j, gap in pairs.gaps():
            weights = torch.sigmoid(gap) * gradient[i, None]  # -dS
            dnegative[i] += weights.sum(1)
            dx[i].addmm_(weights, y[j].to(dtype), alpha=-1)
            dy[j].addmm_(weights.T, x[i].to(dtype), alpha=-1)
        dscale = (x.to(dtype) * dx).sum()
        dx, dnegative = (restore(t, pairs.orders.rows, 0) for t in (dx, dnegative))
        dy = pairs.layout.sum(restore(dy, pairs.orders.cols, 0)).wait()
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


class _Pairs:
    """This rank's rows against the columns of all ranks, both sorted by id."""

    def __init__(self, o: Operands, sizes: Tensor) -> None:
        rows = Side(o.x, o.row_ids)
        columns = rows if o.y is None else Side(o.y, o.col_ids)
        group, own_sizes = None, [len(columns.features)]
        if o.group:
            group, own_sizes = comm.resolve(o.group), sizes[1].tolist()
        self.layout = Layout(group, own_sizes, CALL)
        matrix = Matrix(rows, self.layout.gather(columns).wait())
        (rows, columns, *_), self.orders = sort_by_id(matrix)
        self.x, self._row_ids, self.y, self._col_ids = *rows[:2], *columns[:2]
        self._scale, self._negative = o.scale, sort(o.negative, self.orders.rows, 0)
        #: of x against itself: the column of each row
        self._self = None
        if o.y is None and self.orders.rows is not None:
            self._self = self.orders.rows + self.layout.own.start

    def gaps(self) -> Iterator[tuple[slice, slice, Tensor]]:
        """Blocks (i, j) that hold positives: negative_i - S_ij, and -inf for other pairs."""
        x, y, row_ids, col_ids = self.x, self.y, self._row_ids, self._col_ids
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
                gap = self._negative[i, None] - (x[i].to(dtype) * self._scale) @ y[j].to(dtype).T
                other = (row_ids[i, None] != col_ids[j]) | (row_ids[i, None] < 0)
                if self._self is not None and self.orders.cols is not None:
                    other |= self._self[i, None] == self.orders.cols[j]
                yield i, j, gap.masked_fill_(other, -torch.inf)
