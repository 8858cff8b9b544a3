"""Clear state that libraries leave in the process, so that tests do not affect each other."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest

from tests.models.tiny_bert import save_tiny_bert
from tests.similarity.conftest import small_blocks  # noqa: F401  # a fixture


@pytest.fixture(autouse=True)
def _new_accelerator() -> Iterator[None]:
    """Accelerate stores the first precision of a process; older releases, in the environment."""
    with mock.patch.dict(os.environ):
        yield
    if (state := sys.modules.get("accelerate.state")) is not None:
        state.AcceleratorState._reset_state(reset_partial_state=True)


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a sentence encoder's weights and tokenizer in `bert`."""
    folder = tmp_path_factory.mktemp("sentence-transformers")
    save_tiny_bert(folder / "bert")
    return folder
