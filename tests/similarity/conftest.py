from collections.abc import Iterator

import pytest

from megabatch import similarity
from megabatch.similarity import backends


@pytest.fixture
def small_blocks() -> Iterator[None]:
    """Set the smallest workspace, so that a hundred rows take many blocks."""
    before = similarity.set_workspace(64 << 10)
    yield
    similarity.set_workspace(before)


@pytest.fixture(params=["torch", "kernels"])
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Calls take torch operations or the kernels, in small blocks, wherever the features are."""
    if request.param == "kernels":
        pytest.importorskip("triton")
    monkeypatch.setattr(backends, "uses_kernels", lambda x: request.param == "kernels")
    before = similarity.set_workspace(64 << 10 if request.param == "torch" else 1 << 20)
    yield request.param
    similarity.set_workspace(before)
