from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from megabatch.models import create
from megabatch.planning import plan

#: Micro-batches that `counted_once` has counted.
_counted: dict[Any, Any] = {}


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def glyph():
    """The smallest model that the library has."""
    return create("glyph-small")


@pytest.fixture
def counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Count each micro-batch of equal towers once for all tests, which takes most of a plan.

    Equal towers have parameters of the same names, shapes and dtypes, of which the same are
    trained. Checkpointed blocks are counted each time.
    """
    measure = plan.measure

    def counted(module: nn.Module, *sizes: Any) -> Any:
        if any("forward" in vars(part) for part in module.modules()):
            return measure(module, *sizes)
        weights = module.named_parameters()
        towers = tuple((name, w.shape, w.dtype, w.requires_grad) for name, w in weights)
        key = type(module), towers, sizes
        if key not in _counted:
            _counted[key] = measure(module, *sizes)
        return _counted[key]

    monkeypatch.setattr(plan, "measure", counted)
