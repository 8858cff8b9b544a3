"""Strided and expanded inputs, and one tensor as both, give the results of contiguous copies."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from megabatch import similarity
from megabatch.similarity import backends
from megabatch.similarity.matrix import Matrix, Side, sort_by_id

pytest.importorskip("triton")
# Kernels compute infinities that they mask or recompute; the interpreter's NumPy warns of each.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ROWS, WIDTH = 100, 16


@pytest.fixture(autouse=True)
def _fused(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(backends, "uses_kernels", lambda x: True)
    before = similarity.set_workspace(1 << 20)
    yield
    similarity.set_workspace(before)


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
    parts = [out] if isinstance(out, Tensor) else [part for side in out for part in side]
    total = torch.stack([p.nan_to_num(0, 0, 0).sum() for p in parts]).sum()
    return [*(p.detach() for p in parts), *torch.autograd.grad(total, mine)]


def same(ours: list[Tensor], plain: list[Tensor]) -> None:
    for a, b in zip(ours, plain, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("make", [lambda: strided(torch.randn(ROWS, device=DEVICE)), expanded])
def test_ceilings(make: Callable[[], Tensor]) -> None:
    ceiling, inputs = make(), (features(), features())
    for ids in ("paired", (torch.arange(ROWS, device=DEVICE) % 9,) * 2):
        ours, plain = (
            results(functools.partial(similarity.split_logsumexp, ids=ids, ceiling=c), *inputs)
            for c in (ceiling, ceiling.clone(memory_format=torch.contiguous_format))
        )
        same(ours, plain)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("make", [lambda: strided(torch.rand(ROWS, device=DEVICE)), expanded])
def test_weights(make: Callable[[], Tensor], dtype: torch.dtype) -> None:
    weight, inputs = make(), (features(dtype), features(dtype))
    ours, plain = (
        results(lambda x, y, w=w: similarity.softplus_sum(x, y, 0.5, -2.0, weight=w), *inputs)
        for w in (weight, weight.clone(memory_format=torch.contiguous_format))
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
def test_features(dtype: torch.dtype) -> None:
    """Column-major, misaligned, expanded and strided rows."""
    y, wide = features(dtype), torch.randn(2 * ROWS, 2 * WIDTH, device=DEVICE).to(dtype)
    for x in (
        wide[:ROWS, :WIDTH].T.contiguous().T,
        wide[:ROWS, 1 : WIDTH + 1],
        wide[:1, :WIDTH].expand(ROWS, WIDTH),
        wide[::2, :WIDTH],
    ):
        plain = x.clone(memory_format=torch.contiguous_format)
        for function in (
            lambda x, y: similarity.logsumexp(x, y, 0.5),
            lambda x, y: [[similarity.softplus_sum(x, y, 0.5, -2.0)]],
        ):
            ours, theirs = results(wrapped(function), x, y), results(wrapped(function), plain, y)
            same(ours, theirs)


def wrapped(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a list of sides, each a list of parts."""
    return lambda x, y: [[p] if isinstance(p, Tensor) else p for p in function(x, y)]
