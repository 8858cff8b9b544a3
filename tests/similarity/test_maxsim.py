"""Log-sum-exps of late interaction against the dense float64 expression."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megabatch import similarity
from megabatch.similarity import eager_maxsim
from tests.similarity import dense
from tests.similarity.exact import compare, leaves
from tests.similarity.test_statistics import compare_split, some_ids


@settings(max_examples=60)
@given(st.data())
def test_any_call_is_exact(data: st.DataObject) -> None:
    """Shapes, ids, ceilings, weights and lengths, in small blocks and tiles."""
    m, n, queries, documents = (data.draw(st.integers(1, most)) for most in (12, 12, 5, 7))
    kind = data.draw(st.sampled_from(["paired", "ids", "paired among ids"]))
    n = n if kind == "ids" else m
    torch.manual_seed(data.draw(st.integers(0, 999)))
    x, y = torch.randn(m, queries, 3).double(), torch.randn(n, documents, 3).double()
    options: dict[str, Any] = {"ids": "paired" if kind == "paired" else some_ids(m, n, 4)}
    options["positives"] = "paired" if kind == "paired among ids" else "ids"
    if data.draw(st.booleans()):
        options["row_weight"] = torch.rand(m).double()
    if data.draw(st.booleans()):
        options["col_lengths"] = torch.randint(1, documents + 1, (n,))
    if data.draw(st.booleans()):
        options["ceiling"] = torch.randn(m).double()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(eager_maxsim, "BLOCK", data.draw(st.sampled_from([1, 4, 256])))
        patch.setattr(eager_maxsim, "TILE", data.draw(st.sampled_from([(2, 3), (512, 1024)])))
        if data.draw(st.booleans()):  # nothing is saved for the backward pass
            patch.setattr(eager_maxsim.MaxSimTiles, "saved_numbers", lambda *_: 0)
        compare_split([x, y, 0.7], options)


@pytest.mark.usefixtures("small_blocks")
def test_many_blocks_of_which_some_are_saved() -> None:
    x, y = torch.randn(70, 9, 8).double(), torch.randn(55, 11, 8).double()
    mine, theirs = leaves(x, y, 1.3), leaves(x, y, 1.3)
    compare(similarity.logsumexp(*mine), dense.logsumexp(*theirs), mine, theirs)


def test_a_tie_is_the_first_tokens() -> None:
    x, y = torch.randn(3, 2, 4).double(), torch.randn(3, 1, 4).double().repeat(1, 3, 1)
    x.requires_grad_(), y.requires_grad_()
    similarity.logsumexp(x, y)[0].sum().backward()
    assert y.grad[:, 0].any()
    assert not y.grad[:, 1:].any()


def test_documents_without_tokens_are_no_candidates() -> None:
    x, y = (torch.randn(4, 2, 3, requires_grad=True) for _ in range(2))
    rows, columns = similarity.logsumexp(x, y, col_lengths=torch.tensor([2, 0, 1, 0]))
    alone, _ = similarity.logsumexp(x, y[::2], col_lengths=torch.tensor([2, 1]), sides="rows")
    torch.testing.assert_close(rows, alone)
    assert (columns == -torch.inf).tolist() == [False, True, False, True]
    (rows.sum() + columns[::2].sum()).backward()
    assert not y.grad[1::2].any()
    assert x.grad.isfinite().all()


def test_a_side_without_rows_and_nan() -> None:
    x, y = torch.randn(0, 2, 3, requires_grad=True), torch.randn(4, 5, 3, requires_grad=True)
    rows, columns = similarity.logsumexp(x, y)
    (rows.sum() + columns[:0].sum()).backward()
    assert rows.shape == (0,)
    assert (columns == -torch.inf).all()
    assert not y.grad.any()
    x = torch.randn(4, 2, 3)
    x[1, 1, 2] = torch.nan
    assert similarity.logsumexp(x, y)[0].isnan().tolist() == [False, True, False, False]


def row_errors(found: Tensor, truth: Tensor) -> Tensor:
    return (found.double() - truth).norm(dim=-1) / truth.norm(dim=-1).clamp(min=1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_errors_by_token_are_those_of_float32_maxima(dtype: torch.dtype) -> None:
    b = 24
    features = [torch.nn.functional.normalize(torch.randn(b, k, 32), dim=2) for k in (8, 12)]
    features = [t.to(dtype) for t in features]

    def gradients(kind: torch.dtype, ours: bool) -> list[Tensor]:
        x, y = (t.to(kind).requires_grad_() for t in features)
        sides = similarity.split_logsumexp(x, y, 20.0) if ours else dense.split_logsumexp(x, y, 20)
        losses = [torch.logaddexp(s.positive_sum, s.negative) - s.positive_sum for s in sides]
        return list(torch.autograd.grad(sum(loss.mean() for loss in losses), (x, y)))

    truth = gradients(torch.float64, ours=False)
    careful = [t.to(dtype) for t in gradients(torch.float32, ours=False)]
    # Rounding to half precision is all of the error; float32's sums may be in another order.
    factor = 2 if dtype == torch.float32 else 1.001
    for mine, theirs, exact in zip(gradients(dtype, ours=True), careful, truth, strict=True):
        assert row_errors(mine, exact).max() <= factor * row_errors(theirs, exact).max()


def test_refusals() -> None:
    x, y = torch.randn(3, 2, 4), torch.randn(3, 5, 4)
    for error, words, call in (
        (ValueError, r"y: expected shape \(n, l, d\)", lambda: similarity.logsumexp(x, y[:, 0])),
        (ValueError, "y: expected width 4", lambda: similarity.logsumexp(x, y[..., :3])),
        (
            ValueError,
            r"x: expected shape \(n, l, d\) with l, d > 0",
            lambda: similarity.logsumexp(x[:, :0], y),
        ),
        (
            ValueError,
            r"x: expected shape \(n, d\)",
            lambda: similarity.split_logsumexp(x, None),
        ),
        (
            ValueError,
            "row_weight: expected None",
            lambda: similarity.logsumexp(x[0], y[0], row_weight=torch.ones(2)),
        ),
        (
            ValueError,
            r"col_lengths: expected shape \(3,\)",
            lambda: similarity.logsumexp(x, y, col_lengths=torch.ones(4, dtype=torch.int64)),
        ),
        (
            TypeError,
            "col_lengths: expected a tensor",
            lambda: similarity.logsumexp(x, y, col_lengths=[1, 2, 3]),
        ),
    ):
        with pytest.raises(error, match=words):
            call()
