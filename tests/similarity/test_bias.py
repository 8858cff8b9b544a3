"""A bias for each column: further columns of the features."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megabatch.similarity import bias as module
from megabatch.similarity import logsumexp, split_logsumexp
from megabatch.similarity.bias import UNIT, with_column_bias
from tests.similarity import dense
from tests.similarity.exact import compare, leaves
from tests.similarity.features import MAKERS

LOW = (torch.bfloat16, torch.float16, torch.float32)


@given(
    m=st.integers(1, 40),
    n=st.integers(1, 40),
    d=st.integers(1, 20),
    scale=st.sampled_from([-3.0, 0.01, 1.0, 100.0]),
    split=st.booleans(),
)
@settings(max_examples=30)
def test_values_and_gradients(m: int, n: int, d: int, scale: float, split: bool) -> None:
    x, y = MAKERS["clustered"](m, n, d)
    mine, theirs = (leaves(x, y, scale, 20 * torch.arange(n).sin()) for _ in range(2))
    if split:
        ids = torch.arange(m) % 7, torch.arange(n) % 5
        ours = split_logsumexp(*mine[:3], ids=ids, col_bias=mine[3])
        truth = dense.split_logsumexp(*theirs[:3], ids=ids, col_bias=theirs[3])
        flat = [[part for side in sides for part in side[:3]] for sides in (ours, truth)]
        compare(*flat, mine, theirs)
    else:
        rows, columns = logsumexp(*mine[:3], col_bias=mine[3])
        assert columns is not None
        compare([rows, columns], dense.logsumexp(*theirs), mine, theirs)


@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("scale", [0.01, 14.3, 200.0])
def test_low_precision_loses_nothing_of_the_bias(dtype: torch.dtype, scale: float) -> None:
    """Each further feature has the eight bits that bfloat16, float16 and TF32 hold."""
    x, bias = torch.zeros(1, 5, dtype=dtype), -15 * torch.rand(500)
    _, further = with_column_bias(x, x.expand(500, 5), torch.tensor(scale), bias)
    assert torch.equal(further, further.bfloat16().to(dtype))
    total = scale * UNIT * further[:, 5:].double().sum(1)
    # Of float16 the smallest numbers have fewer bits.
    least = scale * UNIT * 2.0**-24 if dtype == torch.float16 else 0.0
    torch.testing.assert_close(total, bias.double(), rtol=2.0**-22, atol=least)


@pytest.mark.parametrize("dtype", LOW)
def test_gradients_in_low_precision(dtype: torch.dtype) -> None:
    x, y = (t.to(dtype) for t in MAKERS["learnt"](80, 60, 24))
    inputs = x, y, torch.tensor(14.3), -15 * torch.rand(60)
    mine = [t.clone().requires_grad_() for t in inputs]
    theirs = leaves(*inputs)
    rows, columns = logsumexp(*mine[:3], col_bias=mine[3])
    assert columns is not None
    found, truth = torch.stack([rows.sum(), columns.mean()]), dense.logsumexp(*theirs)
    torch.testing.assert_close(found[0].double(), truth[0].sum(), rtol=1e-6, atol=0)
    found.sum().backward()
    (truth[0].sum() + truth[1].mean()).backward()
    for a, b in zip(mine, theirs, strict=True):
        rounding = torch.finfo(a.dtype if a.dim() == 2 else dtype).eps if a.dim() else 1e-6
        assert (a.grad.double() - b.grad).norm() <= (rounding + 1e-6) * b.grad.norm()


def test_refused() -> None:
    x, tokens = torch.randn(6, 4), torch.randn(6, 2, 4)
    calls = (
        ((x, x), torch.ones(5), ValueError, r"col_bias: expected shape \(6,\), got \(5,\)"),
        ((x, x), torch.ones(6).long(), TypeError, "col_bias: expected a floating-point .*int64"),
        (
            (x, x),
            torch.tensor([0, 0, 0, 0, 0, torch.inf]),
            ValueError,
            "finite .*float32, got 0.*inf",
        ),
        ((x.half(), x.half()), torch.full((6,), 1e30), ValueError, "float16, got "),
        ((x, None), torch.ones(6), ValueError, "col_bias: expected None with y=None"),
        ((tokens, tokens), torch.ones(6), ValueError, "col_bias: expected None for x of shape"),
    )
    for features, bias, error, message in calls:
        with pytest.raises(error, match=message):
            split_logsumexp(*features, 2.0, col_bias=bias)


def test_a_constant_changes_no_probability() -> None:
    """So sampling probabilities are needed up to a factor."""
    x, y = MAKERS["random"](9, 9, 4)
    sides = [split_logsumexp(x, y, 5.0, col_bias=torch.arange(9.0) + c)[0] for c in (0, 7)]
    torch.testing.assert_close(*(side.positive_sum - side.negative for side in sides))


@pytest.mark.parametrize("sign", [1, -1])
def test_numbers_out_of_range_give_nan_where_they_are_not_read(
    sign: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "extremes", lambda values: None)  # as on a GPU
    x, bias = torch.randn(6, 4).half(), torch.zeros(6)
    bias[2] = sign * 1e5
    assert logsumexp(x, x, 2.0, col_bias=bias)[0].isnan().all()
    found, _ = logsumexp(x.bfloat16(), x.bfloat16(), 2.0, col_bias=sign * bias * 1e25)
    torch.testing.assert_close(found, torch.full((6,), 1e30))
