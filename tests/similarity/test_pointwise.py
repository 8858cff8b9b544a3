from __future__ import annotations

import pytest
import torch

from megabatch import similarity
from megabatch.similarity import pointwise
from tests.similarity import dense


@pytest.mark.parametrize("chunk", [8, 1 << 20])
def test_paired_is_exact(monkeypatch: pytest.MonkeyPatch, chunk: int) -> None:
    monkeypatch.setattr(pointwise, "CHUNK", chunk)
    inputs = [torch.randn(21, 6, dtype=torch.float64) for _ in range(2)]
    inputs.append(torch.tensor(3.0, dtype=torch.float64))
    mine, theirs = ([t.clone().requires_grad_() for t in inputs] for _ in range(2))
    weight = torch.randn(21, dtype=torch.float64)
    ours, truth = similarity.paired(*mine), dense.paired(*theirs)
    torch.testing.assert_close(ours, truth, rtol=0, atol=1e-13)
    (ours * weight).sum().backward()
    (truth * weight).sum().backward()
    for a, b in zip(mine, theirs, strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=0, atol=1e-13)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_products_and_sums_are_float32(dtype: torch.dtype) -> None:
    x, y = torch.randn(9, 300).to(dtype), torch.randn(9, 300).to(dtype)
    ours = similarity.paired(x, y, 10.0)
    assert ours.dtype == torch.float32
    torch.testing.assert_close(ours, dense.paired(x.float(), y.float(), 10.0), rtol=1e-5, atol=1e-4)
