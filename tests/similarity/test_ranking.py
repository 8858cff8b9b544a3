from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megabatch import similarity
from megabatch.similarity import dense, eager
from tests.similarity.features import MAKERS


@settings(deadline=None, max_examples=60)
@given(
    m=st.integers(1, 60),
    n=st.integers(1, 60),
    block=st.tuples(st.integers(1, 30), st.integers(1, 30)),
    maker=st.sampled_from(["random", "duplicated", "clustered"]),
    with_ids=st.booleans(),
)
def test_ranks_equal_the_dense_counts(
    m: int, n: int, block: tuple[int, int], maker: str, with_ids: bool
) -> None:
    # Products of small integers are exact, so that ties are ties in any order of summation.
    x, y = ((4 * t).round() for t in MAKERS[maker](m, n, 5))
    target = torch.randint(0, n, (m,))
    ids = (torch.randint(-1, 4, (m,)), torch.randint(-1, 4, (n,))) if with_ids else None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(eager, "block_shape", lambda like, *_: block)
        ours = similarity.ranks(x, y, target, ids=ids)
    for a, b in zip(ours, dense.ranks(x, y, target, ids=ids), strict=True):
        assert torch.equal(a, b)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_target_is_never_beaten_by_itself(dtype: torch.dtype) -> None:
    x, _ = MAKERS["random"](300, 300, 37)
    x = x.to(dtype)
    above, equal = similarity.ranks(x, x.clone(), torch.arange(300))
    assert above.sum() == 0
    assert equal.sum() == 0


def test_a_collapsed_model_ties_with_everything() -> None:
    x = torch.ones(50, 8) / 8**0.5
    above, equal = similarity.ranks(x, x, torch.arange(50))
    assert above.sum() == 0
    assert (equal == 49).all()


@pytest.mark.parametrize(("m", "n", "d"), [(63, 1027, 64), (3, 31, 511), (2, 333, 64), (1, 9, 7)])
def test_equal_columns_tie_whatever_their_number(m: int, n: int, d: int) -> None:
    feature = torch.randn(1, d, generator=torch.Generator().manual_seed(d))
    x, y = (torch.nn.functional.normalize(feature).repeat(rows, 1) for rows in (m, n))
    for target in (0, n - 1):
        above, equal = similarity.ranks(x, y, torch.full((m,), target))
        assert above.sum() == 0
        assert (equal == n - 1).all()


def test_a_nan_query_ranks_last() -> None:
    x = torch.randn(4, 3)
    x[1] = torch.nan
    above, equal = similarity.ranks(x, torch.randn(9, 3), torch.zeros(4, dtype=torch.int64))
    assert above[1] == 8
    assert equal[1] == 0


@settings(deadline=None, max_examples=40)
@given(
    m=st.integers(1, 40),
    n=st.integers(1, 60),
    share=st.floats(0, 1),
    block=st.tuples(st.integers(1, 30), st.integers(1, 30)),
)
def test_topk_equals_the_dense_one(m: int, n: int, share: float, block: tuple[int, int]) -> None:
    k = 1 + int(share * (n - 1))
    x, y = MAKERS["random"](m, n, 5)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(eager, "block_shape", lambda like, *_: block)
        scores, indices = similarity.topk(x, y, k)
    truth = (x @ y.T).topk(k, dim=1)
    torch.testing.assert_close(scores, truth.values, rtol=0, atol=1e-12)
    torch.testing.assert_close((x @ y.T).gather(1, indices), truth.values, rtol=0, atol=1e-12)
    assert all(len(set(row)) == k for row in indices.tolist())


def test_topk_leaves_out_equal_ids() -> None:
    x = torch.randn(5, 4)
    ids = torch.tensor([0, 0, 0, 0, 1])
    scores, indices = similarity.topk(x, x, 3, ids=(ids, ids))
    assert indices[:4, 0].tolist() == [4, 4, 4, 4]
    assert indices[:4, 1:].eq(-1).all()
    assert scores[:4, 1:].eq(-torch.inf).all()
    assert set(indices[4].tolist()) < {0, 1, 2, 3}


def test_autocast_changes_nothing() -> None:
    x, y = torch.randn(9, 4), torch.randn(20, 4)
    target = torch.arange(9)
    truth = *similarity.ranks(x, y, target), *similarity.topk(x, y, 3)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        ours = *similarity.ranks(x, y, target), *similarity.topk(x, y, 3)
    for a, b in zip(ours, truth, strict=True):
        assert torch.equal(a, b)
