"""Sums over the pairs of equal ids: each positive against the negatives of its row.

Rows and columns are sorted by id, so that pairs of equal ids lie in a band of blocks; no other
block is computed. In a group each process holds the columns of all processes during the call.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megabatch.similarity.arguments import accumulator_dtype
from megabatch.similarity.distributed import comm
from megabatch.similarity.distributed.comm import group_name
from megabatch.similarity.eager import block_shape, without_autocast
from megabatch.similarity.matrix import (
    DROPPED,
    PLAIN,
    Matrix,
    Orders,
    Side,
    restore,
    sort,
    sort_by_id,
)
from megabatch.similarity.ops import operator
from megabatch.similarity.slices import strips


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
    operands = x, y, scale, negative, row_ids.contiguous(), col_ids
    return _positive_softplus(*operands, group_name(group))


@operator("positive_softplus", group_argument=6)
def _positive_softplus(
    x: Tensor,
    y: Tensor | None,
    scale: Tensor,
    negative: Tensor,
    row_ids: Tensor,
    col_ids: Tensor | None,
    group: str,
) -> Tensor:
    total = torch.zeros_like(negative)
    for matrix, orders in _matrices(x, y, row_ids, col_ids, group):
        sums = torch.zeros_like(negative)
        for i, _, gap in _gaps(matrix, scale, sort(negative, orders.rows, 0)):
            sums[i] += F.softplus(gap, threshold=50).sum(1)
        total += restore(sums, orders.rows, 0)
    return total


@_positive_softplus.register_fake
def _forward_fake(*arguments: Any) -> Tensor:
    return torch.empty_like(arguments[3])


@operator("positive_softplus_backward", group_argument=7)
def _positive_softplus_backward(
    x: Tensor,
    y: Tensor | None,
    scale: Tensor,
    negative: Tensor,
    row_ids: Tensor,
    col_ids: Tensor | None,
    gradient: Tensor,
    group: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of x, y (that of x in its place where y is None), scale and negative."""
    dtype = accumulator_dtype(x.dtype)
    dx, own = (torch.zeros_like(t, dtype=dtype) for t in (x, x if y is None else y))
    dscale, dnegative = torch.zeros_like(scale), torch.zeros_like(negative)
    for k, (matrix, orders) in enumerate(_matrices(x, y, row_ids, col_ids, group)):
        sorted_x, sorted_y = matrix.rows.features, matrix.cols.features
        rows, cols = (torch.zeros_like(t, dtype=dtype) for t in (sorted_x, sorted_y))
        upstream = sort(gradient, orders.rows, 0)
        slopes = torch.zeros_like(negative)
        for i, j, gap in _gaps(matrix, scale, sort(negative, orders.rows, 0)):
            weights = torch.sigmoid(gap) * upstream[i, None]  # -dS
            slopes[i] += weights.sum(1)
            _add_gradients(rows[i], cols[j], weights, sorted_x[i], sorted_y[j])
        dscale += (sorted_x.to(dtype) * rows).sum()
        dnegative += restore(slopes, orders.rows, 0)
        dx += restore(rows, orders.rows, 0)
        cols = restore(cols, orders.cols, 0)
        own += cols if k == 0 else _sum_of_own(cols, len(own), group)
    dx, own = dx.mul_(scale), own.mul_(scale)
    if y is None:
        dx = dx.add_(own)
    return dx.to(x.dtype), own.to(x.dtype), dscale, dnegative


@_positive_softplus_backward.register_fake
def _backward_fake(
    x: Tensor, y: Tensor | None, scale: Tensor, negative: Tensor, *rest: Any
) -> tuple[Tensor, ...]:
    return tuple(torch.empty_like(t) for t in (x, x if y is None else y, scale, negative))


def _setup_context(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    *tensors, ctx.group = inputs
    ctx.save_for_backward(*tensors)


def _backward(ctx, gradient):  # type: ignore[no-untyped-def]
    gradients = _positive_softplus_backward(*ctx.saved_tensors, gradient, ctx.group)
    dx, dy, dscale, dnegative = gradients
    return dx, None if ctx.saved_tensors[1] is None else dy, dscale, dnegative, None, None, None


_positive_softplus.register_autograd(_backward, setup_context=_setup_context)


# --- blocks ---------------------------------------------------------------------------------------


def _gaps(matrix: Matrix, scale: Tensor, negative: Tensor) -> Iterator[tuple[slice, slice, Tensor]]:
    """Blocks (i, j) that hold positives, with negative_i - S_ij there and -inf elsewhere."""
    (x, row_ids, *_), (y, col_ids, *_) = matrix.rows, matrix.cols
    assert row_ids is not None
    assert col_ids is not None
    if not (len(x) and len(y)):
        return
    height, width = block_shape(x)
    rows = list(strips(len(x), height))
    first = row_ids[::height].clamp(min=0)
    last = row_ids[[i.stop - 1 for i in rows]]
    begin = torch.searchsorted(col_ids, first)
    end = torch.searchsorted(col_ids, last, right=True)
    bounds = torch.stack([begin, end], 1).tolist()  # the only synchronisation
    for i, (start, stop) in zip(rows, bounds, strict=True):
        for inner in strips(max(0, stop - start), width):
            j = slice(start + inner.start, start + inner.stop)
            gap = negative[i, None] - _logits(x[i], y[j], scale)
            positive, _ = matrix.view(i, j).masks(gap)
            if positive is not None:
                yield i, j, gap.masked_fill_(~positive, -torch.inf)


@without_autocast
def _logits(x: Tensor, y: Tensor, scale: Tensor) -> Tensor:
    dtype = accumulator_dtype(x.dtype)
    return (x.to(dtype) * scale) @ y.to(dtype).T


def _add_gradients(dx: Tensor, dy: Tensor, weights: Tensor, x: Tensor, y: Tensor) -> None:
    """Subtract weights @ y from dx and weights.T @ x from dy."""
    with torch.autocast(x.device.type, enabled=False):
        dx.addmm_(weights, y.to(dx.dtype), alpha=-1)
        dy.addmm_(weights.T, x.to(dy.dtype), alpha=-1)


# --- several processes ----------------------------------------------------------------------------


def _matrices(
    x: Tensor, y: Tensor | None, row_ids: Tensor, col_ids: Tensor | None, group: str
) -> list[tuple[Matrix, Orders]]:
    """This rank's rows against its own columns, and in a group against those of the others."""
    if y is None or col_ids is None:
        y, col_ids, diagonal = x, row_ids, DROPPED
    else:
        diagonal = PLAIN
    rows = Side(x, row_ids)
    matrices = [Matrix(rows, Side(y, col_ids), diagonal)]
    if group:
        matrices.append(Matrix(rows, _columns_of_others(y, col_ids, group)))
    return [sort_by_id(matrix) for matrix in matrices]


def _columns_of_others(y: Tensor, ids: Tensor, name: str) -> Side:
    """All ranks' columns and ids, padded to one size; own and padded ones have the id -1."""
    group, operation = comm.resolve(name), "positive_softplus"
    sizes = comm.agree(name, f"{operation}, {y.shape[1]} wide, {y.dtype}", [len(y)], y.device)
    padding = max(size for (size,) in sizes) - len(y)
    columns = comm.all_gather(F.pad(y, (0, 0, 0, padding)), group, operation)
    every_id = comm.all_gather(F.pad(ids, (0, padding), value=-1), group, operation)
    every_id.wait()[group.rank()] = -1
    return Side(columns.wait().flatten(0, 1), every_id.wait().flatten())


def _sum_of_own(gradient: Tensor, rows: int, name: str) -> Tensor:
    """Sum over ranks of the gradients of this rank's columns, given as `_columns_of_others`."""
    return comm.reduce_scatter(gradient, comm.resolve(name), "positive_softplus").wait()[:rows]
