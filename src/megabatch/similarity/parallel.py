"""What a loss needs to know of other processes: means over all rows, ids, shared parameters.

Each process holds its own rows of one batch. Losses go through these few functions and know
nothing else of ranks. For now all of them accept one process alone (see `check_group`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from megabatch.similarity.arguments import accumulator_dtype
from megabatch.similarity.ring import check_group


def global_mean(
    values: Tensor, group: object, weights: Tensor | None = None, *, name: str = "values"
) -> Tensor:
    """The mean of one number a row over the rows of all processes, as this process's share of it.

    Returns `n_ranks * (sum over local rows) / (global count)`, with weights
    `n_ranks * (sum of weights * values) / (global sum of weights)`: the mean of it over ranks is
    the global mean, and averaging gradients over ranks, as DDP and FSDP do, gives its gradient.

    Args:
        values: (m,), m = 0 allowed where other processes have rows.
        group: None, "local" or a process group.
        weights: (m,), not negative. Where all are zero the result is 0 with zero gradients, rows
            or no rows.
        name: what an error calls the rows.

    Raises:
        ValueError: no process has a row, and no weights are given.
    """
    check_group(group)
    if weights is None:
        if values.shape[0] == 0:
            raise ValueError(f"{name}: expected at least one row over all processes, got 0")
        return values.mean()
    total = weights.sum()
    return (weights * values).sum() / total.masked_fill(total == 0, 1)


def mean_row(features: Tensor, group: object, weights: Tensor | None = None) -> Tensor:
    """The (weighted) mean of the rows of all processes, (d,), the same on every process.

    In the accumulator's dtype; differentiable: its backward pass adds up what all processes send.
    Without any row or weight: zeros.

    Args:
        features: (m, d). group, weights: as in `global_mean`.
    """
    check_group(group)
    dtype = accumulator_dtype(features.dtype)
    if weights is None:
        return features.sum(0, dtype=dtype) / max(1, features.shape[0])
    total = weights.sum()
    return (weights[:, None] * features).sum(0, dtype=dtype) / total.masked_fill(total == 0, 1)


def pair_ids(n: int, group: object, *, device: torch.device | None = None) -> Tensor:
    """(n,) int64 ids from 0, each given once over all processes: what belongs to local row i."""
    check_group(group)
    return torch.arange(n, device=device)


def replicated(parameter: Tensor, group: object) -> Tensor:
    """A scale or bias that every process holds: as is, its gradient averaged over processes.

    Each process sees only its own rows' part of the gradient; the average of these parts is the
    gradient of the global mean, and stays it under the averaging of DDP and FSDP.
    """
    check_group(group)
    return parameter
