import pytest


@pytest.fixture(autouse=True)
def _one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the processes that a test starts: threads that wait for each other's core are slow."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
