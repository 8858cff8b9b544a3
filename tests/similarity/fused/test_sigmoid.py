"""The sigmoid loss's kernels against float64: on a GPU, else in Triton's interpreter."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from megabatch import similarity
from megabatch.similarity import sweep
from tests.similarity.features import MAKERS
from tests.similarity.test_sigmoid import dense, leaves

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
HALVES = [torch.float16, torch.bfloat16] if GPU else [torch.float16]

pytest.importorskip("triton")
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@pytest.fixture(autouse=True)
def _fused(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(sweep, "fused_available", lambda x: True)
    before = similarity.set_workspace(1 << 20)  # blocks of 512
    yield
    similarity.set_workspace(before)


def careful(
    x: Tensor, y: Tensor, scale: float, bias: float, positive: Tensor, weight: Tensor
) -> tuple[Tensor, Tensor]:
    """Gradients of x and y by float32 logits and one rounding of dS to the features' dtype."""
    s = scale * (x.float() @ y.float().T) + bias
    ds = torch.where(positive, -torch.sigmoid(-s), torch.sigmoid(s)) * weight[:, None]
    # The rounding is relative: float16 gets a range of its own, as the kernels give it.
    size = 2.0**15 / weight.max() if x.dtype == torch.float16 else 1.0
    ds = (ds * size).to(x.dtype).double() / size
    return scale * ds @ y.double(), scale * ds.T @ x.double()


def check(x: Tensor, y: Tensor, scale: float, bias: float, ids: Any, weight: Any = None) -> None:
    mine = [t.to(DEVICE, copy=True).requires_grad_() for t in (x, y)]
    mine += [t.float().to(DEVICE).detach().requires_grad_() for t in leaves(scale, bias)]
    theirs = leaves(x, y, scale, bias)
    there = ids if isinstance(ids, str) else tuple(t.to(DEVICE) for t in ids)
    ours = similarity.softplus_sum(
        *mine, ids=there, weight=weight if weight is None else weight.to(DEVICE)
    )
    truth = dense(*theirs, ids, weight)  # type: ignore[arg-type]
    ours.backward()
    truth.backward()
    # Logits of 10 are rounded by 5e-7 in float32, alike where features are alike; twice in base 2.
    assert abs(ours.item() - truth.item()) <= 3e-6 * truth.item()
    if isinstance(ids, str):
        positive = torch.eye(len(x), len(y), dtype=torch.bool)
    else:
        positive = (ids[0][:, None] == ids[1]) & (ids[0] >= 0)[:, None]
    weights = torch.ones(len(x)) if weight is None else weight
    best = careful(x, y, scale, bias, positive, weights)
    for a, b, c in zip(mine[:2], theirs[:2], best, strict=True):
        error = (a.grad.cpu().double() - b.grad).norm(dim=1)
        allowed = (c - b.grad).norm(dim=1) + torch.finfo(x.dtype).eps * b.grad.norm(dim=1)
        # Where errors cancel by chance, or all of dS is exact, the typical one is the measure.
        allowed = torch.maximum(allowed, allowed.mean())
        assert (error <= 2 * allowed + 1e-12).all()
    # Sums over all pairs that may cancel: of terms rounded to float32, and dS to half.
    s = scale * (x.double() @ y.double().T)
    ds = torch.where(positive, -torch.sigmoid(-s - bias), torch.sigmoid(s + bias))
    ds *= weights.double()[:, None]
    eps = torch.finfo(x.dtype).eps
    assert abs(mine[2].grad.item() - theirs[2].grad.item()) <= eps * (ds * s / scale).abs().sum()
    assert abs(mine[3].grad.item() - theirs[3].grad.item()) <= 2e-6 * ds.abs().sum()


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("bias", [-10.0, 0.0, 5.0])
@pytest.mark.parametrize("scale", [0.01, 10.0, 100.0])
@pytest.mark.parametrize("maker", MAKERS)
def test_every_kind_of_features(maker: str, scale: float, bias: float, dtype: torch.dtype) -> None:
    x, y = MAKERS[maker](150, 150, 40)
    check(x.to(dtype), y.to(dtype), scale, bias, "paired")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("maker", MAKERS)
def test_many_blocks(maker: str, dtype: torch.dtype) -> None:
    x, y = MAKERS[maker](1700, 1700, 200)
    check(x.to(dtype), y.to(dtype), 10.0, -10.0, "paired")


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(
    ("m", "n", "d"), [(1, 1, 8), (1, 300, 3), (129, 1, 64), (140, 260, 72), (600, 130, 17)]
)
def test_any_sizes_ids_and_weights(m: int, n: int, d: int, dtype: torch.dtype) -> None:
    x, y = (t.to(dtype) for t in MAKERS["random"](m, n, d))
    ids = torch.randint(-1, 9, (m,)), torch.randint(-1, 9, (n,))
    check(x, y, 10.0, -3.0, ids)
    check(x, y, 10.0, -3.0, ids, torch.rand(m) + 0.1)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_bad_numbers_are_seen(value: float) -> None:
    x, y = (t.half().to(DEVICE) for t in MAKERS["random"](200, 200, 16))
    x[3, 5] = value
    assert not similarity.softplus_sum(x, y, 10.0, -10.0).isfinite()


@pytest.mark.parametrize("needed", [(), (0,), (1,), (2,), (3,), (1, 2)])
def test_gradients_of_some_inputs_alone(needed: tuple[int, ...]) -> None:
    x, y = (t.half().to(DEVICE) for t in MAKERS["random"](140, 150, 16))
    ids = torch.arange(140, device=DEVICE), torch.arange(150, device=DEVICE)
    everything = [x, y, torch.tensor(8.0, device=DEVICE), torch.tensor(-4.0, device=DEVICE)]
    results = []
    for wanted in ((0, 1, 2, 3), needed):
        inputs = [t.clone().requires_grad_(k in wanted) for k, t in enumerate(everything)]
        total = similarity.softplus_sum(*inputs, ids=ids)
        if wanted:
            total.backward()
        results.append([total.detach(), *(t.grad for t in inputs)])
    whole, part = results
    assert torch.equal(whole[0], part[0])
    for k in range(4):
        if k in needed:
            torch.testing.assert_close(part[k + 1], whole[k + 1], rtol=1e-3, atol=1e-5)
        else:
            assert part[k + 1] is None
