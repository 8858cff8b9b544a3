"""Random cases of benchmarks/fuzz.py on several ranks and on grids of them, in float64.

Each loss and function with any of its options, on equal, unequal and empty shards, gathered at once
or in rounds, is compared with the dense expression of all rows; so are its gradients.
"""

from __future__ import annotations

import itertools

import torch

from fuzzing.cases import draw
from fuzzing.groups import FINE, attempt
from tests.similarity.distributed.processes import World, on_devices


@on_devices(2, 3, 4, 6)
def test_random_cases(world: World) -> None:
    torch.set_default_device(None)  # `attempt` takes the device
    drawn = (draw(6, index, ("float64",), max(3, world.size)) for index in range(2000))
    number = 60 // world.size
    cases = list(itertools.islice((c for c in drawn if c["ranks"] == world.size), number))
    assert len(cases) == number
    assert len({case["grid"] for case in cases}) > 2
    for case in cases:
        outcome, _ = attempt(case, world.rank, world.device)
        assert outcome in FINE, (case, outcome)
