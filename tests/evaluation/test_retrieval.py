"""Retrieval figures against brute force over every order that ties allow."""

from __future__ import annotations

import math
import statistics

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megabatch.evaluation import retrieval, retrieval_metrics
from megabatch.evaluation.retrieval import answers_by_ids, answers_by_pairs, figures_and_chance


def brute_force(x: Tensor, y: Tensor, rights: list[list[int]], ks: list[int]) -> dict:
    """The same figures from the whole matrix in float64, query by query, by counting subsets."""
    scores = (x.double() @ y.double().T).tolist()
    recalls: dict[int, list[float]] = {k: [] for k in ks}
    expected_ranks = []
    for i, row in enumerate(scores):
        right = rights[i]
        if not right:
            continue
        best = max(row[j] for j in right)
        wrong = [row[j] for j in range(len(row)) if j not in right]
        above = sum(s > best for s in wrong)
        equal = sum(s == best for s in wrong)
        tied = sum(row[j] == best for j in right)
        # P(the first right column of the tied group is at position p of the group), p = 0, 1, ...
        total = math.comb(equal + tied, tied)
        place = [math.comb(equal + tied - 1 - p, tied - 1) / total for p in range(equal + 1)]
        for k in ks:
            recalls[k].append(sum(chance for p, chance in enumerate(place) if above + p < k))
        expected_ranks.append(above + 1 + sum(p * chance for p, chance in enumerate(place)))
    result = {f"recall@{k}": statistics.fmean(v) for k, v in recalls.items()}
    return result | {
        "median_rank": statistics.median(expected_ranks),
        "queries": len(expected_ranks),
    }


def both_ways(x: Tensor, y: Tensor, x_ids: list[int], y_ids: list[int], ks: list[int]) -> dict:
    there, back = (
        [[j for j, b in enumerate(columns) if a >= 0 and a == b] for a in rows]
        for rows, columns in ((x_ids, y_ids), (y_ids, x_ids))
    )
    return by_rights(x, y, there, back, ks)


def by_rights(
    x: Tensor, y: Tensor, rights: list[list[int]], rights_back: list[list[int]], ks: list[int]
) -> dict:
    there, back = brute_force(x, y, rights, ks), brute_force(y, x, rights_back, ks)
    return {f"x_to_y/{k}": v for k, v in there.items()} | {
        f"y_to_x/{k}": v for k, v in back.items()
    }


def features(rows: int, width: int, values: st.SearchStrategy[int]) -> st.SearchStrategy[Tensor]:
    row = st.lists(values, min_size=width, max_size=width)
    return st.lists(row, min_size=rows, max_size=rows).map(
        lambda r: torch.tensor(r, dtype=torch.float64)
    )


@st.composite
def cases(draw: st.DrawFn) -> tuple[Tensor, Tensor, list[int], list[int], list[int]]:
    """Small integers as features, so that scores are exact in any dtype and ties are common."""
    m, n, d = draw(st.integers(1, 9)), draw(st.integers(1, 9)), draw(st.integers(1, 3))
    values = st.integers(-2, 2)
    x, y = draw(features(m, d, values)), draw(features(n, d, values))
    ids = st.integers(-1, 4)
    x_ids = draw(st.lists(ids, min_size=m, max_size=m))
    y_ids = draw(st.lists(ids, min_size=n, max_size=n))
    x_ids[0] = y_ids[0] = 0  # at least one query has an answer
    return x, y, x_ids, y_ids, draw(st.lists(st.integers(1, 12), min_size=1, max_size=3))


@settings(max_examples=200, deadline=None)
@given(case=cases(), dtype=st.sampled_from([torch.float64, torch.float32, torch.bfloat16]))
def test_equals_brute_force_with_ids_and_ties(case: tuple, dtype: torch.dtype) -> None:
    x, y, x_ids, y_ids, ks = case
    got = retrieval_metrics(
        x.to(dtype), y.to(dtype), x_ids=torch.tensor(x_ids), y_ids=torch.tensor(y_ids), ks=ks
    )
    assert got == pytest.approx(both_ways(x, y, x_ids, y_ids, ks), abs=1e-12)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_real_valued_features_of_any_float_dtype(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, y = torch.randn(150, 16).to(dtype), torch.randn(90, 16).to(dtype)
    x_ids, y_ids = torch.randint(0, 60, (150,)), torch.randint(0, 60, (90,))
    with torch.autocast("cpu", torch.bfloat16):  # which changes nothing
        got = retrieval_metrics(x, y, x_ids=x_ids, y_ids=y_ids)
    expected = both_ways(x, y, x_ids.tolist(), y_ids.tolist(), [1, 5, 10])
    # Products of half types are exact in fp32 and nearly so in their sums: no rank should move.
    assert got == pytest.approx(expected, abs=1e-6)
    ks = [1, 3, 10_000_000]
    own = both_ways(x[:90], y, list(range(90)), list(range(90)), ks)
    assert retrieval_metrics(x[:90], y, ks=ks) == pytest.approx(own, abs=1e-6)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("copies", "d"), [(1, 8), (25, 37)])
def test_a_collapsed_model_scores_chance(dtype: torch.dtype, copies: int, d: int) -> None:
    torch.manual_seed(1)
    x_ids, y_ids = torch.randint(0, 41, (1003,)), torch.arange(41).repeat(copies)
    one = torch.nn.functional.normalize(torch.randn(d), dim=0).to(dtype)
    x, y = (one.expand(len(ids), d).contiguous() for ids in (x_ids, y_ids))
    found, chance = figures_and_chance(x, y, answers_by_ids(x_ids, y_ids), ks=(1, 5, 10))
    assert found == pytest.approx(chance, abs=1e-12)
    assert retrieval_metrics(x, y, x_ids=x_ids, y_ids=y_ids) == found
    n = 41 * copies
    assert chance["x_to_y/recall@1"] == pytest.approx(1 / 41)
    missed = math.comb(n - copies, 5) / math.comb(n, 5)
    assert chance["x_to_y/recall@5"] == pytest.approx(1 - missed)


def test_blocks_do_not_change_the_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(4)
    x, y = torch.randn(70, 6), torch.randn(50, 6)
    x_ids, y_ids = torch.randint(0, 9, (70,)), torch.randint(-1, 9, (50,))
    x_ids[:5] = -1
    pairs = torch.arange(90) % 70, torch.arange(90) % 50
    right = answers_by_pairs(*pairs, 70, 50)
    whole = retrieval_metrics(x, y, x_ids=x_ids, y_ids=y_ids)
    whole_by_pairs = figures_and_chance(x, y, right, ks=(1, 5))
    monkeypatch.setattr(retrieval, "_CPU_SCORES", 16 * 70)
    assert retrieval_metrics(x, y, x_ids=x_ids, y_ids=y_ids) == whole
    assert figures_and_chance(x, y, right, ks=(1, 5)) == whole_by_pairs


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_any_pairs_may_be_right(data: st.DataObject) -> None:
    """One column may be right for rows that do not share their other columns."""
    m, n = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 6))
    values = st.integers(-1, 1)  # few of them, so that many scores are equal
    x, y = (data.draw(features(rows, 2, values)) for rows in (m, n))
    places = st.tuples(st.integers(0, m - 1), st.integers(0, n - 1))
    pairs = data.draw(st.lists(places, min_size=1, unique=True))
    rows, columns = torch.tensor(pairs).unbind(1)
    rights = [sorted(j for i, j in pairs if i == row) for row in range(m)]
    back = [sorted(i for i, j in pairs if j == column) for column in range(n)]
    right = answers_by_pairs(rows, columns, m, n)
    assert [right.there.of_row(i).tolist() for i in range(m)] == rights
    ks = [1, 2, 3, 7]
    found, chance = figures_and_chance(x, y, right, ks=ks)
    assert found == pytest.approx(by_rights(x, y, rights, back, ks), abs=1e-12)
    assert chance == pytest.approx(by_rights(0 * x, 0 * y, rights, back, ks), abs=1e-12)


IDS = torch.arange(4)
GOOD = torch.ones(4, 3)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"y": torch.ones(4, 5)}, ValueError, "y: expected width 3 .* got 5"),
        ({"x": torch.ones(0, 3)}, ValueError, "x has no rows"),
        ({"y": torch.ones(5, 3)}, ValueError, "y: expected 4 rows, .* got 5"),
        ({"y": GOOD * torch.nan}, ValueError, "y has 4 of 4 rows that are not finite"),
        ({"x_ids": IDS}, TypeError, "y_ids: expected .* got NoneType"),
        ({"x_ids": IDS, "y_ids": IDS.float()}, TypeError, "y_ids: expected .* got torch.float32"),
        ({"x_ids": IDS, "y_ids": IDS + 9}, ValueError, "no row has a right answer"),
        ({"ks": 5}, ValueError, "ks: expected integers from 1, got 5"),
        ({"ks": ()}, ValueError, r"ks: .* got \(\)"),
        ({"ks": (1.5,)}, ValueError, r"ks: .* got \(1.5,\)"),
    ],
)
def test_bad_input_is_named(arguments: dict, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        retrieval_metrics(**({"x": GOOD, "y": GOOD} | arguments))
