"""The kernels of `ranks` and `topk`."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megabatch import similarity
from megabatch.similarity import dense
from megabatch.similarity import settings as call_settings
from tests.similarity.features import MAKERS
from tests.similarity.triton import DEVICE, HALVES, MARKS

pytest.importorskip("triton")
from megabatch.similarity.triton import ranking

pytestmark = MARKS


def whole_numbers(maker: str, m: int, n: int, d: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Features whose products are exact, so that ties are ties in any order of summation."""
    x, y = ((4 * t).round().to(DEVICE, dtype) for t in MAKERS[maker](m, n, d))
    return x, y


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("with_ids", [False, True])
@pytest.mark.parametrize(
    ("maker", "m", "n", "d"),
    [("random", 130, 300, 64), ("duplicated", 300, 1200, 20), ("clustered", 1, 1, 8),
     ("random", 257, 128, 7)],
)  # fmt: skip
def test_ranks_equal_the_dense_counts(
    maker: str, m: int, n: int, d: int, with_ids: bool, dtype: torch.dtype
) -> None:
    x, y = whole_numbers(maker, m, n, d, dtype)
    ids = (torch.randint(-1, 9, (m,)), torch.randint(-1, 9, (n,))) if with_ids else None
    ids = ids and (ids[0].to(DEVICE), ids[1].to(DEVICE))
    for target in (torch.randint(0, n, (m,)), torch.arange(m) * n // m, torch.full((m,), n - 1)):
        target = target.to(DEVICE)
        ours = similarity.ranks(x, y, target, ids=ids)
        truth = dense.ranks(x.float(), y.float(), target, ids=ids)
        for a, b in zip(ours, truth, strict=True):
            assert a.dtype == torch.int64
            assert torch.equal(a, b)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("d", [37, 200])
def test_a_target_neither_beats_nor_equals_itself(d: int, dtype: torch.dtype) -> None:
    x, y = (t.to(DEVICE, dtype) for t in MAKERS["random"](300, 1500, d))
    target = torch.randint(0, 1500, (300,), device=DEVICE)
    y[target] = x  # the highest score of a unit vector, unless rows share a target
    above, equal = similarity.ranks(x, y, target)
    scores = x.double() @ y.double().T
    own = scores.gather(1, target[:, None])
    # Counts agree for scores that differ by more than the products' rounding.
    slack = 1e-2
    assert (above >= (scores > own + slack).sum(1)).all()
    assert (above + equal <= (scores > own - slack).sum(1) - 1).all()
    best = (scores > own - slack).sum(1) == 1
    assert best.any()
    assert above[best].sum() == equal[best].sum() == 0


def test_a_row_whose_target_scores_nan_counts_every_column_as_above() -> None:
    x, y = whole_numbers("random", 5, 300, 16, torch.float16)
    x[1] = torch.nan
    y[7] = torch.nan
    above, equal = similarity.ranks(x, y, torch.full((5,), 3, device=DEVICE))
    assert above[1] == 299
    assert equal[1] == 0
    assert (above[[0, 2, 3, 4]] >= 1).all()  # column 7


def test_views_of_other_tensors() -> None:
    x, y = whole_numbers("random", 140, 300, 30, torch.float16)
    target = torch.arange(140, device=DEVICE)
    ids = torch.randint(0, 5, (140,), device=DEVICE), torch.randint(0, 5, (300,), device=DEVICE)
    expected = similarity.ranks(x, y, target, ids=ids)
    wide = [torch.stack([t, t], dim=1)[:, 0] for t in (x, y, target, *ids)]
    assert not any(t.is_contiguous() for t in wide)
    ours = similarity.ranks(wide[0], wide[1], wide[2], ids=(wide[3], wide[4]))
    for a, b in zip(ours, expected, strict=True):
        assert torch.equal(a, b)


def test_no_rows() -> None:
    x, y = whole_numbers("random", 3, 5, 8, torch.float16)
    above, equal = similarity.ranks(x[:0], y, torch.zeros(0, dtype=torch.int64, device=DEVICE))
    assert above.shape == equal.shape == (0,)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("with_ids", [False, True])
@pytest.mark.parametrize(
    ("m", "n", "d", "k", "widest", "rows"),
    [(130, 300, 64, 3, 65_536, 4096), (300, 1300, 20, 1, 1024, 128), (1, 1, 8, 1, 1024, 128),
     (140, 257, 7, 257, 128, 128), (5, 1500, 16, 2, 1024, 128)],
)  # fmt: skip
def test_topk_equals_the_dense_one(
    m: int,
    n: int,
    d: int,
    k: int,
    widest: int,
    rows: int,
    with_ids: bool,
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ranking, "WIDEST", widest)
    monkeypatch.setattr(
        call_settings, "workspace", lambda like: rows * min(widest, 1408) * 4 * 4 // 3
    )
    x, y = whole_numbers("random", m, n, d, dtype)
    ids = (torch.randint(-1, 3, (m,)), torch.randint(-1, 3, (n,))) if with_ids else None
    ids = ids and (ids[0].to(DEVICE), ids[1].to(DEVICE))
    scores, indices = similarity.topk(x, y, k, ids=ids)
    truth = x.float() @ y.float().T
    if ids is not None:
        same = (ids[0][:, None] == ids[1][None, :]) & (ids[0] >= 0)[:, None]
        truth = truth.masked_fill(same, -torch.inf)
    assert torch.equal(scores, truth.topk(k, dim=1).values)
    missing = scores == -torch.inf
    assert torch.equal(indices == -1, missing)
    assert torch.equal(truth.gather(1, indices.clamp(min=0))[~missing], scores[~missing])
    for row in indices.tolist():
        present = [i for i in row if i >= 0]
        assert len(set(present)) == len(present)


def test_topk_puts_nan_first() -> None:
    x, y = whole_numbers("random", 4, 1500, 16, torch.float16)
    y[700] = torch.nan
    scores, indices = similarity.topk(x, y, 2)
    assert scores[:, 0].isnan().all()
    assert (indices[:, 0] == 700).all()


@settings(deadline=None, max_examples=60)
@given(m=st.integers(1, 9), tiles=st.integers(1, 32), k=st.integers(1, 6), levels=st.integers(1, 9))
def test_topk_from_the_maxima_of_chunks(m: int, tiles: int, k: int, levels: int) -> None:
    s = torch.randint(-levels, levels, (m, tiles * 128)).float()
    s[torch.rand(s.shape) < 0.5] = -torch.inf
    tops = s.unflatten(1, (-1, 128)).amax(2)
    value, column = ranking._best(s, tops, k)
    assert torch.equal(value, s.topk(k, dim=1).values)
    assert torch.equal(s.gather(1, column), value)
    assert all(len(set(row)) == k for row in column.tolist())
