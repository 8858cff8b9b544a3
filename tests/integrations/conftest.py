"""Libraries leave traces in the process, which their other tests must not find."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from unittest import mock

import pytest


@pytest.fixture(autouse=True)
def _new_accelerator() -> Iterator[None]:
    """Accelerate keeps a process's first precision; older releases, in environment variables."""
    with mock.patch.dict(os.environ):
        yield
    if (state := sys.modules.get("accelerate.state")) is not None:
        state.AcceleratorState._reset_state(reset_partial_state=True)
