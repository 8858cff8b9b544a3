"""Strided and expanded inputs, and one tensor as both, give the results of contiguous copies."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from megabatch import similarity
from megabatch.similarity.matrix import Matrix, Side, sort_by_id
from tests.similarity.triton import DEVICE, MARKS

pytest.importorskip("triton")
pytestmark = MARKS
ROWS, WIDTH = 100, 16


def features(dtype: torch.dtype = torch.float16) -> Tensor:
    return torch.randn(ROWS, WIDTH, device=DEVICE).to(dtype)


def strided(values: Tensor) -> Tensor:
    """The same numbers with a stride of 2."""
    return torch.stack([values, values + 1], dim=-1)[..., 0]


def expanded() -> Tensor:
    return torch.tensor([0.7], device=DEVICE).expand(ROWS)


def results(call: Callable[..., Any], *leaves: Tensor) -> list[Tensor]:
    mine = [leaf.detach().requires_grad_() for leaf in leaves]
    out = call(*mine)
    sides = [[out]] if isinstance(out, Tensor) else out
    parts = [part for side in sides for part in ([side] if isinstance(side, Tensor) else side)]
    total = torch.stack([p.nan_to_num(0, 0, 0).sum() for p in parts]).sum()
    return [*(p.detach() for p in parts), *torch.autograd.grad(total, mine)]


def same(ours: list[Tensor], plain: list[Tensor]) -> None:
    for a, b in zip(ours, plain, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("make", [lambda: strided(torch.rand(ROWS, device=DEVICE)), expanded])
def test_ceilings_and_weights(make: Callable[[], Tensor]) -> None:
    vector, inputs = make(), (features(), features())
    copy = vector.clone(memory_format=torch.contiguous_format)
    for ids in ("paired", (torch.arange(ROWS, device=DEVICE) % 9,) * 2):
        split = functools.partial(similarity.split_logsumexp, ids=ids)
        ours, plain = (
            results(functools.partial(split, ceiling=c), *inputs) for c in (vector, copy)
        )
        same(ours, plain)
    for dtype in (torch.float16, torch.float32):
        inputs = features(dtype), features(dtype)
        ours, plain = (
            results(lambda x, y, w=w: similarity.softplus_sum(x, y, 0.5, -2.0, weight=w), *inputs)
            for w in (vector, copy)
        )
        same(ours, plain)


@pytest.mark.parametrize("call", ["softmax", "sigmoid"])
def test_ids(call: str) -> None:
    ids = torch.arange(ROWS, device=DEVICE) % 20, torch.arange(ROWS, device=DEVICE) % 7
    inputs = features(), features()
    ours = results(with_ids(call, (strided(ids[0]), strided(ids[1]))), *inputs)
    same(ours, results(with_ids(call, ids), *inputs))


@pytest.mark.parametrize("call", ["softmax", "sigmoid"])
def test_one_tensor_as_both_sides_with_ids_of_their_own(call: str) -> None:
    """Each side is sorted by its own ids."""
    ids = torch.arange(ROWS, device=DEVICE) % 20, torch.arange(ROWS, device=DEVICE).flip(0) % 7
    x = features()
    function = with_ids(call, ids)
    *ours, gradient = results(lambda x: function(x, x), x)
    *plain, of_rows, of_columns = results(function, x, x.clone())
    same(ours, plain)
    assert torch.equal(gradient, of_rows + of_columns)


def with_ids(call: str, ids: tuple[Tensor, Tensor]) -> Callable[[Tensor, Tensor], Any]:
    if call == "softmax":
        return lambda x, y: similarity.split_logsumexp(x, y, 0.5, ids=ids)
    return lambda x, y: similarity.softplus_sum(x, y, 0.5, -2.0, ids=ids)


def test_both_sides_share_one_sorted_copy_if_their_ids_are_the_same() -> None:
    x, ids = torch.randn(9, 2), torch.arange(9) % 3
    side = Side(x, ids)
    matrix, _ = sort_by_id(Matrix(side, side))
    assert matrix.cols is matrix.rows


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize(
    "view",
    [
        lambda wide: wide[:ROWS, :WIDTH].T.contiguous().T,
        lambda wide: wide[:ROWS, 1 : WIDTH + 1],
        lambda wide: wide[:1, :WIDTH].expand(ROWS, WIDTH),
        lambda wide: wide[::2, :WIDTH],
    ],
    ids=["column-major", "misaligned", "expanded", "strided"],
)
def test_features(view: Callable[[Tensor], Tensor], dtype: torch.dtype) -> None:
    x, y = view(torch.randn(2 * ROWS, 2 * WIDTH, device=DEVICE).to(dtype)), features(dtype)
    plain = x.clone(memory_format=torch.contiguous_format)
    for function in (
        lambda x, y: similarity.logsumexp(x, y, 0.5),
        lambda x, y: similarity.softplus_sum(x, y, 0.5, -2.0),
    ):
        same(results(function, x, y), results(function, plain, y))
