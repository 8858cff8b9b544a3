"""Micro-batches of equal rows or equal tokens."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megabatch.gradient_cache.by_length import (
    MicroBatch,
    equal_rows,
    equal_token_runs,
    equal_tokens,
    fewest_tokens,
    growth,
)


def runs_of(columns):
    return [(width, len([*group])) for width, group in itertools.groupby(columns)]


def most_tokens(columns, parts):
    return max((part.stop - part.start) * columns[part.start] for part in parts)


@st.composite
def sequences(draw):
    """Columns of each row, the most first, and a number of micro-batches."""
    columns = draw(st.lists(st.integers(1, 12), min_size=1, max_size=9))
    return sorted(columns, reverse=True), draw(st.integers(1, len(columns)))


@given(sequences())
def test_the_largest_micro_batch_is_as_small_as_possible(drawn):
    columns, count = drawn
    parts = equal_tokens(runs_of(columns), count)
    assert len(parts) == count
    assert [row for part in parts for row in range(part.start, part.stop)] == [*range(len(columns))]
    assert all(part.start < part.stop for part in parts)
    ways = (
        [slice(a, b) for a, b in itertools.pairwise((0, *cuts, len(columns)))]
        for cuts in itertools.combinations(range(1, len(columns)), count - 1)
    )
    fewest = min(most_tokens(columns, way) for way in ways)
    assert most_tokens(columns, parts) == fewest == fewest_tokens(runs_of(columns), count)


@given(sequences(), st.integers(0, 5))
def test_a_longer_row_never_makes_micro_batches_smaller(drawn, more):
    columns, count = drawn
    longest = columns[0] + more
    expected = fewest_tokens(runs_of([longest, *columns[1:]]), count)
    found = growth(runs_of(columns), longest, count)
    assert found == expected / fewest_tokens(runs_of(columns), count) >= 1


def test_many_rows():
    runs = [(80, 1000), (24, 10**9), (8, 10**9)]
    parts = equal_tokens(runs, 1000)
    ends = [part.stop for part in parts]
    assert [part.start for part in parts] == [0, *ends[:-1]]
    assert ends[-1] == sum(n for _, n in runs)
    assert fewest_tokens(runs, 1000) == pytest.approx(32e9 / 1000, rel=0.01)
    found = equal_token_runs(runs, 10**9)  # in no time, as few differ
    assert len(found) < 10
    assert sum(number for *_, number in found) == 10**9
    assert sum(rows * number for rows, _, number in found) == ends[-1]


def test_one_length_gives_equal_rows():
    assert equal_tokens([(16, 10)], 3) == equal_rows(10, 4)
    assert [part.stop for part in equal_rows(10, 4)] == [4, 8, 10]


def test_no_rows():
    assert equal_rows(0, 3) == equal_tokens([], 0) == []
    assert growth([], 77, 0) == 1
    assert MicroBatch(slice(7, 7)).idle
    assert not MicroBatch(slice(6, 7)).idle
    assert MicroBatch(slice(0, 2), {"texts": slice(0, 1)}).of("texts") == slice(0, 1)
    assert MicroBatch(slice(0, 2), {"texts": slice(0, 1)}).of("images") == slice(0, 2)
