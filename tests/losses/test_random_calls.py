"""Random calls with any of their options, against dense expressions in float64.

Calls and expressions are those of benchmarks/fuzz.py, in which shapes, layouts, scales, ids,
weights and frozen inputs differ, too; tests/similarity/distributed/test_fuzz.py has several ranks.
"""

from __future__ import annotations

from itertools import count, islice

import pytest

from fuzzing.cases import LOSSES, RANKING, SUMS, draw
from fuzzing.groups import FINE, attempt


@pytest.mark.parametrize("name", [*LOSSES, *SUMS, *RANKING])
def test_equals_the_dense_expression(name: str) -> None:
    drawn = (draw(7, index, ("float64",), 1) for index in count())
    cases = (case for case in drawn if case["call"] == name)
    for case in islice(cases, 150 if name == "infonce" else 40):
        outcome, _ = attempt(case, 0, "cpu")
        assert outcome in FINE, (case, outcome)
