from __future__ import annotations

import math

import pytest
import torch

from megabatch.losses.terms import debiased, scale_gradient


def test_debiased() -> None:
    """Numbers on either side of the floor, and logits whose exponentials overflow."""
    positive, count = torch.tensor([0.0, 3.0, 1000.0]), torch.tensor(4.0)
    negative = torch.tensor([2.0, 2.0, 1010.0])
    found = debiased(positive, negative, torch.tensor(1.0), count, 0.1)
    first = math.log((math.exp(2) - 0.4) / 0.9)
    third = 1010 + math.log((1 - 0.4 * math.exp(-10)) / 0.9)
    torch.testing.assert_close(found, torch.tensor([first, math.log(4) - 1, third]))


def test_debiased_of_nothing_and_of_nan() -> None:
    nothing = debiased(
        torch.zeros(1), torch.tensor([-torch.inf]), torch.tensor(1.0), torch.tensor(0.0), 0.1
    )
    assert nothing == -torch.inf
    for bad in ([torch.nan, 0.0], [0.0, torch.nan]):
        parts = torch.tensor(bad).split(1)
        assert debiased(*parts, torch.tensor(1.0), torch.tensor(4.0), 0.1).isnan()


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
