"""Few rows, NaN, views, some gradients alone and torch's own checks, of both backends."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from megabatch import similarity
from megabatch.similarity import settings
from tests.similarity.triton import DEVICE, MARKS

pytestmark = MARKS[1]
#: Backend -> its features' dtype, and the tolerance of a gradient.
BACKENDS = {"torch": (torch.float64, 1e-12), "kernels": (torch.float16, 1e-3)}
#: Calls of (x, y, scale, bias), each with as many results.
CALLS: dict[str, Callable[..., list[Tensor]]] = {
    "logsumexp": lambda x, y, s, b: [*similarity.logsumexp(x, y, s), b],
    "split": lambda x, y, s, b: [*itertools.chain(*split(x, y, s)), b],
    "sigmoid": lambda x, y, s, b: [similarity.softplus_sum(x, y, s, b, ids=ids(x, y))],
}


def ids(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    return torch.arange(len(x), device=DEVICE) % 7, torch.arange(len(y), device=DEVICE) % 5


def split(x: Tensor, y: Tensor, scale: Any) -> Any:
    return similarity.split_logsumexp(x, y, scale, ids=ids(x, y))


def inputs(m: int, n: int, backend: str) -> list[Tensor]:
    """x and y of unit rows, scale and bias."""
    dtype = BACKENDS[backend][0]
    sides = (torch.nn.functional.normalize(torch.randn(k, 16, device=DEVICE)) for k in (m, n))
    wide = torch.promote_types(dtype, torch.float32)
    numbers = (torch.tensor(value, dtype=wide, device=DEVICE) for value in (9.0, -4.0))
    return [*(t.to(dtype) for t in sides), *numbers]


def results(call: Callable[..., list[Tensor]], given: list[Tensor], needed: Any) -> list[Any]:
    """The results and the gradients of their sum, None where none is needed."""
    mine = [t.detach().requires_grad_(k in needed) for k, t in enumerate(given)]
    found = call(*mine)
    total = torch.stack([r.nan_to_num(0, 0, 0).sum() for r in found]).sum()
    if total.requires_grad:
        total.backward()
    return [*(r.detach() for r in found), *(t.grad for t in mine)]


def same(ours: list[Tensor], truth: list[Tensor], backend: str) -> None:
    """The kernels give the same bits; torch's products depend on strides."""
    for a, b in zip(ours, truth, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0 if backend == "kernels" else 1e-11)


@pytest.mark.parametrize("call", CALLS)
def test_gradients_of_some_inputs_alone(call: str, backend: str) -> None:
    given, tolerance = inputs(140, 40, backend), BACKENDS[backend][1]
    whole = results(CALLS[call], given, range(4))
    for needed in ((), (0,), (1,), (2,), (3,), (1, 2, 3), (0, 1)):
        part = results(CALLS[call], given, needed)
        for k, (a, b) in enumerate(zip(part, whole, strict=True), start=4 - len(whole)):
            if k >= 0 and k not in needed:
                assert a is None
            else:
                torch.testing.assert_close(a, b, rtol=max(tolerance, 1e-6), atol=tolerance / 10)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("call", CALLS)
def test_non_finite_features_give_non_finite_results(call: str, value: float, backend: str) -> None:
    """They reach the results of their own row and of the columns, not of other rows."""
    x, *others = inputs(200, 200, backend)
    x[150, 2] = value
    *found, dx, dy, _, _ = results(CALLS[call], [x, *others], range(4))
    if call == "sigmoid":
        assert not found[0].isfinite()
        assert not dy.isfinite().all()
        assert dx[:128].isfinite().all()
    else:
        rows, columns = found[0], found[4 if call == "split" else 1]
        assert not rows[150].isfinite()
        assert rows[:150].isfinite().all()
        assert not columns.isfinite().all()


@pytest.mark.parametrize(("m", "n"), [(3, 0), (0, 3), (0, 0), (1, 1)])
@pytest.mark.parametrize("call", CALLS)
def test_few_rows(call: str, m: int, n: int, backend: str) -> None:
    given = inputs(m, n, backend)
    *found, dx, dy, _, _ = results(CALLS[call], given, range(4))
    assert (dx.shape, dy.shape) == ((m, 16), (n, 16))
    if call == "sigmoid":
        assert (found[0] == 0) == (m * n == 0)
    elif call == "logsumexp" and m * n:
        torch.testing.assert_close(found[0], found[1])
    elif call == "split":  # one pair is a positive; of no pair a log-sum-exp is -inf
        for side, size in ((found[:4], m), (found[4:8], n)):
            assert side[0].tolist() == [-torch.inf] * size
            assert side[1].isfinite().tolist() == [m * n > 0] * size
            assert side[3].tolist() == [float(m * n > 0)] * size
    if m * n == 0:
        assert not dx.any()
        assert not dy.any()


@pytest.mark.parametrize(
    "view",
    [
        lambda wide: wide[:100, :16].T.contiguous().T,
        lambda wide: wide[:100, 1:17],
        lambda wide: wide[:1, :16].expand(100, 16),
        lambda wide: wide[::2, :16],
    ],
    ids=["column-major", "misaligned", "expanded", "strided"],
)
def test_views(view: Callable[[Tensor], Tensor], backend: str) -> None:
    """Views give the results of contiguous copies; the kernels read the copies' numbers."""
    _, y, *numbers = inputs(100, 100, backend)
    x = view(torch.randn(200, 32, device=DEVICE).to(y.dtype))
    plain = x.clone(memory_format=torch.contiguous_format)
    for call in CALLS.values():
        ours, truth = (results(call, [t, y, *numbers], range(4)) for t in (x, plain))
        same(ours, truth, backend)


@pytest.mark.parametrize("call", CALLS)
def test_one_tensor_as_both_sides(call: str, backend: str) -> None:
    """Though ids may sort each side in an order of its own."""
    x, _, *numbers = inputs(100, 100, backend)
    *ours, gradient, _, _ = results(lambda x, s, b: CALLS[call](x, x, s, b), [x, *numbers], (0,))
    *truth, of_rows, of_columns, _, _ = results(CALLS[call], [x, x, *numbers], (0, 1))
    same([*ours, gradient], [*truth, of_rows + of_columns], backend)


def test_rows_alone(backend: str) -> None:
    x, y, scale, _ = inputs(150, 130, backend)
    for function in (similarity.logsumexp, split_by_ids):
        rows, columns = function(x, y, scale, sides="rows")
        both = function(x, y, scale)[0]
        assert columns is None
        same([*rows], [*both], backend)


def split_by_ids(x: Tensor, y: Tensor, scale: Tensor, **options: Any) -> Any:
    return similarity.split_logsumexp(x, y, scale, ids=ids(x, y), **options)


def test_views_of_vectors(backend: str) -> None:
    """Ceilings, weights and ids with a stride of 2 or 0."""
    x, y, scale, _ = inputs(100, 100, backend)
    vectors = torch.rand(100, 2, dtype=scale.dtype, device=DEVICE)[:, 0], scale.expand(100) / 10
    own, others = (torch.stack([t, t], 1)[:, 0] for t in ids(x, y))
    for vector, pairs in itertools.product(vectors, ((own, others), None)):
        found = []
        for copy in (lambda t: t, torch.Tensor.contiguous):
            v, given = copy(vector), "paired" if pairs is None else tuple(map(copy, pairs))

            def call(x: Tensor, y: Tensor, v: Tensor = v, given: Any = given) -> list[Tensor]:
                sides = similarity.split_logsumexp(x, y, 9.0, ids=given, ceiling=v)
                total = similarity.softplus_sum(x, y, 9.0, -4.0, ids=given, weight=v)
                return [*itertools.chain(*sides), total]

            found.append(results(call, [x, y], (0, 1)))
        same(*found, backend)


def test_opcheck(backend: str) -> None:
    x, y, scale, bias = (t.requires_grad_() for t in inputs(6, 5, backend))
    teacher = x[:5, :2].detach(), y[:, :2].detach(), scale.detach()
    three, own = ids(x, y), [*settings.of_call(x)]
    limit = torch.zeros(5, dtype=scale.dtype, device=DEVICE)
    weight = torch.rand(6, dtype=scale.dtype, device=DEVICE)
    with_ids = (x, y, scale, bias, *three)
    tokens = x[:5, None].repeat(1, 2, 1), y[:, None].repeat(1, 3, 1), scale
    counts = torch.full((len(y),), 2, device=DEVICE)
    calls: dict[str, list[tuple[Any, ...]]] = {
        "logsumexps": [
            (x, y, scale, *[None] * 8, "plain", 2, True, True),
            (x, y, scale, *three, *[None] * 6, "plain", 0, False, False),
            (x, None, scale, *[None] * 8, "dropped", 0, False, True),
            (
                x[:5],
                y,
                scale,
                None,
                None,
                limit,
                *teacher[:2],
                *[None] * 3,
                "paired",
                0,
                True,
                True,
            ),
            (x[:5], y, scale, *[None] * 3, *teacher, None, None, "paired", 0, True, True),
            (*tokens, *[None] * 6, weight[:5].to(scale), counts, "plain", 0, True, False),
        ],
        "softplus_sum": [
            (*with_ids, weight, *[None] * 4, "plain", *[True] * 4),
            (x[:5], y, scale, bias, *[None] * 7, "paired", *[True] * 4),
            (x.detach(), *with_ids[1:], *[None] * 5, "plain", False, True, True, False),
            (x[:5], *with_ids[1:4], *[None] * 3, *teacher, bias.detach(), "plain", *[True] * 4),
        ],
    }
    tests = ["test_schema", "test_autograd_registration", "test_faketensor"]
    tests += ["test_aot_dispatch_dynamic"] * (backend == "torch")
    for name, several in calls.items():
        rest = ("logsumexp", "", own) if name == "logsumexps" else ("", own)
        for arguments in several:
            operator = getattr(torch.ops.megabatch, name).default
            torch.library.opcheck(operator, (*arguments, *rest), test_utils=tests)
    torch.library.opcheck(torch.ops.megabatch.row_products.default, (x[:5], y))
