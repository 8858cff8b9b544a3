from collections.abc import Iterator

import pytest

from megabatch import similarity


@pytest.fixture
def small_blocks() -> Iterator[None]:
    """Set the smallest workspace, so that a hundred rows take many blocks."""
    before = similarity.set_workspace(64 << 10)
    yield
    similarity.set_workspace(before)
