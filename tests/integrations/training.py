"""Weights of models that are trained with megabatch and without, and plain SGD to compare with."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    """Copies of all parameters, whole ones of a sharded model."""
    whole = {
        name: getattr(p, "full_tensor", lambda p=p: p)() for name, p in model.named_parameters()
    }
    return {name: weight.detach().clone() for name, weight in whole.items()}


def assert_weights_equal(found: nn.Module, expected: nn.Module, before: dict[str, Tensor]) -> None:
    """Assert equal weights, which have moved."""
    weights = weights_of(found)
    torch.testing.assert_close(weights, weights_of(expected), rtol=1e-4, atol=1e-5)
    assert max((weights[name] - before[name]).abs().max().item() for name in weights) > 1e-2


def descend(model: nn.Module, loss_of: Callable[[int], Tensor], rate: float, clip: float) -> None:
    """Two steps of plain SGD, each of which accumulates the losses of two batches."""
    for update in range(2):
        for i in (2 * update, 2 * update + 1):
            (loss_of(i) / 2).backward()
        nn.utils.clip_grad_norm_(model.parameters(), clip)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter -= rate * parameter.grad
        model.zero_grad()
