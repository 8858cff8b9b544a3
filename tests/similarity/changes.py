"""Settings that a program may change between the forward and the backward pass of a loss."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch

from megabatch import similarity
from tests.process_state import changed

#: Name -> a context within which that setting differs from its value at the start.
CHANGES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "workspace, smaller": lambda: changed("workspace", 64 << 10),
    "workspace, larger": lambda: changed("workspace", 1 << 30),
    "no gather": lambda: changed("gather", 0),
    "gather, smaller": lambda: changed("gather", 64 << 10),
    "grid": lambda: changed("grid", 2),
    "no grid": lambda: changed("grid", 0),
    "precision": lambda: changed("precision", "medium"),
    "default device": lambda: changed("default device", "meta"),
    "default dtype": lambda: changed("default dtype", torch.bfloat16),
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "no grad": torch.no_grad,
    "second derivatives": torch.enable_grad,
    "deterministic": lambda: changed("deterministic", True),
    "threads": lambda: changed("threads", 2),
}
#: Changes that torch itself refuses in the backward pass of a compiled program.
EAGER_ONLY = {"deterministic"}


def softmax(x: torch.Tensor, y: torch.Tensor, scale: torch.Tensor, **options: Any) -> torch.Tensor:
    """Sum of the log-sum-exps of rows and columns over negatives and over positives."""
    rows, columns = similarity.split_logsumexp(x, y, scale, **options)
    assert columns is not None
    parts = [(side.negative, side.positive, side.positive_sum) for side in (rows, columns)]
    return sum(part.sum() for side in parts for part in side)  # type: ignore[return-value]


def self_similarity(
    x: torch.Tensor, y: torch.Tensor, scale: torch.Tensor, **options: Any
) -> torch.Tensor:
    """Sum of the log-sum-exps of x against itself."""
    rows, _ = similarity.split_logsumexp(x, None, scale, ids=torch.arange(len(x)) // 2, **options)
    return rows.negative.sum() + rows.positive.sum() + (scale * y).sum()


def sigmoid(x: torch.Tensor, y: torch.Tensor, scale: torch.Tensor, **options: Any) -> torch.Tensor:
    """Sum of the sigmoid loss over all pairs."""
    return similarity.softplus_sum(x, y, scale, scale.detach() - 4.0, **options)


LOSSES = {"softmax": softmax, "self-similarity": self_similarity, "sigmoid": sigmoid}


def gradients(
    loss: Callable[..., torch.Tensor],
    leaves: list[torch.Tensor],
    between: AbstractContextManager[Any],
) -> list[torch.Tensor]:
    """The loss and its gradients; the backward pass runs within the context `between`."""
    value = loss(*leaves)
    upstream = torch.ones_like(value)
    with between:
        found = torch.autograd.grad(value, leaves, upstream)
    return [value.detach(), *found]


def leaves(dtype: torch.dtype, rows: int = 300, seed: int = 0) -> list[torch.Tensor]:
    """x, y and scale, large enough for several blocks in the smallest workspace."""
    made = torch.Generator().manual_seed(seed)
    x, y = (torch.randn(rows, 16, generator=made).to(dtype).requires_grad_() for _ in range(2))
    return [x, y, torch.tensor(2.0, dtype=dtype, requires_grad=True)]
