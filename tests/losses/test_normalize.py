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

B, D = 8, 6
IDS = torch.arange(B) % 3
MASK = torch.arange(B) % 4 > 0
MODALITIES = [("a", "b"), ("b", "c")]

#: Name -> a loss of x, y, z (b, d), own negatives (b, k, d), a scale, and `normalize`.
LOSSES: dict[str, Callable[..., Tensor]] = {
    "clip": lambda x, y, z, own, s, n: mb.ClipLoss(normalize=n)(x, y, s),
    "clip, smoothing": lambda x, y, z, own, s, n: mb.ClipLoss(label_smoothing=0.2, normalize=n)(
        x, y, s, ids=IDS
    ),
    "siglip": lambda x, y, z, own, s, n: mb.SigLipLoss(normalize=n)(x, y, s, -s),
    "infonce": lambda x, y, z, own, s, n: mb.InfoNCELoss(
        0.3, same_tower=("query", "positive"), margin=0.2, normalize=n
    )(x, y, z, queue=z.detach()[:3], temperature=1 / s),
    "infonce, own": lambda x, y, z, own, s, n: mb.InfoNCELoss(0.3, normalize=n)(
        x, y, own, ids=IDS, temperature=1 / s
    ),
    "ntxent": lambda x, y, z, own, s, n: mb.NTXentLoss(0.3, normalize=n)(x, y, z),
    "dcl": lambda x, y, z, own, s, n: mb.DCLLoss(0.3, normalize=n)(x, y),
    "supcon": lambda x, y, z, own, s, n: mb.SupConLoss(0.3, normalize=n)(x, IDS),
    "sincere": lambda x, y, z, own, s, n: mb.SincereLoss(0.3, normalize=n)(x, IDS, y, IDS),
    "supcon, references": lambda x, y, z, own, s, n: mb.SupConLoss(0.3, form="in", normalize=n)(
        x, IDS, y, IDS
    ),
    "several modalities": lambda x, y, z, own, s, n: mb.MultiModalLoss(MODALITIES, normalize=n)(
        {"a": x, "b": y, "c": z}, s, present={"b": MASK}
    ),
    "several modalities, sigmoid": lambda x, y, z, own, s, n: mb.MultiModalLoss(
        MODALITIES, loss=mb.SigLipLoss(), normalize=n
    )({"a": x, "b": y, "c": None}, s, -s),
}


def features(dtype: torch.dtype) -> list[Tensor]:
    shapes = [(B, D)] * 3 + [(B, 2, D)]
    made = [(0.1 + 30 * torch.rand(*s[:-1], 1)) * torch.randn(*s) for s in shapes]
    return [t.to(dtype).requires_grad_() for t in made]


def normalised(features: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """The result of F.normalize in float32 or float64, rounded once."""
    wide = features if features.dtype == torch.float64 else features.float()
    return F.normalize(wide, dim=-1).to(dtype or features.dtype)


def same_results(mine: list[Tensor], theirs: list[Tensor], tolerance: float) -> None:
    for ours, truth in zip(mine, theirs, strict=True):
        if truth.grad is None:
            assert ours.grad is None
            continue
        assert ours.grad is not None
        assert ours.grad.dtype == ours.dtype
        error = (ours.grad.double() - truth.grad.double()).norm()
        assert error <= tolerance * truth.grad.double().norm()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", LOSSES)
def test_is_the_loss_of_normalised_features(name: str, dtype: torch.dtype) -> None:
    mine = features(dtype)
    theirs = [t.detach().clone().requires_grad_() for t in mine]
    scale = torch.tensor(4.0, dtype=torch.float64 if dtype == torch.float64 else torch.float32)
    loss = LOSSES[name](*mine, scale, True)
    truth = LOSSES[name](*map(normalised, theirs), scale, False)
    assert torch.equal(loss, truth)
    loss.backward()
    truth.backward()
    same_results(mine, theirs, 2 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", LOSSES)
def test_under_autocast_lengths_are_float32s(name: str, dtype: torch.dtype) -> None:
    mine = features(dtype)
    theirs = [t.detach().float().requires_grad_() for t in mine]
    scale = torch.tensor(4.0)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = LOSSES[name](*mine, scale, True)
        loss.backward()
    truth = LOSSES[name](*(normalised(t, torch.bfloat16) for t in theirs), scale, False)
    assert torch.equal(loss, truth)
    truth.backward()
    # Gradients of the products' operands are bfloat16, and some are sums of several.
    same_results(mine, theirs, torch.finfo(torch.bfloat16).eps)


def test_matryoshka_normalises_prefixes() -> None:
    x, y, *_ = (t.detach() for t in features(torch.float64))
    inner = mb.MatryoshkaLoss(mb.ClipLoss(normalize=True), [2, D], normalize=False)(x, y, 4.0)
    outer = mb.MatryoshkaLoss(mb.ClipLoss(), [2, D])(x, y, 4.0)
    truth = sum(mb.ClipLoss()(normalised(x[:, :d]), normalised(y[:, :d]), 4.0) for d in (2, D))
    torch.testing.assert_close(inner, truth)
    torch.testing.assert_close(outer, truth)


def test_values_of_missing_rows_are_ignored() -> None:
    x, y, *_ = (t.detach() for t in features(torch.float64))
    loss = mb.MultiModalLoss([("a", "b")], normalize=True)
    for nothing in (torch.nan, torch.inf, 0.0):
        dirty = y.masked_fill(~MASK[:, None], nothing).requires_grad_()
        value = loss({"a": x, "b": dirty}, 4.0, present={"b": MASK})
        value.backward()
        assert value == loss({"a": x, "b": y}, 4.0, present={"b": MASK})
        assert dirty.grad is not None
        assert dirty.grad.isfinite().all()
        assert not dirty.grad[~MASK].any()


@pytest.mark.parametrize("name", LOSSES)
def test_saved_tensors_grow_with_the_features(name: str) -> None:
    """Tensors saved for the backward pass take O(b * d)."""
    saved: list[int] = []
    mine = features(torch.float32)
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: saved.append(t.untyped_storage().nbytes()) or t, lambda t: t
    ):
        LOSSES[name](*mine, torch.tensor(4.0), True)
    features_bytes = max(t.numel() for t in mine) * 4
    # `kept`: logits that the CPU keeps where its workspace allows it.
    assert max(saved) <= max(2 * features_bytes, 4 * (3 * B) ** 2)


# --- the warning ----------------------------------------------------------------------------------

WARNED: dict[str, Callable[..., Any]] = {
    "NTXentLoss": mb.NTXentLoss,
    "DCLLoss": mb.DCLLoss,
    "SupConLoss": mb.SupConLoss,
    "SincereLoss": mb.SincereLoss,
}
LABELLED = ("SupConLoss", "SincereLoss")


def call(loss: Any, x: Tensor) -> Tensor:
    labelled = type(loss).__name__ in LABELLED
    value: Tensor = loss(x, IDS) if labelled else loss(x, x.roll(1, 0))
    return value


def warnings_of(function: Callable[[], object]) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        function()
    return [str(w.message) for w in caught if "lengths of rows" in str(w.message)]


@pytest.mark.parametrize("name", WARNED)
def test_a_warning_if_rows_are_not_of_unit_length(name: str) -> None:
    loss, x = WARNED[name](0.5), 8 * torch.randn(B, D)
    (message,) = warnings_of(lambda: call(loss, x))
    for word in (name, "normalize=True", "normalize=False"):
        assert word in message
    assert warnings_of(lambda: call(loss, x)) == []  # it warns once
    (other,) = warnings_of(lambda: call(WARNED[name](0.5), x))  # per loss
    assert other == message
    with pytest.warns(UserWarning, match="lengths of rows") as caught:
        WARNED[name](0.5)(*((x, IDS) if name in LABELLED else (x, x)))
    assert caught[0].filename == __file__


@pytest.mark.parametrize("name", WARNED)
def test_no_warning(name: str) -> None:
    long, make = 8 * torch.randn(B, D), WARNED[name]
    short = F.normalize(long, dim=1)
    assert warnings_of(lambda: call(make(0.5), short)) == []
    assert warnings_of(lambda: call(make(0.5), short.bfloat16())) == []
    assert warnings_of(lambda: call(make(0.5, normalize=False), long)) == []
    assert warnings_of(lambda: call(make(0.5, normalize=True), long)) == []
    loss = make(0.5)
    call(loss, short)
    assert warnings_of(lambda: call(loss, long)) == []  # only the first call is checked
    compiled = torch.compile(make(0.5), backend="eager", fullgraph=True)
    arguments = (long, IDS) if name in LABELLED else (long, long)
    assert warnings_of(lambda: compiled(*arguments)) == []


def test_no_look_at_values_inside_vmap() -> None:
    loss, x = mb.NTXentLoss(0.5), 8 * torch.randn(2, B, D)
    assert warnings_of(lambda: torch.vmap(loss)(x, x)) == []
    assert len(warnings_of(lambda: call(loss, x[0]))) == 1
    copy.deepcopy(loss)


def test_a_length_of_nan_does_not_warn() -> None:
    loss, x = mb.NTXentLoss(0.5), torch.full((B, D), torch.nan)
    assert warnings_of(lambda: call(loss, x)) == []


def test_losses_that_take_a_scale_do_not_warn() -> None:
    x = 8 * torch.randn(B, D)
    for function in (
        lambda: mb.ClipLoss()(x, x, 1.0),
        lambda: mb.SigLipLoss()(x, x, 1.0, 0.0),
        lambda: mb.InfoNCELoss(0.5)(x, x),
    ):
        assert warnings_of(function) == []


def test_a_loss_is_copied_before_and_after_its_first_call() -> None:
    loss, x = mb.NTXentLoss(0.5), 8 * torch.randn(B, D)
    for other in (copy.deepcopy(loss), pickle.loads(pickle.dumps(loss))):
        assert len(warnings_of(lambda other=other: call(other, x))) == 1
    call(loss, F.normalize(x))
    for other in (copy.deepcopy(loss), pickle.loads(pickle.dumps(loss))):
        assert warnings_of(lambda other=other: call(other, x)) == []


@pytest.mark.gpu
def test_on_a_gpu_the_warning_does_not_synchronise() -> None:
    x = 8 * torch.randn(B, D, device="cuda")
    loss, other = mb.NTXentLoss(0.5), mb.NTXentLoss(0.5)
    other(x, x)  # compiles kernels and allocates memory
    torch.cuda.synchronize()
    large = torch.randn(8192, 8192, device="cuda", dtype=torch.float64)
    for _ in range(20):  # keeps the GPU busy
        large = large @ large
    torch.cuda.set_sync_debug_mode("error")
    try:
        assert warnings_of(lambda: loss(x, x)) == []
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert len(pickle.dumps(loss)) > 0
    copy.deepcopy(loss)
    torch.cuda.synchronize()
    assert len(warnings_of(lambda: loss(x, x))) == 1
    assert warnings_of(lambda: loss(x, x)) == []


@pytest.mark.parametrize("value", ["yes", 1, torch.tensor(True)])
@pytest.mark.parametrize(
    "make",
    [
        lambda n: mb.ClipLoss(normalize=n),
        lambda n: mb.SigLipLoss(normalize=n),
        lambda n: mb.InfoNCELoss(0.1, normalize=n),
        lambda n: mb.NTXentLoss(0.1, normalize=n),
        lambda n: mb.DCLLoss(0.1, normalize=n),
        lambda n: mb.SupConLoss(0.1, normalize=n),
        lambda n: mb.SincereLoss(0.1, normalize=n),
        lambda n: mb.MatryoshkaLoss(mb.ClipLoss(), [2], normalize=n),
        lambda n: mb.MultiModalLoss([("a", "b")], normalize=n),
    ],
)
def test_a_flag_is_a_flag(make: Any, value: Any) -> None:
    with pytest.raises(TypeError, match="normalize: expected True"):
        make(value)
