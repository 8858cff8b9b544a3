from __future__ import annotations

import pytest
import torch

from megabatch.losses.terms import scale_gradient


@pytest.mark.parametrize("factor", [3.0, torch.tensor(3.0), torch.tensor([3.0, 0.0])])
def test_scale_gradient(factor: float | torch.Tensor) -> None:
    values = torch.tensor([-torch.inf, 2.0], requires_grad=True)
    scaled = scale_gradient(values, factor)
    assert torch.equal(scaled, values)
    scaled.backward(torch.tensor([1.0, 10.0]))
    assert torch.equal(values.grad, torch.tensor([1.0, 10.0]) * factor)


def test_scale_gradient_gives_the_factor_none() -> None:
    value, factor = (torch.tensor(2.0, requires_grad=True) for _ in range(2))
    scale_gradient(value, factor).backward()
    assert value.grad == 2
    assert factor.grad is None
