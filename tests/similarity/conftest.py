from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from megabatch.similarity import backends, eager, tiles
from tests.process_state import changed


@pytest.fixture
def small_blocks() -> Iterator[None]:
    """Set the smallest workspace, so that a hundred rows take many blocks."""
    with changed("workspace", 64 << 10):
        yield


@pytest.fixture(params=["torch", "kernels"])
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Calls take torch operations or the kernels, in small blocks, wherever the features are."""
    if request.param == "kernels":
        pytest.importorskip("triton")
    monkeypatch.setattr(backends, "uses_kernels", lambda x: request.param == "kernels")
    with changed("workspace", 64 << 10 if request.param == "torch" else 1 << 20):
        yield request.param


@pytest.fixture
def half_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, products take dS in float16, where the smallest numbers are subnormal."""

    def rounded(total: Tensor, left: Tensor, right: Tensor, overwrite: bool = False) -> None:
        left = left if right.dtype == torch.float64 else left.half()
        total.addmm_(left.to(total.dtype), right.to(total.dtype), beta=0 if overwrite else 1)

    monkeypatch.setattr(eager, "rounds_left", lambda features: True)
    monkeypatch.setattr(tiles, "add_product", rounded)
