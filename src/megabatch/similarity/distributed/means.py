"""Means over the global batch, globally unique ids, and parameters replicated over ranks.

Each process holds its own rows of one batch. Losses communicate with other ranks through these
functions only.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megabatch.similarity.arguments import accumulator_dtype
from megabatch.similarity.distributed import comm
from megabatch.similarity.distributed.comm import group_name, rank_and_size
from megabatch.similarity.ops import Operator, operator


def global_mean(
    values: Tensor,
    group: object,
    weights: Tensor | None = None,
    *,
    name: str = "values",
    batch: Tensor | None = None,
) -> Tensor:
    """This process's share of the mean of `values` over the rows of all processes.

    Returns `n_ranks * (sum over local rows) / (global count)`, or with weights
    `n_ranks * (sum of weights * values) / (global sum of weights)`. The mean of these shares over
    ranks is the global mean, and averaging gradients over ranks, as DDP and FSDP do, gives the
    gradient of the global mean.

    Args:
        values: (m,), one number per row; m = 0 is allowed if another process has rows.
        group: None, "local", a process group or a DeviceMesh.
        weights: (m,), non-negative; they get no gradient. Either all ranks pass weights or none
            does. If all weights are zero, the result and its gradients are 0, with or without rows.
        name: the argument that errors name.
        batch: global number of rows, if a reduction has returned it (`Stacks`). Without weights it
            saves the all-reduce of the row counts.

    Raises:
        ValueError: no process has a row and there are no weights.
        CommunicationError: another process is gone, or did not make its call in time.
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
    """`global_mean` given this process's (weighted) sum over its rows.

    Args:
        total: scalar, the (weighted) sum. rows: the number of rows that it sums over. group,
            weights, name: as in `global_mean`.
    """
    name_of_group, (_, size) = group_name(group), rank_and_size(group)
    weight = None if weights is None else weights.detach().sum()
    if name_of_group:
        weight = _global_weight(total.detach(), rows, weight, name_of_group, name)
    elif weight is None:
        _check_count(rows, name)
        return total / rows
    return total * size / weight.masked_fill(weight == 0, 1)


def _check_count(count: int, name: str) -> None:
    if count == 0:
        raise ValueError(f"{name}: expected at least one row over all processes, got 0")


def mean_row(features: Tensor, group: object, weights: Tensor | None = None) -> Tensor:
    """The (weighted) mean of the rows of all processes, (d,), the same on every process.

    Returned in the accumulator's dtype; zeros if there is no row or all weights are zero. The
    backward pass sums the upstream gradients of all processes.

    Args:
        features: (m, d). group, weights: as in `global_mean`.
    """
    dtype = accumulator_dtype(features.dtype)
    if weights is None:
        # The count stays a tensor: reading it would make the host wait for other ranks.
        weights = features.new_ones(features.shape[0], dtype=dtype)
        rows = features.sum(0, dtype=dtype)
    else:
        rows = (weights[:, None] * features).sum(0, dtype=dtype)
    total = sum_over_ranks(weights.detach().sum(), group)
    return sum_over_ranks(rows, group) / total.masked_fill(total == 0, 1)


def pair_ids(n: int, group: object, *, device: torch.device | None = None) -> Tensor:
    """(n,) int64 ids of the local rows, unique over all processes.

    They are consecutive and start at 2**40 times the process's rank in the group, so no process
    needs to know how many rows the others have.
    """
    rank, _ = rank_and_size(group)
    return torch.arange(n, device=device) + (rank << 40)


def replicated(parameter: Tensor, group: object) -> Tensor:
    """Return a scale or bias that every process holds; its gradient is averaged over processes.

    Each process computes its own rows' part of the gradient. The average of these parts is the
    gradient of the global mean, and averaging it again, as DDP and FSDP do, leaves it unchanged;
    so does applying `replicated` twice. Functions of `megabatch.similarity` that take a group
    apply it to their scale and bias. A loss that also uses these elsewhere (in `paired`, or in
    terms of its own) applies it first.
    """
    name = group_name(group)
    return _replicated(parameter, name) if name and parameter.requires_grad else parameter


def sum_over_ranks(values: Tensor, group: object) -> Tensor:
    """The sum over processes, the same on each; the backward pass sums the upstream gradients."""
    name = group_name(group)
    return _sum_over_ranks(values, name) if name else values


def log_mean_exp(values: Tensor, group: object) -> Tensor:
    """The logarithm of the mean of e^values over all processes' (m,) values, (); no gradient."""
    return _log_mean_exp(values.detach(), group_name(group))


# --- the operators --------------------------------------------------------------------------------


def _elementwise(
    name: str, function: Callable[..., Tensor], backward: Callable[[Tensor, str], Tensor]
) -> Operator:
    """An operator of values of any shape and a group's name; `backward`: of its gradient."""
    made = Operator(name, function, 1)
    made.register_fake(lambda values, group: torch.empty_like(values))

    def keep_group(ctx: Any, inputs: tuple[Tensor, str], output: Tensor) -> None:
        ctx.group = inputs[1]

    made.register_autograd(lambda ctx, gradient: (backward(gradient, ctx.group), None), keep_group)
    return made


def _sum(values: Tensor, group: str) -> Tensor:
    total = values.clone(memory_format=torch.contiguous_format)
    return comm.all_reduce(total, group, "sum over ranks")


def _copy(values: Tensor, group: str) -> Tensor:
    return values.clone()


_sum_over_ranks: Operator = _elementwise(
    "sum_over_ranks", _sum, lambda g, group: _sum_over_ranks(g, group)
)
_replicated = _elementwise(
    "replicated", _copy, lambda g, group: _sum_over_ranks(g, group) / comm.resolve(group).size()
)


@operator("global_weight", group_argument=3)
def _global_weight(like: Tensor, rows: int, weight: Tensor | None, group: str, name: str) -> Tensor:
    """The number of rows of all ranks, or the sum of their weights, without a handshake.

    On the CPU every rank checks the result. On a GPU that would make the host wait, so only a rank
    without rows checks it, and if some ranks pass weights and others do not, the result is NaN.
    """
    size = comm.resolve(group).size()
    # The sum, and the number of ranks that pass weights.
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


@operator("log_mean_exp", group_argument=1)
def _log_mean_exp(values: Tensor, group: str) -> Tensor:
    peak = values.max() if values.numel() else values.new_full((), -math.inf)
    if group:
        comm.all_reduce(peak, group, "log_mean_exp", dist.ReduceOp.MAX)
    total = torch.stack([(values - peak).exp().sum(), values.new_full((), values.numel())])
    if group:
        comm.all_reduce(total, group, "log_mean_exp")
    return (total[0] / total[1]).log() + peak


for _operator in (_global_weight, _log_mean_exp):
    _operator.register_fake(lambda values, *_: values.new_empty(()))
