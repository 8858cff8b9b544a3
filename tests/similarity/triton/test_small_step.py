"""The host's work for a small step: numbers of launches, operators and allocations.

A GPU computes a batch of a thousand pairs in less time than the host takes to launch it. The bounds
are the counts at the last measurement of host times (benchmarks/results/single-gpu-small.json);
torch 2.9 counts up to five operators more than 2.15.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import megabatch as mb
from megabatch.similarity import backends

pytest.importorskip("triton")
from megabatch.similarity.triton import launch

IDS = torch.arange(256) // 2
ALLOCATING = ("empty", "zeros", "ones", "full")


class Operators(TorchDispatchMode):
    """Counts operators by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        self.counts[function.name()] += 1
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("loss", "launches", "operators", "allocations"),
    [
        (mb.ClipLoss(), 11, 99, 24),
        (lambda x, y, s: mb.ClipLoss()(x, y, s, ids=IDS), 13, 216, 33),
        (lambda x, y, s: mb.SigLipLoss()(x, y, s, -s), 6, 66, 15),
        (lambda x, y, s: mb.NTXentLoss(1 / s, normalize=False)(x, y), 11, 166, 25),
        (lambda x, y, s: sum(mb.DistillClipLoss()(x, y, s, x, y, s)), 9, 218, 26),
    ],
    ids=["clip", "clip, ids", "siglip", "ntxent", "distillation"],
)
def test_a_step_of_one_block(
    loss: Callable[..., Tensor],
    launches: int,
    operators: int,
    allocations: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    launched: Counter[str] = Counter()

    def count(self: launch.Kernel, *_: Any) -> None:
        launched[self.jitted.fn.__name__] += 1

    monkeypatch.setattr(launch, "past_binding", False)
    monkeypatch.setattr(launch.Kernel, "_bind", count)
    for name in ("uses_kernels", "kernels_available"):
        monkeypatch.setattr(backends, name, lambda x: True)
    x, y = (torch.zeros(256, 32, dtype=torch.float16).requires_grad_() for _ in range(2))
    scale = torch.tensor(10.0, requires_grad=True)
    with Operators() as mode:
        loss(x, y, scale).backward()
    allocated = sum(n for name, n in mode.counts.items() if any(a in name for a in ALLOCATING))
    found = launched.total(), mode.counts.total(), allocated
    assert all(a <= b for a, b in zip(found, (launches, operators, allocations), strict=True)), (
        found,
        launched,
        mode.counts,
    )
