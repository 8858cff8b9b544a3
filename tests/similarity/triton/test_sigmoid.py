"""The sigmoid loss's kernels against float64."""

from __future__ import annotations

from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import megabatch as mb
from megabatch import similarity
from megabatch.similarity import settings
from tests.process_state import changed
from tests.similarity.dense import equal_ids
from tests.similarity.features import MAKERS
from tests.similarity.triton import DEVICE, GPU, HALVES, MARKS, SECOND

pytest.importorskip("triton")
from megabatch.similarity.triton import configs

#: TF32 cuts both factors to 11 bits: a logit of 10 may be off by 10 * 2^-9; most are smaller.
TF32 = 6e-3
EPS = torch.finfo(torch.float32).eps
#: Error of a logit in float32's ulps: a tensor core adds less exactly than float32.
ULPS = 8 if GPU else 4

pytestmark = MARKS


class Exact(NamedTuple):
    """The loss and its gradients in float64, and bounds of errors."""

    loss: Tensor
    gradients: list[Tensor]  #: of x, y, scale, bias
    noise: list[Tensor]  #: errors of the loss and of each row of these, from float32 logits
    rounded: list[Tensor]  #: errors of the rows of x and y if dS is rounded once


def exact(
    x: Tensor, y: Tensor, scale: float, bias: float, ids: Any, weight: Tensor | None
) -> Exact:
    half = x.dtype
    x, y = x.double(), y.double()
    products = x @ y.T
    z = scale * products + bias
    positive = equal_ids(z, ids)
    weights = torch.ones_like(x[:, 0]) if weight is None else weight.double()
    u = torch.where(positive, -z, z)
    loss = (weights[:, None] * (u.clamp(min=0) + torch.log1p((-u.abs()).exp()))).sum()
    ds = torch.where(positive, -u.sigmoid(), u.sigmoid()) * weights[:, None]

    def gradients(ds: Tensor) -> list[Tensor]:
        return [scale * ds @ y, scale * ds.T @ x, (ds * products).sum(), ds.sum()]

    # A logit is off by some ulps of the terms that it sums, and dS by the same relative error.
    off = ds.abs() * ULPS * EPS * (abs(scale) * x.norm(dim=1)[:, None] * y.norm(dim=1) + abs(bias))
    off += ULPS * EPS * ds.abs()
    noise = [off.sum() + 2**-21 * loss, abs(scale) * off @ y.norm(dim=1)]
    noise += [abs(scale) * off.T @ x.norm(dim=1), (off * products.abs()).sum(), off.sum()]
    # Scale dS into float16's range, as the kernels do.
    size = 2.0**15 / weights.abs().max().clamp(min=1e-300) if half == torch.float16 else 1.0
    once = gradients((ds * size).to(half).double() / size)
    true = gradients(ds)
    rounded = [(a - b).norm(dim=1) for a, b in zip(once[:2], true[:2], strict=True)]
    noise[3] += torch.finfo(half).eps * (ds * products).abs().sum()
    return Exact(loss, true, noise, rounded)


def run(
    x: Tensor, y: Tensor, scale: float, bias: float, ids: Any, weight: Any, upstream: float = 1.0
) -> tuple[Tensor, list[Tensor]]:
    inputs = [t.detach().requires_grad_() for t in (x, y)]
    inputs += [torch.tensor(v, device=x.device, requires_grad=True) for v in (scale, bias)]
    total = similarity.softplus_sum(*inputs, ids=ids, weight=weight)
    (upstream * total).backward()
    return total.detach(), [t.grad for t in inputs]


def check(
    x: Tensor,
    y: Tensor,
    scale: float,
    bias: float,
    ids: Any = "paired",
    weight: Any = None,
    upstream: float = 1.0,
) -> None:
    x, y = x.to(DEVICE), y.to(DEVICE)
    if not isinstance(ids, str):
        ids = tuple(t.to(DEVICE) for t in ids)
    weight = None if weight is None else weight.to(DEVICE)
    truth = exact(x, y, scale, bias, ids, weight)
    loss, gradients = run(x, y, scale, bias, ids, weight, upstream)
    assert abs(loss - truth.loss) <= truth.noise[0]
    half = torch.finfo(x.dtype).eps
    for i in range(2):
        mine, true = gradients[i].double() / upstream, truth.gradients[i]
        theirs, size = truth.rounded[i], true.norm(dim=1)
        # The median row too, as a row of dS may be exact by chance. Gradients are rounded twice:
        # when they are stored, and when they are multiplied by `upstream`.
        limit = 1.5 * theirs.maximum(theirs.median()) + half * size + 2 * truth.noise[1 + i]
        limit += torch.finfo(x.dtype).tiny / upstream
        assert ((mine - true).norm(dim=1) <= limit).all(), i
    for i in (2, 3):
        assert abs(gradients[i] / upstream - truth.gradients[i]) <= truth.noise[1 + i] + 1e-30


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("size", [140, pytest.param(2501, marks=pytest.mark.gpu)])
@pytest.mark.parametrize(
    ("maker", "scale", "bias"),
    [(maker, 200.0, -30.0) for maker in MAKERS]
    + [(maker, 10.0, -10.0) for maker in SECOND]
    + [("random", 0.01, -10.0), ("clustered", 10.0, 0.0), ("learnt", 100.0, 5.0)]
    + [("outliers", 100.0, 30.0)],
)
def test_every_kind_of_features(
    maker: str, scale: float, bias: float, size: int, dtype: torch.dtype
) -> None:
    x, y = MAKERS[maker](size, size, 24 if size == 140 else 200)
    # Gradients reach 1.1e5 (2,501 outliers at scale 200); float16 ends at 65,504.
    check(x.to(dtype), y.to(dtype), scale, bias, upstream=0.5)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("kind", ["paired", "ids", "weighted ids"])
@pytest.mark.parametrize(("m", "d"), [(8192, 768), (5003, 700), (4096, 512)])
def test_large(m: int, d: int, kind: str, dtype: torch.dtype) -> None:
    """Many blocks of the default workspace."""
    similarity.set_workspace(None)
    x, y = (t.to(dtype) for t in MAKERS["learnt"](m, m, d))
    ids: Any = "paired" if kind == "paired" else (torch.randint(-1, m, (m,)),) * 2
    weight = torch.rand(m) if kind == "weighted ids" else None
    if dtype != torch.float32:
        check(x, y, 10.0, -10.0, ids, weight, 1 / m)
        return
    x, y = x.cuda(), y.cuda()
    ids = ids if isinstance(ids, str) else tuple(t.cuda() for t in ids)
    weight = weight if weight is None else weight.cuda()
    truth = exact(x, y, 10.0, -10.0, ids, weight)
    with changed("precision", "high"):
        loss, gradients = run(x, y, 10.0, -10.0, ids, weight)
    assert abs(loss - truth.loss) <= TF32 * truth.loss
    for mine, true in zip(gradients, truth.gradients, strict=True):
        assert (mine - true).norm() <= TF32 * true.norm()


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize(
    ("m", "n", "d"), [(1, 1, 8), (1, 300, 3), (129, 1, 64), (140, 260, 72), (530, 130, 17)]
)
def test_any_sizes_ids_and_weights(
    m: int, n: int, d: int, weighted: bool, dtype: torch.dtype
) -> None:
    x, y = (t.to(dtype) for t in MAKERS["random"](m, n, d))
    ids = torch.randint(-1, 9, (m,)), torch.randint(-1, 9, (n,))
    check(x, y, 10.0, -3.0, ids, torch.rand(m) * 50 if weighted else None, 0.3)


def test_weights_may_be_zero_and_negative() -> None:
    x, y = (t.half() for t in MAKERS["random"](130, 140, 16))
    ids = torch.arange(130), torch.arange(140)
    check(x, y, 10.0, -3.0, ids, torch.randn(130) * (torch.arange(130) % 3 > 0))
    none = torch.zeros(130, device=DEVICE)
    loss, gradients = run(x.to(DEVICE), y[:130].to(DEVICE), 9.0, 0.0, "paired", none)
    assert loss == 0
    assert not any(g.any() for g in gradients)


def test_tiles_that_are_recomputed_among_others() -> None:
    x, y = MAKERS["clustered"](450, 300, 16)
    ids = torch.randint(-1, 40, (450,)), torch.randint(-1, 40, (300,))
    x[130:140] *= 8  # logits whose exponentials multiply beyond float32
    with patch.dict(configs.overrides, {"sigmoid": configs.Config(group=2)}):
        check(x.half(), y.half(), 10.0, -2.0, ids)
        check(x.half()[:300], y.half(), 10.0, -2.0, "paired", torch.rand(300))


@pytest.mark.parametrize(("scale", "bias"), [(5.0, 60.0), (0.0, 300.0), (200.0, 10.0)])
def test_logits_whose_exponentials_leave_float32(scale: float, bias: float) -> None:
    x, y = (t.half() for t in MAKERS["random"](140, 140, 16))
    check(x, y, scale, bias, upstream=1e-3)


@pytest.mark.parametrize("bias", [-16.0, -25.0])
def test_small_terms_survive_float16(bias: float) -> None:
    """e^-16 is float16's smallest number, and 1 + e^-16 is float32's 1."""
    x, y = (t.half() for t in MAKERS["random"](140, 150, 24))
    ids = torch.full((140,), -1), torch.full((150,), -1)
    check(x, y, 1.0, bias, ids, upstream=1e6)
    loss, _ = run(x.to(DEVICE), y.to(DEVICE), 0.0, bias, tuple(t.to(DEVICE) for t in ids), None)
    exactly = 140 * 150 * torch.tensor(bias).double().exp()
    torch.testing.assert_close(loss.cpu().double(), exactly, rtol=ULPS * EPS * -bias, atol=0)


@pytest.mark.parametrize("dtype", HALVES)
def test_the_gradient_of_a_mean_is_rounded_once(dtype: torch.dtype) -> None:
    """It is stored with the factor 1 / rows, so that the backward pass rounds it no second time."""
    x, y = (t.to(DEVICE, dtype) for t in MAKERS["random"](150, 150, 32))
    _, once = run(x, y, 10.0, -3.0, "paired", None, 1 / 150)
    _, scaled = run(x, y, 10.0, -3.0, "paired", None, 64 / 150)
    for a, b in zip(once[:2], scaled[:2], strict=True):
        large = b.abs() > 64 * torch.finfo(dtype).tiny
        assert torch.equal(a[large] * 64, b[large])


def test_float32() -> None:
    """The interpreter multiplies in float32, a GPU in TF32."""
    x, y = (t.float().to(DEVICE) for t in MAKERS["learnt"](140, 140, 24))
    truth = exact(x, y, 10.0, -5.0, "paired", None)
    loss, gradients = run(x, y, 10.0, -5.0, "paired", None)
    tolerance = TF32 if GPU else 2e-6
    assert abs(loss - truth.loss) <= tolerance * truth.loss
    for mine, true in zip(gradients, truth.gradients, strict=True):
        assert (mine - true).norm() <= tolerance * true.norm()


def test_size_of_the_stored_gradients() -> None:
    """2 d bytes per row in half precision; float16 takes one more number per row, its scale."""
    for dtype in HALVES:
        x = torch.randn(140, 16, device=DEVICE, dtype=dtype)
        numbers = [torch.tensor(v, device=DEVICE) for v in (2.0, -1.0)]
        plain = ("paired", *[True] * 4, "", settings.of_call(x))
        stored = torch.ops.megabatch.softplus_sum(x, x, *numbers, *[None] * 7, *plain)
        rows = 140 if dtype == torch.float16 else 0
        assert [r.dtype for r in stored[1:5:2]] == [dtype, dtype]
        assert [r.numel() for r in stored] == [1, 140 * 16, rows, 140 * 16, rows, 1, 1]


@pytest.mark.gpu
def test_memory() -> None:
    """A step takes 4 b d bytes and 640 MiB beside inputs and gradients; 512 MiB are workspace."""
    similarity.set_workspace(None)
    b, d = 70_000, 512
    inputs = [F.normalize(torch.randn(b, d, device="cuda"), dim=1).bfloat16() for _ in range(2)]
    inputs += [torch.tensor(v, device="cuda") for v in (10.0, -10.0)]
    inputs = [t.requires_grad_() for t in inputs]
    mb.SigLipLoss()(*inputs).backward()
    for t in inputs:
        t.grad = None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    mb.SigLipLoss()(*inputs).backward()
    torch.cuda.synchronize()
    extra = torch.cuda.max_memory_allocated() - before - 2 * 2 * b * d
    assert extra <= 4 * b * d + (640 << 20)
