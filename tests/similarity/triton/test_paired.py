"""The kernels of CLIP's losses against float64."""

from __future__ import annotations

import pytest
import torch

from tests.similarity.triton import DEVICE, MARKS

pytest.importorskip("triton")
from megabatch.similarity.triton import paired

pytestmark = MARKS


def stacks(margins: torch.Tensor, wide: int) -> torch.Tensor:
    """(4, m), a view of a wider tensor: negatives exceed the positives' logits by the margins."""
    m = len(margins)
    made = torch.full((4, m + wide), torch.nan, device=DEVICE)
    made[1], made[3] = 7.0, 1.0
    made[2, :m] = 3.0
    made[0, :m] = margins + 3
    return made[:, :m]


@pytest.mark.parametrize("m", [1, 300])
@pytest.mark.parametrize("stride", [0, 1, 2])
def test_losses_and_gradients(m: int, stride: int) -> None:
    margins = torch.linspace(-40, 60, 2 * m, dtype=torch.float64).round(decimals=3)
    margins[: m // 3] = torch.linspace(-2, 2, m // 3, dtype=torch.float64)
    sides = [
        stacks(part.to(DEVICE), wide) for part, wide in zip(margins.split(m), (0, 5), strict=True)
    ]
    upstream = torch.rand(2 * m, device=DEVICE)[:: max(stride, 1)][:m]
    if stride == 0:
        upstream = upstream[:1].expand(m)
    for side in sides:
        side.requires_grad_()
    out = paired.paired_losses(*sides, False)
    exact = [side.detach().double() for side in sides]
    z = [side[0] - side[2] for side in exact]
    truth = sum(part.clamp(min=0) + torch.log1p((-part.abs()).exp()) for part in z) / 2
    # The error is relative to the loss, whatever its size.
    torch.testing.assert_close(out.detach().double(), truth, rtol=4e-6, atol=0)
    found = torch.autograd.grad(out, sides, upstream)
    for gradient, part in zip(found, z, strict=True):
        expected = upstream.double() * part.sigmoid() / 2
        torch.testing.assert_close(gradient[0].double(), expected, rtol=4e-6, atol=0)
        assert torch.equal(gradient[2], -gradient[0])
        assert (gradient[1::2] == 0).all()
    # Their mean is the same in one operator.
    mean = paired.paired_losses(*sides, True)
    assert torch.equal(mean, out.mean())
    gradients = torch.autograd.grad(mean, sides, upstream[0])
    for found, one in zip(gradients, sides, strict=True):
        expected = upstream[0].double() / m * (one[0] - one[2]).double().sigmoid() / 2
        torch.testing.assert_close(found[0].double(), expected, rtol=4e-6, atol=0)
        assert torch.equal(found[2], -found[0])
        assert (found[1::2] == 0).all()


def test_non_finite_margins() -> None:
    infinity = torch.inf
    side = stacks(torch.tensor([-infinity, infinity, torch.nan], device=DEVICE), 0)
    other = stacks(torch.full((3,), -infinity, device=DEVICE), 0)
    out = paired.paired_losses(side, other, False)
    assert out[:2].tolist() == [0, infinity]
    assert out[2].isnan()
    drows, dcols = paired.paired_gradients(side, other, torch.ones(3, device=DEVICE))
    assert drows[0, :2].tolist() == [0, 0.5]
    assert drows[0, 2].isnan()
    assert (dcols[0] == 0).all()


def test_registered_with_torch() -> None:
    sides = [(5 * torch.randn(4, 3, device=DEVICE)).requires_grad_() for _ in range(2)]
    for mean in (False, True):
        torch.library.opcheck(paired.paired_losses.custom, (*sides, mean))
        upstream = torch.rand(() if mean else (3,), device=DEVICE)
        given = (*(side.detach() for side in sides), upstream)
        torch.library.opcheck(paired.paired_gradients.custom, given)
