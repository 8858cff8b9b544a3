"""Fixtures that several tests of models use."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture
def no_graphs() -> Iterator[None]:
    """A test starts without compiled graphs, as torch limits their number, and leaves none."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
