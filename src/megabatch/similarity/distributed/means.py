"""What a loss needs to know of other processes: means over all rows, ids, shared parameters.

Each process holds its own rows of one batch. Losses go through these few functions and know
nothing else of ranks.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from megabatch.similarity.arguments import accumulator_dtype
from megabatch.similarity.distributed import comm
from megabatch.similarity.distributed.comm import group_name, rank_and_size
from megabatch.similarity.ops import operator


def global_mean(
    values: Tensor,
    group: object,
    weights: Tensor | None = None,
    *,
    name: str = "values",
    batch: Tensor | None = None,
) -> Tensor:
    """The mean of one number a row over the rows of all processes, as this process's share of it.

    Returns `n_ranks * (sum over local rows) / (global count)`, with weights
    `n_ranks * (sum of weights * values) / (global sum of weights)`: the mean of it over ranks is
    the global mean, and averaging gradients over ranks, as DDP and FSDP do, gives its gradient.

    Args:
        values: (m,), m = 0 allowed where other processes have rows.
        group: None, "local" or a process group.
        weights: (m,), not negative, without a gradient. Where all are zero the result is 0 with
            zero gradients, rows or no rows.
        name: what an error calls the rows.
        batch: as `statistics.split_and_count` has it: without weights the other processes need not
            be asked then. All must come with weights or none.

    Raises:
        ValueError: no process has a row, and no weights are given.
        CommunicationError: another process is gone or did not come in time.
    """
    if weights is None and batch is not None:
        size = rank_and_size(group)[1]
        if torch.compiler.is_compiling():
            return values.sum() * (size / batch.to(values.dtype))
        count = int(batch)
        _check_count(count, name)
        return values.sum() * (size / count)
    if weights is None and not group_name(group):
        _check_count(values.shape[0], name)
        return values.mean()
    total = values.sum() if weights is None else (weights * values).sum()
    return share_of_mean(total, values.shape[0], group, weights, name=name)


def share_of_mean(
    total: Tensor, rows: int, group: object, weights: Tensor | None = None, *, name: str = "values"
) -> Tensor:
    """`global_mean` where this process's (weighted) sum over its rows is known already.

    Args:
        total: a scalar. rows: how many it is the sum over. group, weights, name: as there.
    """
    name_of_group, (_, size) = group_name(group), rank_and_size(group)
    if not name_of_group:
        if weights is None:
            _check_count(rows, name)
            return total / rows
        weight = weights.detach().sum()
    else:
        number = None if weights is None else weights.detach().sum()
        weight = _global_weight(total.detach(), rows, number, name_of_group, name)
    return total * size / weight.masked_fill(weight == 0, 1)


def _check_count(count: int, name: str) -> None:
    if count == 0:
        raise ValueError(f"{name}: expected at least one row over all processes, got 0")


def mean_row(features: Tensor, group: object, weights: Tensor | None = None) -> Tensor:
    """The (weighted) mean of the rows of all processes, (d,), the same on every process.

    In the accumulator's dtype; differentiable: its backward pass adds up what all processes send.
    Without any row or weight: zeros.

    Args:
        features: (m, d). group, weights: as in `global_mean`.
    """
    dtype = accumulator_dtype(features.dtype)
    if weights is None:
        # Counts as a tensor, so that no rank waits for another here.
        weights = features.new_ones(features.shape[0], dtype=dtype)
        rows = features.sum(0, dtype=dtype)
    else:
        rows = (weights[:, None] * features).sum(0, dtype=dtype)
    total = sum_over_ranks(weights.detach().sum(), group)
    return sum_over_ranks(rows, group) / total.masked_fill(total == 0, 1)


def pair_ids(n: int, group: object, *, device: torch.device | None = None) -> Tensor:
    """(n,) int64 ids, each given once over all processes: what belongs to local row i.

    Consecutive, from 0 on the group's first process and from 2**40 times its rank on the others:
    so none has to ask the others for their number of rows.
    """
    rank, _ = rank_and_size(group)
    return torch.arange(n, device=device) + (rank << 40)


def replicated(parameter: Tensor, group: object) -> Tensor:
    """A scale or bias that every process holds: as is, its gradient averaged over processes.

    Each process sees only its own rows' part of the gradient; the average of these parts is the
    gradient of the global mean, and stays it under the averaging of DDP and FSDP. Once more does no
    harm. The functions of `megabatch.similarity` that take a group do it to their scale and bias;
    what uses those elsewhere too (`paired`, a loss's own terms) does it before.
    """
    name = group_name(group)
    if not (name and parameter.requires_grad):
        return parameter
    return _replicated(parameter, name)


def sum_over_ranks(values: Tensor, group: object) -> Tensor:
    """The sum over processes, the same on each; so is its gradient, the sum of what they send."""
    name = group_name(group)
    return _sum_over_ranks(values, name) if name else values


# --- the operators --------------------------------------------------------------------------------


@operator("sum_over_ranks", group_argument=1)
def _sum_over_ranks(values: Tensor, group: str) -> Tensor:
    total = values.clone(memory_format=torch.contiguous_format)
    return comm.all_reduce(total, group, "sum over ranks")


@operator("replicated", group_argument=1)
def _replicated(parameter: Tensor, group: str) -> Tensor:
    return parameter.clone()


@operator("global_weight", group_argument=3)
def _global_weight(like: Tensor, rows: int, weight: Tensor | None, group: str, name: str) -> Tensor:
    """The number of rows of all ranks, or the sum of their weights; no handshake.

    It is an error where it is known: on the CPU on every rank. On a GPU only a rank without rows
    looks at the number, and ranks that come with weights while others come without get NaN.
    """
    size = comm.resolve(group).size()
    # The sum; how many come with weights.
    own = like.new_full((), rows) if weight is None else weight
    given = like.new_full((), 0 if weight is None else 1)
    numbers = torch.stack([own.double(), given.double()])
    comm.all_reduce(numbers, group, f"global_mean of {name}")
    weighted = 0 if weight is None else size
    on_host = like.device.type == "cpu"
    if on_host and numbers[1] != weighted:
        raise ValueError(
            f"weights: expected on all ranks or on none, got them on {int(numbers[1])} of {size}"
        )
    if weight is None and (on_host or rows == 0):
        _check_count(int(numbers[0]), name)
    return numbers[0].masked_fill(numbers[1] != weighted, math.nan).to(like.dtype)


@_global_weight.register_fake
def _(like: Tensor, rows: int, weight: Tensor | None, group: str, name: str) -> Tensor:
    return like.new_empty(())


for _operator in (_sum_over_ranks, _replicated):
    _operator.register_fake(lambda values, group: torch.empty_like(values))


def _keep_group(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    ctx.group = inputs[1]


def _sum_of_gradients(ctx, gradient):  # type: ignore[no-untyped-def]
    return _sum_over_ranks(gradient, ctx.group), None


def _mean_of_gradients(ctx, gradient):  # type: ignore[no-untyped-def]
    size = comm.resolve(ctx.group).size()
    return _sum_over_ranks(gradient, ctx.group) / size, None


_sum_over_ranks.register_autograd(_sum_of_gradients, setup_context=_keep_group)
_replicated.register_autograd(_mean_of_gradients, setup_context=_keep_group)
