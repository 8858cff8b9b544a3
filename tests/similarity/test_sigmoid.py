from __future__ import annotations

from typing import Any

import pytest
import torch

from megabatch import similarity
from megabatch.similarity import settings as call_settings
from tests.similarity import dense
from tests.similarity.exact import compare, leaves
from tests.similarity.features import MAKERS


def check(values: tuple[Any, ...], **options: Any) -> None:
    mine, theirs = leaves(*values), leaves(*values)
    ours, truth = similarity.softplus_sum(*mine, **options), dense.softplus_sum(*theirs, **options)
    compare([3 * ours], [3 * truth], mine, theirs)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize(("scale", "bias"), [(0.01, -10.0), (10.0, 0.0), (200.0, 5.0)])
@pytest.mark.parametrize("maker", MAKERS)
def test_is_exact_over_many_blocks(maker: str, scale: float, bias: float) -> None:
    check((*MAKERS[maker](97, 97, 20), scale, bias))


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize(("scale", "bias"), [(0.01, 0.0), (10.0, -3.0), (200.0, 30.0)])
@pytest.mark.parametrize("maker", ["random", "clustered", "outliers"])
def test_a_teachers_labels(maker: str, scale: float, bias: float) -> None:
    x, y = MAKERS[maker](97, 61, 20)
    u, v = MAKERS["clustered"](97, 61, 7)
    for weight in (None, torch.rand(97, dtype=torch.float64)):
        check((x, y, scale, bias), weight=weight, teacher=(u, v, 20.0, -9.0))


def test_a_student_near_its_teacher_keeps_its_gradient() -> None:
    """Both probabilities are near 1: their difference in float32 would be rounding error alone."""
    b = 8
    x, y = torch.zeros(b, 2, requires_grad=True), torch.ones(b, 2)
    teacher = torch.zeros(b, 2), torch.ones(b, 2), 1.0, 19.0
    similarity.softplus_sum(x, y, 1.0, 18.0, teacher=teacher).backward()
    exact = torch.tensor(-19.0).double().exp() - torch.tensor(-18.0).double().exp()
    torch.testing.assert_close(x.grad.double(), exact.expand(b, 2) * b, rtol=1e-6, atol=0)


def test_small_gradients_in_float16_without_kernels(half_products: None) -> None:
    """Small entries of dS must be scaled into the normal range."""
    x, y = (t.half() for t in MAKERS["random"](400, 16, 8))
    weight = torch.linspace(0.5, 4, 400)
    gradients = []
    for dtype in (torch.float16, torch.float64):
        wide = torch.promote_types(dtype, torch.float32)
        features = [x.to(dtype), y.to(dtype), torch.ones((), dtype=wide)]
        features = [f.detach().requires_grad_() for f in features]
        teacher = x.to(wide), y.to(wide), 1.0, -14.0
        total = similarity.softplus_sum(*features, -13.0, weight=weight, teacher=teacher)
        (total * 1e4).backward()
        gradients.append([f.grad.double() for f in features])
    for mine, exact in zip(*gradients, strict=True):
        assert (mine - exact).norm() < 1e-3 * exact.norm()


def test_no_gradients_are_stored_if_none_is_needed() -> None:
    x = torch.randn(40, 4, requires_grad=True)
    with torch.no_grad():
        arguments = (x, x, *torch.ones(2), *[None] * 7, "paired", *[False] * 4, "")
        results = torch.ops.megabatch.softplus_sum(*arguments, call_settings.of_call(x))
        assert [r.numel() for r in results] == [1, 0, 0, 0, 0, 1, 1]
        assert not similarity.softplus_sum(x, x, 1.0, 0.0).requires_grad


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_large_sums_do_not_overflow_half_precision(dtype: torch.dtype) -> None:
    x = torch.ones(1024, 4, dtype=dtype, requires_grad=True)
    scale = torch.tensor(100.0, requires_grad=True)
    total = similarity.softplus_sum(x, x.detach(), scale, 0.0)
    assert total.dtype == torch.float32
    (total / 1024**2).backward()
    # 1,023 of a row's 1,024 pairs are negatives of probability 1, with gradient scale * y each.
    torch.testing.assert_close(
        x.grad.float(), torch.full((1024, 4), 100 * 1023 / 1024**2), rtol=0.01, atol=0
    )
    torch.testing.assert_close(scale.grad.item(), 4 * 1023 / 1024)


def test_small_losses_are_not_truncated_to_zero() -> None:
    x = torch.eye(4, dtype=torch.float64)
    total = similarity.softplus_sum(x, x, 80.0, -40.0)
    torch.testing.assert_close(total.item(), 16 * torch.tensor(-40.0).double().exp().item())
