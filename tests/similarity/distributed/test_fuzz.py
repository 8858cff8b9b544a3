"""Random cases of benchmarks/fuzz.py on two, three and four ranks and on grids of them."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path
from unittest import mock

from tests.similarity.distributed.processes import World, on_processes

SCRIPTS = Path(__file__).parents[3] / "benchmarks"


@on_processes(2, 3, 4)
def test_random_cases(world: World) -> None:
    with mock.patch.object(sys, "path", [str(SCRIPTS), *sys.path]):
        from fuzzing.cases import draw
        from fuzzing.groups import FINE, attempt
    drawn = (draw(6, index, ("float64",), max(3, world.size)) for index in range(200))
    cases = list(itertools.islice((c for c in drawn if c["ranks"] == world.size), 12))
    assert len(cases) == 12
    assert len({case["grid"] for case in cases}) > 2
    for case in cases:
        outcome, _ = attempt(case, world.rank, "cpu")
        assert outcome in FINE, (case, outcome)
