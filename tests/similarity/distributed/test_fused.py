"""The fused kernels over several processes against one process, in Triton's interpreter."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megabatch.similarity import backends, logsumexp, softplus_sum, split_logsumexp
from tests.similarity.distributed.comparison import Sizes, compare
from tests.similarity.distributed.processes import World, on_devices
from tests.similarity.distributed.transfers import transferring

pytest.importorskip("triton")

ROWS = 120  # of all ranks, in one tile, since the interpreter is slow
D = 20  # no multiple of 8, so that features are padded before transfers
TWO_ROUNDS = {"rounds": 2 * 60 * 24 * 2}


def close(mine: Tensor, truth: Tensor) -> None:
    """Results exactly, gradients of rows to half precision, those of numbers almost so."""
    if mine.dim() == 1:
        torch.testing.assert_close(mine, truth, rtol=2e-6, atol=2e-5)
    elif mine.dim() == 0:
        torch.testing.assert_close(mine, truth, rtol=2e-3, atol=1e-6)
    else:
        error = (mine.float() - truth.float()).norm(dim=1)
        assert (error <= 2e-3 * truth.float().norm(dim=1) + 1e-7).all()


def features() -> list[Tensor]:
    return [F.normalize(torch.randn(ROWS, D), dim=1).half() for _ in range(2)]


def log_sum_exps(
    group: Any, x: Tensor, y: Tensor | None, scale: Tensor, ids: Tensor | None, weights: Tensor
) -> Sequence[Tensor]:
    """All parts of all rows, and a number that depends on each differently."""
    pairs: Any = "paired" if ids is None else ids if y is None else (ids, ids)
    sides = split_logsumexp(x, y, scale, ids=pairs, group=group)
    parts = [part for side in sides if side is not None for part in side[:3]]
    total = torch.zeros(())
    for part, weight in zip(parts, weights.T, strict=True):
        total = total + (part.masked_fill(part == -torch.inf, 0) * weight).sum()
    return [*(part.detach() for part in parts), total]


def of_all_pairs(group: Any, x: Tensor, y: Tensor, weights: Tensor) -> Sequence[Tensor]:
    rows, columns = logsumexp(x, y, 10.0, group=group)
    assert columns is not None
    total = (rows * weights[:, 0]).sum() + (columns * weights[:, 1]).sum()
    return [rows.detach(), columns.detach(), total]


@on_devices(2)
def test_log_sum_exps(world: World) -> None:
    """Ranks agree on the base of their sums and on the scaling of float16 gradients."""
    x, y = features()
    x[:40] *= 4
    ids, scale = torch.randint(-1, 20, (ROWS,)), torch.tensor(10.0)
    weights = torch.rand(ROWS, 6) * 1e-3
    weights[40:] /= 100
    ways: list[tuple[list[int], bool, Tensor | None, dict[str, Any]]] = [
        ([60, 60], False, ids, {"own_first": 60}),
        ([40, 80], False, None, {"own_first": 1}),
        ([40, 80], True, ids, TWO_ROUNDS),
        ([40, 80], False, ids, {"columns": 2}),  # a grid whose ranks share rows
        ([60, 60], False, None, {"columns": 1}),  # and columns
    ]
    for sizes, symmetric, numbers, way in ways:
        inputs: list[tuple[Tensor | None, Sizes]] = [(x, sizes), (None if symmetric else y, sizes)]
        inputs += [(scale, None), (numbers, sizes), (weights, sizes)]
        with transferring(**way) as patch:
            patch.setattr(backends, "uses_kernels", lambda x: True)
            compare(world, log_sum_exps, inputs, [sizes] * 6 + [None], "4", close=close)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backends, "uses_kernels", lambda x: True)
        sizes = [40, 80]
        given: Any = [(tensor, sizes) for tensor in (x, y, weights)]
        compare(world, of_all_pairs, given, [sizes, sizes, None], "2", close=close)


def sigmoid_sum(
    group: Any, x: Tensor, y: Tensor, scale: Tensor, bias: Tensor, i: Any, j: Any, weight: Any
) -> Sequence[Tensor]:
    pairs: Any = "paired" if i is None else (i, j)
    total = softplus_sum(x, y, scale, bias, ids=pairs, weight=weight, group=group)
    return [total.detach()[None] / ROWS, total / ROWS]


@on_devices(2)
def test_the_sigmoid_loss(world: World) -> None:
    """Ranks agree on the scaling of float16 gradients though their weights differ."""
    x, y = features()
    ids = torch.randint(-1, 40, (ROWS,))
    weights = torch.rand(ROWS)
    weights[:40] *= 1000
    numbers = (torch.tensor(10.0), None), (torch.tensor(-3.0), None)
    even, own = [60, 60], torch.arange(ROWS)
    for rows, columns, pairs, weight, frozen, way in (
        (even, even, ids, weights, "", {}),
        ([40, 80], [40, 80], None, weights, "", {}),
        ([0, ROWS], [0, ROWS], ids, None, "", TWO_ROUNDS),
        ([40, 80], [40, 80], ids, weights, "", {"columns": 2}),  # a grid whose ranks share rows
        # x needs no gradient and rank 0 has no rows of y: its part of the scale's gradient is 0.
        (even, [0, ROWS], own, None, "03", {}),
    ):
        inputs: list[tuple[Tensor | None, Sizes]] = [(x, rows), (y, columns), *numbers]
        inputs += [(pairs, rows), (pairs, columns), (weight, rows)]
        with transferring(**way) as patch:
            patch.setattr(backends, "uses_kernels", lambda x: True)
            compare(world, sigmoid_sum, inputs, [None, None], frozen + "6", close=close)
