from __future__ import annotations

from collections.abc import Iterator

import pytest

from megabatch import similarity
from megabatch.similarity import backends


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Calls take the kernels, wherever the features are, in blocks of 512."""
    monkeypatch.setattr(backends, "uses_kernels", lambda x: True)
    before = similarity.set_workspace(1 << 20)
    yield
    similarity.set_workspace(before)
