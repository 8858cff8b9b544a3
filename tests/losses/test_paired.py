from __future__ import annotations

import pytest
import torch

from megabatch.losses import paired
from megabatch.losses.paired import paired_losses


def stacks(m: int, dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    return [(5 * torch.randn(4, m, dtype=dtype)).requires_grad_() for _ in range(2)]


def test_the_gradient_is_that_of_the_expression() -> None:
    rows, columns = stacks(9)
    weight = torch.rand(9, dtype=torch.float64)
    for upstream in (weight, weight[:1].expand(9)):
        ours = torch.autograd.grad(paired_losses(rows, columns), (rows, columns), upstream)
        truth = torch.autograd.grad(paired._expression(rows, columns), (rows, columns), upstream)
        for a, b in zip(ours, truth, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-14, atol=0)
    assert torch.autograd.gradcheck(paired_losses, (rows, columns))


def test_one_side_alone_needs_a_gradient() -> None:
    rows, columns = stacks(4)
    (alone,) = torch.autograd.grad(paired_losses(rows, columns.detach()).sum(), rows)
    both = torch.autograd.grad(paired_losses(rows, columns).sum(), (rows, columns))
    assert torch.equal(alone, both[0])


@pytest.mark.parametrize("m", [0, 3])
def test_registered_with_torch(m: int) -> None:
    rows, columns = stacks(m)
    torch.library.opcheck(paired._paired_losses.custom, (rows, columns))
    args = (rows.detach(), columns.detach(), torch.rand(m, dtype=torch.float64))
    torch.library.opcheck(paired._paired_losses_backward.custom, args)


def test_compiled_equals_the_expression() -> None:
    rows, columns = stacks(5)
    made = torch.compile(paired_losses, backend="aot_eager", fullgraph=True)(rows, columns)
    torch.testing.assert_close(made, paired_losses(rows, columns), rtol=1e-14, atol=0)
