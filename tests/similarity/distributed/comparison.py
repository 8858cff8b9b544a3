"""Shards of several processes against the whole batch on one, in float64."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megabatch.similarity import softplus_sum, split_logsumexp
from tests.similarity.distributed.processes import World

D = 5
#: Bytes of a round of one or two rows of each rank, of width `D`.
ROUND = 6 * D * 8

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


def compare_split(
    world: World,
    rows: Sequence[int],
    columns: Sequence[int] | None = None,
    *,
    ids: bool = False,
    ceiling: bool = False,
    guided: bool = False,
    sides: str = "both",
    frozen: str = "",
) -> None:
    """`compare` log-sum-exps of x against y, or (no columns) against itself."""
    others = columns or rows
    m, n = sum(rows), sum(others)

    def function(group: Any, x: Any, y: Any, scale: Any, i: Any, j: Any, c: Any, u: Any, v: Any):  # type: ignore[no-untyped-def]
        pairs = "paired" if i is None else i if y is None else (i, j)
        guide = None if u is None else u if y is None else (u, v)
        options: Any = {"ids": pairs, "ceiling": c, "guide": guide, "sides": sides}
        split = split_logsumexp(x, y, scale, **options, group=group)
        assert (split[1] is None) == (sides == "rows")
        return [part for side in split if side is not None for part in side]

    inputs: list[tuple[Tensor | None, Sizes]] = [
        (double(m, D), rows),
        (double(n, D) if columns else None, others),
        (torch.tensor(1.7, dtype=torch.float64), None),
        (some_ids(m) if ids else None, rows),
        (some_ids(n) if ids else None, others),
        (double(m) if ceiling or guided else None, rows),
        (double(m, 3) if guided else None, rows),  # of another width
        (double(n, 3) if guided else None, others),
    ]
    outputs = [rows] * 4 + ([others] * 4 if sides == "both" else [])
    compare(world, function, inputs, outputs, frozen + "567")


def compare_sigmoid(
    world: World,
    rows: Sequence[int],
    columns: Sequence[int],
    *,
    ids: bool = False,
    weight: bool = False,
    frozen: str = "",
) -> None:
    """`compare` the sigmoid loss's sum."""
    m, n = sum(rows), sum(columns)

    def function(group: Any, x: Any, y: Any, scale: Any, bias: Any, i: Any, j: Any, w: Any):  # type: ignore[no-untyped-def]
        pairs: Any = "paired" if i is None else (i, j)
        return [softplus_sum(x, y, scale, bias, ids=pairs, weight=w, group=group)]

    inputs: list[tuple[Tensor | None, Sizes]] = [
        (double(m, D), rows),
        (double(n, D), columns),
        *((torch.tensor([value], dtype=torch.float64), None) for value in (2.0, -1.0)),
        (some_ids(m) if ids else None, rows),
        (some_ids(n) if ids else None, columns),
        (double(m).abs() if weight else None, rows),
    ]
    compare(world, function, inputs, [None], frozen + "6")
