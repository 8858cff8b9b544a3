"""Clear state that libraries leave in the process, so that tests do not affect each other."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from unittest import mock

import pytest


@pytest.fixture(autouse=True)
def _new_accelerator() -> Iterator[None]:
    """Accelerate stores the first precision of a process; older releases, in the environment."""
    with mock.patch.dict(os.environ):
        yield
    if (state := sys.modules.get("accelerate.state")) is not None:
        state.AcceleratorState._reset_state(reset_partial_state=True)
