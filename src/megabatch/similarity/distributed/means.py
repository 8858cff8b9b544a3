"""Means over the global batch, globally unique ids, and parameters replicated over ranks.

Each process holds its own rows of one batch. Losses communicate with other ranks through these
functions only.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megabatch.similarity.arguments import accumulator_dtype
from megabatch.similarity.distributed import comm
from megabatch.similarity.distributed.comm import group_name, rank_and_size
from megabatch.similarity.ops import Operator


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
        group: None, "local", a process group, or a DeviceMesh of one dimension.
        weights: (m,), non-negative; they get no gradient. Either all ranks pass weights or none
            does. If all weights are zero, the result and its gradients are 0, with or without rows.
        name: the argument that errors name.
        batch: global number of rows, if a reduction has returned it (`Stacks`). Without weights it
            saves the all-reduce of the row counts.

    Raises:
        ValueError: no process has a row and there are no weights.
        CommunicationError: another process is gone, or did not make its call in time.
    """
    if weights is not None:
        total = (weights * values).sum()
        return share_of_mean(total, values.shape[0], group, weights, name=name)
    size = rank_and_size(group)[1]
    if size == 1 and _checked(values.shape[0], name):
        return values.mean()
    if batch is None:
        return share_of_mean(values.sum(), values.shape[0], group, name=name)
    if torch.compiler.is_compiling():
        return values.sum() * (size / batch.to(values.dtype))
    return values.sum() * (size / _checked(int(batch), name))


def largest_over_ranks(
    call: str, numbers: Sequence[int], device: torch.device, group: object
) -> tuple[int, ...]:
    """The largest of each of up to 8 integers of all processes of a group; call: for errors.

    Their hosts exchange them. device: of the features.
    """
    name = group_name(group)
    if not name:
        return tuple(numbers)
    return tuple(map(max, zip(*comm.agree(name, f"{call}, lengths", numbers, device), strict=True)))


def share_of_mean(
    total: Tensor, rows: int, group: object, weights: Tensor | None = None, *, name: str = "values"
) -> Tensor:
    """`global_mean` given this process's (weighted) sum over its rows.

    Args:
        total: scalar, the (weighted) sum. rows: the number of rows that it sums over. group,
            weights, name: as in `global_mean`.
    """
    size = rank_and_size(group)[1]
    if weights is None and size == 1:
        return total / _checked(rows, name)
    weight = total.detach().new_full((), rows) if weights is None else weights.detach().sum()
    if size > 1:
        weight = _global_weight(weight, weights is not None, rows, group, name)
    return total * size / weight.masked_fill(weight == 0, 1)


def _global_weight(own: Tensor, weighted: bool, rows: int, group: object, name: str) -> Tensor:
    """The number of rows of all ranks, or the sum of their weights, without a handshake.

    On the CPU every rank checks the result. On a GPU that would make the host wait, so only a rank
    without rows does. Unchecked, the result is NaN if some ranks alone pass weights, or if there is
    nothing to count.
    """
    size = rank_and_size(group)[1]
    passed = torch.full_like(own, weighted)
    weight, passes = sum_over_ranks(torch.stack([own, passed]).double(), group).unbind()
    wrong, on_host = passes != weighted * size, own.device.type == "cpu"
    if not torch.compiler.is_compiling():
        if on_host and wrong:
            raise ValueError(
                f"weights: expected on all ranks or on none, got them on {int(passes)} of {size}"
            )
        if not weighted and (on_host or rows == 0):
            _checked(int(weight), name)
    wrong = wrong if weighted else wrong | (weight == 0)
    return weight.masked_fill(wrong, math.nan).to(own.dtype)


def _checked(count: int, name: str) -> int:
    if count == 0:
        raise ValueError(f"{name}: expected at least one row over all processes, got 0")
    return count


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
        weight = features.new_full((), features.shape[0], dtype=dtype)
    else:
        weight, features = weights.detach().sum(), weights[:, None] * features
    total = sum_over_ranks(weight, group)
    return sum_over_ranks(features.sum(0, dtype=dtype), group) / total.masked_fill(total == 0, 1)


def log_mean_exp(values: Tensor, group: object) -> Tensor:
    """The logarithm of the mean of e^values over all processes' (m,) values, (); no gradient."""
    rank, size = rank_and_size(group)
    values = values.detach()
    own = torch.stack([values.logsumexp(0), values.new_full((), values.shape[0])])
    by_rank = F.pad(own[None], (0, 0, rank, size - 1 - rank))
    logs, counts = sum_over_ranks(by_rank, group).unbind(1)
    return logs.logsumexp(0) - counts.sum().log()


def pair_ids(n: int, group: object, *, device: torch.device | None = None) -> Tensor:
    """(n,) int64 ids of the local rows, unique over all processes.

    They are consecutive and start at 2**40 times the process's rank in the group, so no process
    needs to know how many rows the others have.
    """
    return torch.arange(n, device=device) + (rank_and_size(group)[0] << 40)


# --- operators ------------------------------------------------------------------------------------


def sum_over_ranks(values: Tensor, group: object) -> Tensor:
    """The sum over processes, the same on each; the backward pass sums the upstream gradients."""
    name = group_name(group)
    return _sum(values, name) if name else values


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


def _operator(
    name: str, function: Callable[..., Tensor], backward: Callable[[Tensor, str], Tensor]
) -> Operator:
    """An operator of values of any shape and a group's name; `backward`: of its gradient."""
    made = Operator(name, function, 1)
    made.register_fake(lambda values, group: torch.empty_like(values))

    def keep_group(ctx: Any, inputs: tuple[Tensor, str], output: Tensor) -> None:
        ctx.group = inputs[1]

    made.register_autograd(lambda ctx, gradient: (backward(gradient, ctx.group), None), keep_group)
    return made


def _all_reduced(values: Tensor, group: str) -> Tensor:
    total = values.clone(memory_format=torch.contiguous_format)
    return comm.all_reduce(total, group, "sum over ranks")


def _copy(values: Tensor, group: str) -> Tensor:
    return values.clone()


_sum: Operator = _operator("sum_over_ranks", _all_reduced, lambda g, group: _sum(g, group))
_replicated = _operator(
    "replicated", _copy, lambda g, group: _sum(g, group) / comm.resolve(group).size()
)
