from typing import Any

import pytest
from torch import nn

from megabatch.models import create
from megabatch.planning import plan
from megabatch.planning.micro_batches import weighted
from megabatch.planning.towers import MicroBatch, Sample
from tests.process_state import one_thread

__all__ = ["one_thread"]

#: Micro-batches that `counted_once` has counted.
_counted: dict[Any, MicroBatch] = {}
LEAST, MOST = 64, 256  # pairs


@pytest.fixture(scope="session")
def glyph():
    """The smallest model that the library has."""
    return create("glyph-small")


@pytest.fixture
def counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Count two micro-batches of equal towers for all tests, which takes most of a plan.

    Others are on the line through them (`test_a_graph_grows_in_a_straight_line`), but for small
    ones. Equal towers have parameters of the same names, shapes and dtypes, of which the same are
    trained. Checkpointed blocks are counted each time.
    """
    measure = plan.measure

    def counted(module: nn.Module, sample: Sample, size: int, *where: Any) -> MicroBatch:
        if any("forward" in vars(part) for part in module.modules()):
            return measure(module, sample, size, *where)
        weights = module.named_parameters()
        towers = tuple((name, w.shape, w.dtype, w.requires_grad) for name, w in weights)

        def of(size: int) -> MicroBatch:
            inputs = tuple((one.shape, one.dtype) for one in sample.inputs.values())
            kinds = frozenset(map(type, module.modules()))
            key = type(module), kinds, towers, inputs, sample.texts, size, where
            if key not in _counted:
                _counted[key] = measure(module, sample, size, *where)
            return _counted[key]

        if size <= LEAST:
            return of(size)
        share = (size - LEAST) / (MOST - LEAST)
        return weighted([of(LEAST), of(MOST)], [1 - share, share])

    monkeypatch.setattr(plan, "measure", counted)
