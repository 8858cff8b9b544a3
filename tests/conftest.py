"""Settings for all tests."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
import torch

if TYPE_CHECKING:
    from tests.similarity.distributed.processes import Groups

if not torch.cuda.is_available():  # Triton's kernels then run on the CPU; read when it is imported
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def process_groups(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Groups]:
    """Groups of processes for the checks of all modules."""
    from tests.similarity.distributed.processes import Groups

    groups = Groups(tmp_path_factory.mktemp("process-groups"))
    yield groups
    groups.end()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)
