from collections.abc import Iterator

import pytest
import torch

from megabatch.models import create


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
