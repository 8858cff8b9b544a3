"""Properties of every loss: gradient caching, torch.compile and torch.func, dtypes, memory, NaN."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import grad, vmap
from torch.utils._python_dispatch import TorchDispatchMode

import megabatch as mb
from tests.losses.cases import DIRECT, LOSSES, MASKED, B, D, features

pytestmark = pytest.mark.filterwarnings("ignore:.*lengths of rows")

every = pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
every_and_masked = pytest.mark.parametrize(
    "loss", [*LOSSES.values(), *MASKED.values()], ids=[*LOSSES, *MASKED]
)


def copies(tensors: list[Tensor], dtype: torch.dtype | None = None) -> list[Tensor]:
    return [t.detach().to(dtype or t.dtype, copy=True).requires_grad_() for t in tensors]


class Model(nn.Module):
    """Two linear towers and a scale, all of which gradient caching caches."""

    def __init__(self) -> None:
        super().__init__()
        self.towers = nn.ModuleList([nn.Linear(5, D), nn.Linear(5, D)]).double()
        self.scale = nn.Parameter(torch.tensor([1.3], dtype=torch.float64))

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x, y = (tower(t) for tower, t in zip(self.towers, (x, y), strict=True))
        return x / x.norm(dim=1, keepdim=True), y / y.norm(dim=1, keepdim=True), self.scale.exp()


@every_and_masked
def test_inside_gradient_caching(loss: Any) -> None:
    model, batches = Model(), (torch.randn(B, 5).double(), torch.randn(B, 5).double())
    expected = loss(*model(*batches))
    wanted = torch.autograd.grad(expected, list(model.parameters()))
    value = mb.GradientCache(model, loss, 3)(*batches)
    value.backward()
    torch.testing.assert_close(value, expected, rtol=1e-11, atol=1e-11)
    for p, gradient in zip(model.parameters(), wanted, strict=True):
        assert gradient.any()
        torch.testing.assert_close(p.grad, gradient, rtol=1e-10, atol=1e-11)


#: Losses with the operators that no test of the engine compiles with its derivative, whose tracing
#: takes as long as all the rest.
WITH_DERIVATIVES = ("distillation", "infonce, weighted", "sincere")
#: Losses of which other cases trace every line.
TRACED_BY_OTHERS = (
    *("clip, smoothing", "infonce", "ntxent", "supcon", "sincere, pairs", "several modalities"),
)


@pytest.mark.parametrize("name", [name for name in LOSSES if name not in TRACED_BY_OTHERS])
def test_compiled_as_one_graph(name: str) -> None:
    loss, mine = LOSSES[name], features(torch.bfloat16)
    theirs = copies(mine)
    torch.compiler.reset()
    backend = "aot_eager" if name in WITH_DERIVATIVES else "eager"
    value = torch.compile(loss, backend=backend, fullgraph=True)(*mine)
    eager = loss(*theirs)
    torch.testing.assert_close(value, eager, rtol=1e-6, atol=1e-6)
    value.backward()
    eager.backward()
    for a, b in zip(mine, theirs, strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=2e-2, atol=1e-3)


@every
def test_vmap_and_its_gradients(loss: Any) -> None:
    several = [copies(features(), torch.float64) for _ in range(3)]
    stacked = tuple(torch.stack(t).detach() for t in zip(*several, strict=True))
    values = vmap(loss)(*stacked)
    gradients = vmap(grad(lambda *a: loss(*a), argnums=(0, 1, 2)))(*stacked)
    for k, one in enumerate(several):
        value = loss(*one)
        torch.testing.assert_close(values[k], value, rtol=1e-12, atol=1e-12)
        for ours, truth in zip(gradients, torch.autograd.grad(value, one), strict=True):
            torch.testing.assert_close(ours[k], truth)


@pytest.mark.parametrize("autocast", [False, True])
@every
def test_features_on_meta(loss: Any, autocast: bool) -> None:
    """No check reads a value; results have the right shape, dtype and device."""
    inputs = [t.detach().to("meta").requires_grad_() for t in features()]
    with torch.autocast("cpu", enabled=autocast):
        value = loss(*inputs)
        value.backward()
    assert (value.shape, value.dtype, value.device.type) == ((), torch.float32, "meta")
    for t in inputs:
        assert t.grad is not None
        assert (t.grad.shape, t.grad.dtype, t.grad.device) == (t.shape, t.dtype, t.device)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@every
def test_half_precision_features_with_a_float32_scale(loss: Any, dtype: torch.dtype) -> None:
    mine = features(dtype)
    exact = copies(mine, torch.float64)
    value = loss(*mine)
    assert value.dtype == torch.float32
    value.backward()
    loss(*exact).backward()
    for ours, theirs in zip(mine, exact, strict=True):
        assert ours.grad.dtype == ours.dtype
        assert (ours.grad.double() - theirs.grad).norm() < 0.02 * theirs.grad.norm()


def equals_that_of_cast_features(name: str, *dtypes: torch.dtype) -> None:
    x, y, scale = features()
    x, y = (t.detach().to(d).requires_grad_() for t, d in zip((x, y), dtypes, strict=True))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = LOSSES[name](x, y, scale)
        loss.backward()
    cast = LOSSES[name](x.detach().bfloat16(), y.detach().bfloat16(), scale)
    # Matryoshka's prefixes are normalised before they are cast.
    rtol = 1e-2 if name == "matryoshka" else 1e-6
    torch.testing.assert_close(loss, cast, rtol=rtol, atol=1e-6)
    for t in (x, y):
        assert t.grad is not None
        assert t.grad.dtype == t.dtype


@pytest.mark.parametrize("name", LOSSES)
def test_autocast_casts_features(name: str) -> None:
    equals_that_of_cast_features(name, torch.float32, torch.float32)


@pytest.mark.parametrize("name", [*DIRECT, "distillation", "siglip", "several modalities"])
def test_towers_of_two_dtypes_under_autocast_only(name: str) -> None:
    for dtypes in ((torch.bfloat16, torch.float32), (torch.float32, torch.float16)):
        equals_that_of_cast_features(name, *dtypes)
        x, y, scale = features()
        with pytest.raises(TypeError, match=r"expected torch\.\w+ as .* has, got torch\.\w+"):
            LOSSES[name](x.to(dtypes[0]), y.to(dtypes[1]), scale)


@every_and_masked
def test_another_default_device(loss: Any) -> None:
    """A loss creates tensors on its features' device or on the CPU, not on the default device."""
    mine, model = features(), Model()
    theirs = copies(mine)
    batches = torch.randn(B, 5).double(), torch.randn(B, 5).double()
    with torch.device("meta"):
        value = loss(*mine)
        value.backward()
        cached = mb.GradientCache(model, loss, 3)(*batches)
        torch.testing.assert_close(cached, loss(*model(*batches)))
    truth = loss(*theirs)
    truth.backward()
    torch.testing.assert_close(value, truth)
    for a, b in zip(mine, theirs, strict=True):
        torch.testing.assert_close(a.grad, b.grad)


class Largest(TorchDispatchMode):
    """Records the number of elements of the largest result of an operation."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(value, Tensor):
                self.elements = max(self.elements, value.numel())
        return result


@every
def test_no_tensor_grows_with_the_batch_squared(loss: Any, small_blocks: None) -> None:
    b = 256
    inputs = features(b=b)
    with Largest() as largest:
        loss(*inputs).backward()
    assert largest.elements <= 4 * b * D <= b * b / 8


# --- NaN ------------------------------------------------------------------------------------------


def ones(x: Tensor) -> Tensor:
    return torch.ones(len(x), D)


def rows(x: Tensor) -> Tensor:
    return torch.arange(len(x))


TEACHER = ("dist_image_features", "dist_text_features")
#: Losses of x, y (b, d): first some in which a NaN could be lost, then all others.
MAY_HIDE_NAN: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "clip, one caption": lambda x, y: mb.ClipLoss(duplicates="ignored")(x, y, 2.0, ids=0 * rows(x)),
    "clip, weights of zero": lambda x, y: mb.ClipLoss()(x, y, 2.0, weights=0.0 * rows(x)),
    "distillation's teacher": lambda x, y: mb.DistillClipLoss()(ones(x), ones(x), 1.0, x, y, 2.0)[
        1
    ],
    "siglip's teacher": lambda x, y: mb.SigLipLoss()(
        ones(x), ones(x), 2.0, -1.0, dist_logit_scale=2.0, **dict(zip(TEACHER, (x, y), strict=True))
    ),
    "siglip, weights of zero": lambda x, y: mb.SigLipLoss()(x, y, 2.0, -1.0, weights=0.0 * rows(x)),
    "infonce, all one document": lambda x, y: mb.InfoNCELoss(0.5)(x, y, ids=0 * rows(x)),
    "infonce, margin": lambda x, y: mb.InfoNCELoss(0.5, margin=-9.0)(x, y),
    "infonce, weights of zero": lambda x, y: mb.InfoNCELoss(0.5)(x, y, weights=0.0 * rows(x)),
    "infonce, queue": lambda x, y: mb.InfoNCELoss(0.5, tau_plus=0.1)(x, x, queue=y),
    "infonce, negatives": lambda x, y: mb.InfoNCELoss(0.5, reverse="separate")(x, x, y),
    "infonce, hard negatives": lambda x, y: mb.InfoNCELoss(0.5)(x, x, y[:, None]),
    "infonce, guide": lambda x, y: mb.InfoNCELoss(0.5, margin=-0.1)(
        ones(x), ones(x), guide_query=x, guide_positive=y
    ),
    "infonce, guide of negatives": lambda x, y: mb.InfoNCELoss(0.5, margin=-9.0)(
        ones(x), ones(x), ones(x), guide_query=x, guide_positive=x, guide_negatives=y
    ),
    "supcon, no positive": lambda x, y: mb.SupConLoss(0.5)(
        torch.cat([x, y]), torch.arange(2 * len(x))
    ),
    "supcon, in, no positive": lambda x, y: mb.SupConLoss(0.5, form="in")(
        torch.cat([x, y]), torch.arange(2 * len(x))
    ),
    "supcon, some without positive": lambda x, y: mb.SupConLoss(0.5)(x, rows(x), y, 0 * rows(x)),
    "supcon, references of other labels": lambda x, y: mb.SupConLoss(0.5, form="in")(
        x, rows(x), y, 9 + rows(x)
    ),
    "supcon, one row": lambda x, y: mb.SupConLoss(0.5)(x[:1] + y.sum(), rows(x[:1])) + 0 * x.sum(),
    "supcon, no references": lambda x, y: mb.SupConLoss(0.5)(x + y, rows(x), x[:0], rows(x[:0])),
    "sincere, no positive": lambda x, y: mb.SincereLoss(0.5)(
        torch.cat([x, y]), torch.arange(2 * len(x))
    ),
    "sincere, some without positive": lambda x, y: mb.SincereLoss(0.5, average="pairs")(
        x, rows(x), y, 0 * rows(x)
    ),
    "normalised": lambda x, y: mb.DCLLoss(0.5, normalize=True)(x, y),
} | {name: lambda x, y, f=loss: f(x, y, torch.tensor(2.0)) for name, loss in LOSSES.items()}


@pytest.mark.parametrize("name", MAY_HIDE_NAN)
def test_a_nan_anywhere_gives_a_nan(name: str) -> None:
    for b in (5, 2, 1):
        assert MAY_HIDE_NAN[name](torch.randn(b, D), torch.randn(b, D)).isfinite()
        for side in (0, 1):
            for row in range(b):
                pair = torch.randn(2, b, D)
                pair[side, row, 1] = torch.nan
                assert MAY_HIDE_NAN[name](*pair).isnan(), (b, side, row)


def test_a_scale_of_nan_gives_a_nan() -> None:
    x, y, nan = torch.randn(5, D), torch.randn(5, D), torch.tensor(torch.nan)
    assert mb.ClipLoss()(x, y, nan).isnan()
    assert mb.ClipLoss()(x, y, float("nan")).isnan()
    assert mb.SigLipLoss()(x, y, nan, 0.0).isnan()
    assert mb.SigLipLoss()(x, y, 1.0, nan).isnan()
