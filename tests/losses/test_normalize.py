"""`normalize=True` gives the loss of features from `F.normalize`; the warning of other lengths."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import megabatch as mb
from tests.losses.cases import LOSSES, B, D, losses

IDS = torch.arange(B) % 3
MASK = torch.arange(B) % 4 > 0

#: All but the losses that normalise a guide's or a teacher's features as well, or prefixes.
NAMES = [name for name in LOSSES if not any(word in name for word in ("guide", "teach", "matry"))]
NORMALISED, PLAIN = losses(normalize=True), losses(normalize=False)


def features(dtype: torch.dtype) -> list[Tensor]:
    """x and y, whose rows have lengths from 0.1 to 30."""
    made = [(0.1 + 30 * torch.rand(B, 1)) * torch.randn(B, D) for _ in range(2)]
    return [t.to(dtype).requires_grad_() for t in made]


def normalised(features: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """The result of F.normalize in float32 or float64, rounded once."""
    wide = features if features.dtype == torch.float64 else features.float()
    return F.normalize(wide, dim=-1).to(dtype or features.dtype)


def assert_same_gradients(mine: list[Tensor], theirs: list[Tensor], tolerance: float) -> None:
    for ours, truth in zip(mine, theirs, strict=True):
        assert ours.grad is not None
        assert ours.grad.dtype == ours.dtype
        error = (ours.grad.double() - truth.grad.double()).norm()
        assert error <= tolerance * truth.grad.double().norm()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", NAMES)
def test_is_the_loss_of_normalised_features(name: str, dtype: torch.dtype) -> None:
    mine = features(dtype)
    theirs = [t.detach().clone().requires_grad_() for t in mine]
    scale = torch.tensor(4.0, dtype=torch.float64 if dtype == torch.float64 else torch.float32)
    loss = NORMALISED[name](*mine, scale)
    truth = PLAIN[name](*map(normalised, theirs), scale)
    assert torch.equal(loss, truth)
    loss.backward()
    truth.backward()
    assert_same_gradients(mine, theirs, 4 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["clip, ids", "siglip", "ntxent", "supcon", "sincere"])
def test_under_autocast_lengths_are_float32s(name: str, dtype: torch.dtype) -> None:
    mine = features(dtype)
    theirs = [t.detach().float().requires_grad_() for t in mine]
    scale = torch.tensor(4.0)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = NORMALISED[name](*mine, scale)
        loss.backward()
    truth = PLAIN[name](*(normalised(t, torch.bfloat16) for t in theirs), scale)
    assert torch.equal(loss, truth)
    truth.backward()
    # Gradients of the products' operands are bfloat16, and some are sums of several.
    assert_same_gradients(mine, theirs, torch.finfo(torch.bfloat16).eps)


# --- the warning ----------------------------------------------------------------------------------

warning = pytest.mark.parametrize(
    "make", [mb.NTXentLoss, mb.DCLLoss, mb.SupConLoss, mb.SincereLoss]
)
LONG = 8 * torch.randn(B, D, generator=torch.Generator().manual_seed(0))
SHORT = F.normalize(LONG, dim=1)


def inputs(make: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    return (x, IDS) if make in (mb.SupConLoss, mb.SincereLoss) else (x, x.roll(1, 0))


def warnings_of(function: Callable[..., object], *arguments: Any) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        function(*arguments)
    return [str(w.message) for w in caught if "lengths of rows" in str(w.message)]


@warning
def test_a_warning_if_rows_are_not_of_unit_length(make: Any) -> None:
    loss, arguments = make(0.5), inputs(make, LONG)
    (message,) = warnings_of(loss, *arguments)
    for word in (make.__name__, "normalize=True", "normalize=False"):
        assert word in message
    assert warnings_of(loss, *arguments) == []  # it warns once
    assert warnings_of(make(0.5), *arguments) == [message]  # per loss
    with pytest.warns(UserWarning, match="lengths of rows") as caught:
        make(0.5)(*arguments)
    assert caught[0].filename == __file__


@warning
def test_no_warning(make: Any) -> None:
    long, short = inputs(make, LONG), inputs(make, SHORT)
    loss = make(0.5)
    assert warnings_of(loss, *short) == []
    assert warnings_of(loss, *long) == []  # only the first call is checked
    assert warnings_of(make(0.5), *inputs(make, SHORT.bfloat16())) == []
    assert warnings_of(make(0.5, normalize=False), *long) == []
    assert warnings_of(make(0.5, normalize=True), *long) == []
    assert warnings_of(make(0.5), *inputs(make, torch.full_like(LONG, torch.nan))) == []


def test_losses_that_take_a_scale_traced_ones_and_vmap_do_not_warn() -> None:
    assert warnings_of(mb.ClipLoss(), LONG, LONG, 1.0) == []
    assert warnings_of(mb.SigLipLoss(), LONG, LONG, 1.0, 0.0) == []
    assert warnings_of(mb.InfoNCELoss(0.5), LONG, LONG) == []
    compiled = torch.compile(mb.NTXentLoss(0.5), backend="eager", fullgraph=True)
    assert warnings_of(compiled, LONG, LONG) == []
    loss, several = mb.NTXentLoss(0.5), torch.stack([LONG, LONG])
    assert warnings_of(torch.vmap(loss), several, several) == []
    assert len(warnings_of(loss, LONG, LONG)) == 1


def test_a_loss_is_copied_before_and_after_its_first_call() -> None:
    loss = mb.NTXentLoss(0.5)
    for other in (copy.deepcopy(loss), pickle.loads(pickle.dumps(loss))):
        assert len(warnings_of(other, LONG, LONG)) == 1
    loss(SHORT, SHORT)
    for other in (copy.deepcopy(loss), pickle.loads(pickle.dumps(loss))):
        assert warnings_of(other, LONG, LONG) == []


@pytest.mark.gpu
def test_on_a_gpu_the_warning_does_not_synchronise() -> None:
    x = LONG.cuda()
    loss, other = mb.NTXentLoss(0.5), mb.NTXentLoss(0.5)
    other(x, x)  # compiles kernels and allocates memory
    torch.cuda.synchronize()
    large = torch.randn(8192, 8192, device="cuda", dtype=torch.float64)
    for _ in range(20):  # keeps the GPU busy
        large = large @ large
    torch.cuda.set_sync_debug_mode("error")
    try:
        assert warnings_of(loss, x, x) == []
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert len(pickle.dumps(loss)) > 0
    copy.deepcopy(loss)
    torch.cuda.synchronize()
    assert len(warnings_of(loss, x, x)) == 1
    assert warnings_of(loss, x, x) == []
