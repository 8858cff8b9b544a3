"""`ranks` and `topk`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from megabatch import similarity
from tests.similarity import dense
from tests.similarity.features import MAKERS
from tests.similarity.triton import DEVICE

pytestmark = pytest.mark.usefixtures("small_blocks")
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
Ids = tuple[Tensor, Tensor] | None


def whole_numbers(m: int, n: int, d: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Features whose products are exact, so that ties are ties in any order of summation."""
    x, y = ((4 * t).round().to(DEVICE, dtype) for t in MAKERS["clustered"](m, n, d))
    return x, y


def some_ids(m: int, n: int) -> tuple[Tensor, Tensor]:
    return torch.randint(-1, 4, (m,), device=DEVICE), torch.randint(-1, 4, (n,), device=DEVICE)


def assert_ranks(
    x: Tensor, y: Tensor, target: Tensor, ids: Ids, lengths: Tensor | None = None
) -> None:
    ours = similarity.ranks(x, y, target, ids=ids, col_lengths=lengths)
    truth = dense.ranks(x.double(), y.double(), target, ids=ids, col_lengths=lengths)
    for a, b in zip(ours, truth, strict=True):
        assert a.dtype == torch.int64
        assert torch.equal(a, b)


def assert_topk(x: Tensor, y: Tensor, k: int, ids: Ids, lengths: Tensor | None = None) -> None:
    """The scores are the largest ones, each of another column; a missing one is -inf, of -1."""
    scores, indices = similarity.topk(x, y, k, ids=ids, col_lengths=lengths)
    truth = dense.logits(x.double(), y.double(), col_lengths=lengths)
    if ids is not None:
        truth.masked_fill_(dense.equal_ids(truth, ids), -torch.inf)
    assert torch.equal(scores.double(), truth.topk(k, dim=1).values)
    missing = scores == -torch.inf
    assert torch.equal(indices == -1, missing)
    assert torch.equal(truth.gather(1, indices.clamp(min=0))[~missing], scores.double()[~missing])
    for row in indices.tolist():
        present = [i for i in row if i >= 0]
        assert len(set(present)) == len(present)


@pytest.mark.parametrize("with_ids", [False, True])
@pytest.mark.parametrize(
    ("m", "n", "d", "k"),
    [(130, 300, 64, 3), (300, 1300, 20, 1), (1, 1, 8, 1), (140, 257, 7, 257), (5, 1500, 16, 2)],
)
def test_many_blocks(m: int, n: int, d: int, k: int, with_ids: bool) -> None:
    for dtype in DTYPES:
        x, y = whole_numbers(m, n, d, dtype)
        ids = some_ids(m, n) if with_ids else None
        for target in (torch.randint(0, n, (m,)), torch.arange(m) * n // m):
            assert_ranks(x, y, target.to(DEVICE), ids)
        assert_topk(x, y, k, ids)
        # Views of other tensors give the same.
        vectors = (target.to(DEVICE), *(ids or ()))
        wide = [torch.stack([t, t], 1)[:, 0] for t in (x, y, *vectors)]
        assert_ranks(wide[0], wide[1], wide[2], (wide[3], wide[4]) if with_ids else None)


@pytest.mark.parametrize("with_ids", [False, True])
@pytest.mark.parametrize(("m", "n", "k"), [(40, 130, 3), (3, 70, 70), (1, 1, 1)])
def test_late_interaction(m: int, n: int, k: int, with_ids: bool) -> None:
    """Tokens of whole numbers, for exact sums and ties; some candidates have no token."""
    for dtype in DTYPES:
        x, y = whole_numbers(3 * m, 5 * n, 6, dtype)
        x, y = x.unflatten(0, (m, 3)), y.unflatten(0, (n, 5))
        x[::2, 2] = 0  # padding
        ids = some_ids(m, n) if with_ids else None
        target = torch.randint(0, n, (m,), device=DEVICE)
        for lengths in (None, torch.arange(n, device=DEVICE) % 7 % 6):
            assert_ranks(x, y, target, ids, lengths)
            assert_topk(x, y, k, ids, lengths)


@pytest.mark.parametrize("d", [37, 200])
def test_a_target_neither_beats_nor_equals_itself(d: int) -> None:
    for dtype in DTYPES:
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


@pytest.mark.parametrize(
    ("m", "n", "shapes"),
    [
        *((m, n, [(d,), (d,)]) for m, n, d in [(63, 1027, 64), (3, 31, 511), (2, 333, 64)]),
        *((m, n, [(5, d), (k, d)]) for m, n, k, d in [(9, 333, 7, 64), (2, 333, 1, 64)]),
        (1, 9, [(7,), (7,)]),
        (3, 70, [(32, 128), (30, 128)]),
    ],
)
def test_equal_columns_tie_whatever_their_number(m: int, n: int, shapes: list[Any]) -> None:
    """A collapsed model has such scores."""
    generator = torch.Generator().manual_seed(shapes[0][-1])
    features = [torch.randn(1, *shape, generator=generator) for shape in shapes]
    features = [torch.nn.functional.normalize(t, dim=-1) for t in features]
    for dtype in DTYPES[-3:]:
        x, y = (
            t.to(DEVICE, dtype).repeat_interleave(rows, 0)
            for t, rows in zip(features, (m, n), strict=True)
        )
        for target in (0, n - 1):
            above, equal = similarity.ranks(x, y, torch.full((m,), target, device=DEVICE))
            assert above.sum() == 0
            assert (equal == n - 1).all()


def test_nan_scores() -> None:
    """A row whose target scores NaN counts every column as above; the best columns are NaN."""
    x, y = whole_numbers(5, 1500, 16, DTYPES[-2])
    x[1] = torch.nan
    y[700] = torch.nan
    above, equal = similarity.ranks(x, y, torch.full((5,), 3, device=DEVICE))
    assert above[1] == 1499
    assert equal[1] == 0
    assert (above[[0, 2, 3, 4]] >= 1).all()
    scores, indices = similarity.topk(x[2:], y, 2)
    assert scores[:, 0].isnan().all()
    assert (indices[:, 0] == 700).all()


def test_no_rows() -> None:
    x, y = whole_numbers(3, 5, 8, DTYPES[-2])
    above, equal = similarity.ranks(x[:0], y, torch.zeros(0, dtype=torch.int64, device=DEVICE))
    assert above.shape == equal.shape == (0,)
    assert similarity.topk(x[:0], y, 2)[0].shape == (0, 2)


def test_autocast_changes_nothing() -> None:
    x, y = torch.randn(9, 4), torch.randn(20, 4)
    target = torch.arange(9)
    truth = *similarity.ranks(x, y, target), *similarity.topk(x, y, 3)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        ours = *similarity.ranks(x, y, target), *similarity.topk(x, y, 3)
    for a, b in zip(ours, truth, strict=True):
        assert torch.equal(a, b)
