from collections.abc import Iterator

import pytest
import torch

from tests.similarity.distributed.processes import start_server


@pytest.fixture(autouse=True)
def _double_precision() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.fixture(scope="session", autouse=True)
def _server(request: pytest.FixtureRequest) -> None:
    """Let the server of processes import its modules, for ten seconds, beside the first tests."""
    if any("process_groups" in item.fixturenames for item in request.session.items):
        start_server()
