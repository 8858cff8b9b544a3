"""What the tests of models share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture
def no_graphs() -> Iterator[None]:
    """None from before, which count against torch's limit; and none afterwards."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
