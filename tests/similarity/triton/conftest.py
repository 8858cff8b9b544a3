from __future__ import annotations

from collections.abc import Iterator

import pytest

from megabatch.similarity import backends
from tests.process_state import changed


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Calls take the kernels, wherever the features are, in blocks of 512."""
    monkeypatch.setattr(backends, "uses_kernels", lambda x: True)
    with changed("workspace", 1 << 20):
        yield
