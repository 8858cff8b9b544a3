"""Properties of every loss: gradient caching, torch.compile, half precision, bounded memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import megabatch as mb

#: Rows are not of unit length here.
pytestmark = pytest.mark.filterwarnings("ignore:.*lengths of rows")

B, D = 7, 8
IDS = torch.arange(B) % 4
WEIGHTS = torch.linspace(0, 1, B)
MASK = torch.arange(B) > 2

Loss = Callable[[Tensor, Tensor, Tensor], Tensor]


def own(x: Tensor) -> Tensor:
    """(b, 3, d) negatives of each row."""
    return torch.stack([x.roll(i, 1) for i in (1, 2, 3)], dim=1)


def guide(x: Tensor, start: int) -> Tensor:
    """Features of a guide for the rows of x, in a dtype that autocast does not cast."""
    made = torch.linspace(0, 9, len(x) * 3, dtype=torch.float64, device="cpu").view(-1, 3)
    return (made + start).sin().to(torch.promote_types(x.dtype, torch.float32))


#: Name -> a loss of features x, y and a learnable scale.
LOSSES: dict[str, Loss] = {
    "clip": mb.ClipLoss(),
    "clip, smoothing": mb.ClipLoss(label_smoothing=0.1),
    "clip, ids": lambda x, y, s: mb.ClipLoss()(x, y, s, ids=IDS[: len(x)]),
    "clip, ignored": lambda x, y, s: mb.ClipLoss(duplicates="ignored")(
        x, y, s, ids=IDS[: len(x)], weights=WEIGHTS[: len(x)]
    ),
    "infonce": lambda x, y, s: mb.InfoNCELoss(1 / s, same_tower=("query", "positive"))(
        x, y, y.roll(1, 1), queue=x.detach()
    ),
    "infonce, own": lambda x, y, s: mb.InfoNCELoss(1.0, margin=0.1)(
        x, y, own(y), ids=IDS[: len(x)], temperature=1 / s
    ),
    "infonce, joint": lambda x, y, s: mb.InfoNCELoss(
        1 / s, same_tower=("query", "positive"), reverse="joint"
    )(x, y, y.roll(1, 1)),
    "infonce, weighted": lambda x, y, s: mb.InfoNCELoss(
        1 / s, share_negatives=True, hardness_mode="hard_negatives", hardness_strength=3.0
    )(x, y, own(y)),
    "infonce, smoothing": lambda x, y, s: mb.InfoNCELoss(1 / s, label_smoothing=0.1)(
        x, y, own(y), queue=x.detach(), weights=WEIGHTS[: len(x)]
    ),
    "ntxent, debiased": lambda x, y, s: mb.NTXentLoss(1 / s, tau_plus=0.01)(x, y),
    "infonce, guide": lambda x, y, s: mb.InfoNCELoss(1 / s, margin=-0.1, same_tower=("query",))(
        x, y, guide_query=guide(x, 0), guide_positive=guide(x, 1)
    ),
    "ntxent": lambda x, y, s: mb.NTXentLoss(1 / s)(x, y),
    "dcl": lambda x, y, s: mb.DCLLoss(1 / s)(x, y, x.roll(1, 1)),
    "dcl, weighted": lambda x, y, s: mb.DCLLoss(1 / s, sigma=5.0)(x, y),
    "supcon": lambda x, y, s: mb.SupConLoss(1 / s)(x, IDS[: len(x)], y, IDS[: len(x)]),
    "supcon, in": lambda x, y, s: mb.SupConLoss(1 / s, form="in")(
        torch.cat([x, y]), torch.cat([IDS, IDS])[: 2 * len(x)]
    ),
    "sincere": lambda x, y, s: mb.SincereLoss(1 / s)(x, IDS[: len(x)], y, IDS[: len(x)]),
    "sincere, pairs": lambda x, y, s: mb.SincereLoss(1 / s, average="pairs")(
        torch.cat([x, y]), torch.cat([IDS, IDS])[: 2 * len(x)]
    ),
    "siglip": lambda x, y, s: mb.SigLipLoss()(x, y, s, -s, ids=IDS[: len(x)]),
    "siglip, teacher": lambda x, y, s: mb.SigLipLoss()(
        x,
        y,
        s,
        -s,
        dist_image_features=guide(x, 0),
        dist_text_features=guide(x, 1),
        dist_logit_scale=3.0,
        dist_logit_bias=-2.0,
    ),
    "distillation": lambda x, y, s: sum(mb.DistillClipLoss()(x, y, s, y, x.roll(1, 0), 2.0)),
    "matryoshka": mb.MatryoshkaLoss(mb.ClipLoss(), [3, D]),
    "several modalities": lambda x, y, s: mb.MultiModalLoss([("a", "b"), ("b", "c")])(
        {"a": x, "b": y, "c": x.roll(1, 1)}, s
    ),
    "several modalities, sigmoid": lambda x, y, s: mb.MultiModalLoss(
        [("a", "b"), ("b", "c")], loss=mb.SigLipLoss()
    )({"a": x, "b": y, "c": None}, s, -s),
}
MASKED: Loss = lambda x, y, s: mb.MultiModalLoss([("a", "b")])(  # noqa: E731
    {"a": x, "b": y}, s, present={"a": MASK}
)


class Model(nn.Module):
    """Two linear towers and a scale, all of which gradient caching caches."""

    def __init__(self) -> None:
        super().__init__()
        self.towers = nn.ModuleList([nn.Linear(5, D), nn.Linear(5, D)]).double()
        self.scale = nn.Parameter(torch.tensor([1.3], dtype=torch.float64))

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x, y = (tower(t) for tower, t in zip(self.towers, (x, y), strict=True))
        return x / x.norm(dim=1, keepdim=True), y / y.norm(dim=1, keepdim=True), self.scale.exp()


@pytest.mark.parametrize("name", [*LOSSES, "masked"])
def test_inside_gradient_caching(name: str) -> None:
    loss, model = (LOSSES | {"masked": MASKED})[name], Model()
    batches = torch.randn(B, 5).double(), torch.randn(B, 5).double()
    expected = loss(*model(*batches))
    expected.backward()
    wanted = [p.grad for p in model.parameters()]
    model.zero_grad()
    value = mb.GradientCache(model, loss, 3)(*batches)
    value.backward()
    torch.testing.assert_close(value, expected, rtol=1e-11, atol=1e-11)
    for p, gradient in zip(model.parameters(), wanted, strict=True):
        assert gradient.any()
        torch.testing.assert_close(p.grad, gradient, rtol=1e-10, atol=1e-11)


def some_leaves(dtype: torch.dtype, b: int = B) -> list[Tensor]:
    x, y = (torch.randn(b, D).to(dtype).requires_grad_() for _ in range(2))
    return [x, y, torch.tensor(5.0, requires_grad=True)]


@pytest.mark.parametrize("name", LOSSES)
def test_compiled_as_one_graph(name: str) -> None:
    mine = some_leaves(torch.bfloat16)
    theirs = [t.detach().clone().requires_grad_() for t in mine]
    torch.compiler.reset()
    loss = torch.compile(LOSSES[name], backend="aot_eager", fullgraph=True)(*mine)
    eager = LOSSES[name](*theirs)
    torch.testing.assert_close(loss, eager, rtol=1e-6, atol=1e-6)
    loss.backward()
    eager.backward()
    for a, b in zip(mine, theirs, strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=2e-2, atol=1e-3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", LOSSES)
def test_half_precision_features_with_a_float32_scale(name: str, dtype: torch.dtype) -> None:
    leaves = some_leaves(dtype)
    loss = LOSSES[name](*leaves)
    assert loss.dtype == torch.float32
    loss.backward()
    exact = [t.detach().double().requires_grad_() for t in leaves]
    LOSSES[name](*exact).backward()
    for mine, theirs in zip(leaves, exact, strict=True):
        assert mine.grad.dtype == mine.dtype
        size = theirs.grad.norm()
        assert (mine.grad.double() - theirs.grad).norm() < 0.02 * size


@pytest.mark.parametrize("name", LOSSES)
def test_autocast_casts_features(name: str) -> None:
    x, y, scale = (t.detach() for t in some_leaves(torch.float32))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = LOSSES[name](x, y, scale)
    cast = LOSSES[name](x.bfloat16(), y.bfloat16(), scale)
    # Matryoshka's prefixes are normalised before they are cast.
    torch.testing.assert_close(loss, cast, rtol=1e-6 if "matry" not in name else 1e-2, atol=1e-6)


@pytest.mark.parametrize("name", [*LOSSES, "masked"])
def test_another_default_device(name: str) -> None:
    """A loss creates tensors on its features' device or on the CPU, not on the default device."""
    loss, model = (LOSSES | {"masked": MASKED})[name], Model()
    mine = some_leaves(torch.float32)
    theirs = [t.detach().clone().requires_grad_() for t in mine]
    batches = torch.randn(B, 5).double(), torch.randn(B, 5).double()
    cached = mb.GradientCache(model, loss, 3)
    with torch.device("meta"):
        value = loss(*mine)
        value.backward()
        torch.testing.assert_close(cached(*batches), loss(*model(*batches)))
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


@pytest.mark.parametrize("name", LOSSES)
def test_no_tensor_grows_with_the_batch_squared(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    b = 512
    for constant in ("IDS", "WEIGHTS"):
        monkeypatch.setitem(globals(), constant, globals()[constant].repeat(b // B + 1)[:b])
    leaves = some_leaves(torch.float32, b)
    before = mb.similarity.set_workspace(64 << 10)  # which bounds the saved logits as well
    try:
        with Largest() as largest:
            LOSSES[name](*leaves).backward()
    finally:
        mb.similarity.set_workspace(before)
    assert largest.elements <= 4 * b * D < b * b / 8


@pytest.mark.parametrize("name", [*LOSSES, "masked"])
def test_frozen_features_and_scale(name: str) -> None:
    """A frozen tower gets no gradient; that of the other one does not change."""
    loss = (LOSSES | {"masked": MASKED})[name]
    full = [t.detach().double().requires_grad_() for t in some_leaves(torch.float32)]
    loss(*full).backward()
    x, y, scale = (t.detach().clone() for t in full)
    y.requires_grad_()
    loss(x, y, scale).backward()
    assert x.grad is None
    torch.testing.assert_close(y.grad, full[1].grad, rtol=1e-10, atol=1e-12)
