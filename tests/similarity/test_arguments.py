"""Errors of wrong arguments name the argument, the value that came and the expected one."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nested import nested_tensor

from megabatch import similarity
from megabatch.similarity.arguments import extremes

X, Y = torch.randn(6, 4), torch.randn(5, 4)
IDS = torch.arange(6), torch.arange(5)
WIDE = X.double(), Y.double()
GUIDED: dict[str, Any] = {"ids": IDS, "ceiling": torch.ones(6)}


#: function -> arguments, options, error and words of its message
WRONG: dict[Callable[..., Any], list[Any]] = {
    similarity.logsumexp: [
        (([1.0], Y), {}, TypeError, ("x", "list", "tensor")),
        ((X[0], Y), {}, ValueError, ("x", "(4,)", "(n, d)")),
        ((X[:, :0], Y), {}, ValueError, ("x", "(6, 0)", "d > 0")),
        ((X, Y[:, :3]), {}, ValueError, ("y", "width 4", "3")),
        ((X.long(), Y), {}, TypeError, ("x", "int64", "float32")),
        ((X.to(torch.complex64), Y), {}, TypeError, ("x", "complex64", "float32")),
        ((X.to_sparse(), Y), {}, TypeError, ("x", "dense", "sparse_coo")),
        ((X, Y.to_sparse()), {}, TypeError, ("y", "dense", "sparse_coo")),
        ((nested_tensor([X, Y], layout=torch.jagged), Y), {}, TypeError, ("x", "dense", "nested")),
        ((X, Y.double()), {}, TypeError, ("y", "float32", "float64")),
        ((X, Y.to("meta")), {}, ValueError, ("y", "cpu", "meta")),
        ((X, Y, "hot"), {}, TypeError, ("scale", "str", "number")),
        ((X, Y, torch.ones(2)), {}, ValueError, ("scale", "(2,)", "(1,)")),
        ((X, Y, torch.tensor(1)), {}, TypeError, ("scale", "int64")),
        ((X, Y, True), {}, TypeError, ("scale", "bool")),
        ((X, Y, np.True_), {}, TypeError, ("scale", "bool")),
        ((X, Y, np.ones(1)), {}, TypeError, ("scale", "ndarray")),
        ((X, Y, 1j), {}, TypeError, ("scale", "complex")),
    ],
    similarity.split_logsumexp: [
        ((X, Y), {}, ValueError, ("y", "6 rows", "5")),
        ((X, Y), {"ids": "pairs"}, ValueError, ("ids", "'pairs'", "'paired'")),
        ((X, Y), {"ids": IDS[0]}, TypeError, ("ids", "one tensor")),
        ((X, Y), {"ids": (IDS[0],)}, TypeError, ("ids", "1 items")),
        ((X, Y), {"ids": 3}, TypeError, ("ids", "int")),
        ((X, Y), {"ids": IDS, "positives": "own"}, ValueError, ("positives", "'own'", "'paired'")),
        ((X, Y), {"ids": IDS, "positives": "paired"}, ValueError, ("y", "6 rows", "5")),
        ((X, Y), {"ids": (IDS[1], IDS[1])}, ValueError, ("ids[0]", "(6,)", "(5,)")),
        ((X, Y), {"ids": (IDS[0], IDS[0])}, ValueError, ("ids[1]", "(5,)", "(6,)")),
        ((X, Y), {"ids": (IDS[0].bool(), IDS[1])}, TypeError, ("ids[0]", "int64", "bool")),
        ((X, Y), {"ids": (IDS[0].to(torch.uint64), IDS[1])}, TypeError, ("ids[0]", "uint64")),
        ((X, Y), {"ids": (IDS[0], [1, 2])}, TypeError, ("ids[1]", "list")),
        ((X, Y), {"ids": IDS, "ceiling": torch.ones(5)}, ValueError, ("ceiling", "(6,)", "(5,)")),
        ((X, Y), {"ids": IDS, "ceiling": 0.5}, TypeError, ("ceiling", "float")),
        ((X, Y), {"ids": IDS, "guide": (X, Y)}, ValueError, ("ceiling", "guide", "None")),
        ((X, Y), GUIDED | {"guide": X}, TypeError, ("guide", "one tensor")),
        ((X, Y), GUIDED | {"guide": (X, Y, X)}, TypeError, ("guide", "3 items")),
        ((X, Y), GUIDED | {"guide": (X, [1])}, TypeError, ("guide[1]", "list")),
        ((X, Y), GUIDED | {"guide": (X, Y[:, :1])}, ValueError, ("guide[1]", "width", "1")),
        ((X, Y), GUIDED | {"guide": (Y, X)}, ValueError, ("guide[0]", "6 rows", "x", "5")),
        ((X, Y), GUIDED | {"guide": (X, X)}, ValueError, ("guide[1]", "5 rows", "y", "6")),
        ((X, Y), GUIDED | {"guide": (X, Y.double())}, TypeError, ("guide[1]", "float64")),
        ((X, Y), GUIDED | {"guide": WIDE}, TypeError, ("guide[0]", "no float64", "float32")),
        ((X, Y), {"ids": IDS, "sides": "columns"}, ValueError, ("sides", "'columns'", "'rows'")),
        ((X, Y), {"ids": IDS, "group": "world"}, TypeError, ("group", "'world'", "'local'")),
    ],
    similarity.softplus_sum: [
        ((X, Y, 1.0, 0.0), {}, ValueError, ("y", "6 rows", "5")),
        ((X, Y[:, :3], 1.0, 0.0), {"ids": IDS}, ValueError, ("y", "width 4", "3")),
        ((X, Y, "a", 0.0), {"ids": IDS}, TypeError, ("scale", "str")),
        ((X, Y, 1.0, torch.ones(2)), {"ids": IDS}, ValueError, ("bias", "(2,)")),
        ((X, Y, 1.0, None), {"ids": IDS}, TypeError, ("bias", "NoneType")),
        ((X, Y, 1.0, 0.0), {"ids": "all"}, ValueError, ("ids", "'all'")),
        ((X, Y, 1.0, 0.0), {"ids": (IDS[0], IDS[0])}, ValueError, ("ids[1]", "(5,)")),
        ((X, Y, 1.0, 0.0), {"ids": IDS, "weight": torch.ones(5)}, ValueError, ("weight", "(6,)")),
        ((X, Y, 1.0, 0.0), {"ids": IDS, "group": "all"}, TypeError, ("group", "'all'")),
    ],
    similarity.paired: [((X, Y), {}, ValueError, ("y", "6 rows", "5"))],
    similarity.topk: [
        ((X, Y, 6), {}, ValueError, ("k", "1 to 5", "6")),
        ((X, Y, 0), {}, ValueError, ("k", "0")),
        ((X, Y, 1.0), {}, TypeError, ("k", "float")),
        ((X, Y, 1), {"ids": 3}, TypeError, ("ids", "int")),
        ((X, Y, 1), {"col_lengths": IDS[1]}, ValueError, ("col_lengths", "None", "(m, d)")),
        ((X[None], Y[None], 1), {"col_lengths": IDS[1]}, ValueError, ("col_lengths", "(1,)")),
    ],
    similarity.ranks: [
        ((X, Y, IDS[1]), {}, ValueError, ("target", "(6,)", "(5,)")),
        ((X, Y, IDS[0]), {}, IndexError, ("target", "[0, 5)", "0 to 5")),
        ((X, Y, IDS[0] - 1), {}, IndexError, ("target", "-1 to 4")),
    ],
    similarity.set_workspace: [
        ((1,), {}, ValueError, ("size", "65536", "1")),
        ((1e9,), {}, TypeError, ("size", "float")),
    ],
}


@pytest.mark.parametrize("function", WRONG, ids=lambda function: function.__name__)
def test_wrong_arguments(function: Callable[..., Any]) -> None:
    for arguments, options, error, words in WRONG[function]:
        with pytest.raises(error) as caught:
            function(*arguments, **options)
        assert all(word in str(caught.value) for word in words), caught.value


@pytest.mark.parametrize(
    "scale",
    [np.float32(2.5), np.float64(2.5), np.float16(2.5), np.array(2.5), Fraction(5, 2)],
    ids=lambda scale: type(scale).__name__,
)
def test_any_real_number_is_a_scale(scale: Any) -> None:
    for ours, expected in zip(
        similarity.logsumexp(X, Y, scale), similarity.logsumexp(X, Y, 2.5), strict=True
    ):
        assert torch.equal(ours, expected)
    assert torch.equal(similarity.paired(Y, Y, scale), similarity.paired(Y, Y, 2.5))
    sums = [similarity.softplus_sum(Y, Y, value, value) for value in (scale, 2.5)]
    assert torch.equal(*sums)
    assert torch.equal(
        similarity.logsumexp(X, Y, np.int64(2))[0], similarity.logsumexp(X, Y, 2.0)[0]
    )


@pytest.mark.parametrize(
    "dtype", [torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16, torch.uint32]
)
def test_ids_of_any_integer_dtype(dtype: torch.dtype) -> None:
    ids = IDS[0] // 2, IDS[1] // 2
    small = tuple(i.to(dtype) for i in ids)
    for mine, expected in zip(
        similarity.split_logsumexp(X, Y, ids=small),
        similarity.split_logsumexp(X, Y, ids=ids),
        strict=True,
    ):
        assert all(map(torch.equal, mine, expected))
    assert all(
        map(
            torch.equal,
            similarity.ranks(X, Y, small[0], ids=small),
            similarity.ranks(X, Y, ids[0], ids=ids),
        )
    )
    assert torch.equal(
        similarity.topk(X, Y, np.int64(2), ids=small)[1], similarity.topk(X, Y, 2, ids=ids)[1]
    )


def test_negative_ids_of_a_smaller_dtype_stay_negative() -> None:
    ids = torch.tensor([-1, -1, 0, 0, 1], dtype=torch.int8)
    rows, _ = similarity.split_logsumexp(Y, None, ids=ids)
    assert rows.positive_count.tolist() == [0, 0, 1, 1, 0]


def calls(x: torch.Tensor, y: torch.Tensor) -> list[Any]:
    split, _ = similarity.split_logsumexp(x, y)
    return [
        *similarity.logsumexp(x, y, 3.0),
        *split,
        similarity.paired(x, y),
        similarity.softplus_sum(x, y, 3.0, -1.0),
    ]


@pytest.mark.parametrize(
    "dtypes", [(torch.bfloat16, torch.float32), (torch.float16, torch.float32)]
)
def test_autocast_casts_two_dtypes_as_it_does_for_a_product(dtypes: Any) -> None:
    x, y = Y.to(dtypes[0]).requires_grad_(), Y.roll(1, 0).to(dtypes[1]).requires_grad_()
    cast = [t.detach().bfloat16().requires_grad_() for t in (x, y)]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert (x @ y.T).dtype == torch.bfloat16
        mine = calls(x, y)
        found = [torch.autograd.grad(mine[k].sum(), (x, y), retain_graph=True) for k in (0, -1)]
    expected = calls(*cast)
    assert all(map(torch.equal, mine, expected))
    for k, gradients in zip((0, -1), found, strict=True):
        wanted = torch.autograd.grad(expected[k].sum(), cast)
        for ours, theirs, leaf in zip(gradients, wanted, (x, y), strict=True):
            assert ours.dtype == leaf.dtype
            assert torch.equal(ours, theirs.to(leaf.dtype))


def test_two_dtypes_that_a_product_refuses_are_refused() -> None:
    with pytest.raises(TypeError, match=r"y: expected torch.bfloat16 as x has, got torch.float32"):
        similarity.logsumexp(Y.bfloat16(), Y)
    with (
        torch.autocast("cpu", dtype=torch.bfloat16),
        pytest.raises(TypeError, match=r"y: expected torch.float32 as x has, got torch.float64"),
    ):
        similarity.logsumexp(Y, Y.double())


def test_ranking_does_not_cast() -> None:
    x, y, target = X.bfloat16(), Y, IDS[0] % 5
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for call in (lambda: similarity.ranks(x, y, target), lambda: similarity.topk(x, y, 1)):
            with pytest.raises(TypeError, match=r"y: expected torch.bfloat16 as x has, got"):
                call()


def test_values_are_read_on_the_cpu_only_and_never_while_tracing() -> None:
    values = torch.tensor([3.0, -1.0, 2.0])
    assert extremes(values) == (-1.0, 3.0)
    assert extremes(values.requires_grad_()) == (-1.0, 3.0)
    assert extremes(torch.tensor([2**62, -(2**63)])) == (-(2**63), 2**62)
    assert all(math.isnan(v) for v in extremes(torch.tensor([1.0, torch.nan, 0.0])) or [0])
    assert extremes(values[:0]) is None
    assert extremes(values.to("meta")) is None
    with FakeTensorMode():
        assert extremes(torch.ones(3)) is None
    seen: list[Any] = []

    def look(v: torch.Tensor) -> torch.Tensor:
        seen.append(extremes(v))
        return v * 2

    torch.vmap(look)(torch.ones(2, 3))
    make_fx(look)(torch.ones(3))
    make_fx(look, tracing_mode="symbolic")(torch.ones(3))
    torch.compile(look, backend="eager", fullgraph=True)(torch.ones(3))
    torch.export.export(Look(look), (torch.ones(3),))
    assert seen
    assert not any(seen)


class Look(torch.nn.Module):
    def __init__(self, look: Any) -> None:
        super().__init__()
        self.look = look

    def forward(self, v: torch.Tensor) -> torch.Tensor:
        return self.look(v)
