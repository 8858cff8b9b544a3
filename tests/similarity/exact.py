"""Comparisons with the dense expression in float64."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def leaves(*values: Tensor | float) -> list[Tensor]:
    return [
        torch.as_tensor(v, dtype=torch.float64).clone().detach().requires_grad_() for v in values
    ]


def assert_same(ours: Tensor | None, truth: Tensor | None, tolerance: float = 1e-11) -> None:
    """Assert equality to `tolerance`, relative to the largest finite entry if that exceeds 1."""
    assert ours is not None
    assert truth is not None
    finite = truth.detach()[truth.isfinite()]
    size = max(1.0, float(finite.abs().max())) if finite.numel() else 1.0
    torch.testing.assert_close(ours, truth, rtol=0, atol=tolerance * size)


def weighted_sum(parts: Sequence[Tensor], seed: int = 1) -> Tensor:
    """A scalar that gives each entry of each part a different upstream gradient; 1 to a scalar."""
    generator = torch.Generator().manual_seed(seed)
    total = torch.zeros((), dtype=torch.float64)
    for part in parts:
        weight = torch.randn(part.shape, generator=generator, dtype=torch.float64)
        weight = weight if part.dim() else weight.new_ones(())
        total = total + (part.masked_fill(part == -torch.inf, 0) * weight).sum()
    return total


def compare(
    ours: Sequence[Tensor], truth: Sequence[Tensor], mine: list[Tensor], theirs: list[Tensor]
) -> None:
    """Compare results, and the gradients of their inputs (`leaves`)."""
    for a, b in zip(ours, truth, strict=True):
        assert_same(a, b)
    weighted_sum(ours).backward()
    weighted_sum(truth).backward()
    for a, b in zip(mine, theirs, strict=True):
        if b.grad is None:
            assert a.grad is None or not a.grad.any()
        else:
            assert_same(a.grad, b.grad)
