"""Shards of several processes against the whole batch on one, in float64."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tests.similarity.distributed.processes import World

D = 5

#: Rows of each rank; None: every rank has the same numbers.
Sizes = Sequence[int] | None


def leaf(tensor: Tensor, needs: bool = True) -> Tensor:
    return tensor.detach().clone().requires_grad_(needs)


def some_ids(n: int) -> Tensor:
    """Few distinct ids, so that they recur on other processes; some are negative."""
    return torch.randint(-1, 4, (n,))


def double(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def exactly(mine: Tensor, truth: Tensor) -> None:
    torch.testing.assert_close(mine, truth, rtol=0, atol=1e-11)


def compare(
    world: World,
    function: Callable[..., Sequence[Tensor]],
    inputs: Sequence[tuple[Tensor | None, Sizes]],
    outputs: Sequence[Sizes],
    frozen: str = "",
    close: Callable[[Tensor, Tensor], None] = exactly,
) -> None:
    """Compare results and gradients of shards with those of the whole batch.

    `function(group, *inputs)` returns tensors of rows, whose number on each rank is in `outputs`,
    or a number (None), whose sum over ranks is that of the whole. Gradients of numbers are means
    over ranks. frozen: indices of inputs without a gradient.
    """
    whole, local = list[Any](), list[Any]()
    for k, (tensor, sizes) in enumerate(inputs):
        if tensor is not None:
            needs = tensor.is_floating_point() and str(k) not in frozen
            own = tensor if sizes is None else world.shard(tensor, list(sizes))
            whole.append(leaf(tensor, needs))
            local.append(leaf(own, needs))
        else:
            whole.append(None)
            local.append(None)
    truth, mine = function("local", *whole), function(None, *local)
    upstream: list[tuple[Tensor, Tensor]] = []
    for got, want, sizes in zip(mine, truth, outputs, strict=True):
        weight = torch.randn_like(want) if sizes else torch.ones_like(want)
        shown = got.detach().clone()
        if sizes:
            close(shown, world.shard(want.detach(), list(sizes)))
            upstream.append((weight, world.shard(weight, list(sizes))))
        else:
            dist.all_reduce(shown)
            close(shown, want.detach())
            upstream.append((weight, weight))
    for results, side in ((truth, 0), (mine, 1)):
        parts = (
            r.masked_fill(r == -torch.inf, 0) * w[side]
            for r, w in zip(results, upstream, strict=True)
        )
        total = sum(part.sum() for part in parts)
        assert isinstance(total, Tensor)
        if total.requires_grad:
            total.backward()
    for a, b, (_, sizes) in zip(local, whole, inputs, strict=True):
        if b is None or b.grad is None:
            assert a is None or a.grad is None
        else:
            close(a.grad, world.shard(b.grad, list(sizes)) if sizes else b.grad / world.size)
