from collections.abc import Iterator

import pytest
import torch

from tests.process_state import changed


@pytest.fixture(autouse=True)
def _double_precision() -> Iterator[None]:
    with changed("default dtype", torch.float64):
        yield
