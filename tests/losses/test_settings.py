"""Arguments that all losses take, and losses as modules: repr, copies, moves, state dicts."""

from __future__ import annotations

import copy
import io
import pickle
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import megabatch as mb
from tests.losses.cases import LOSSES, features

pytestmark = pytest.mark.filterwarnings("ignore:.*lengths of rows")

B, D = 6, 4
X, Y = torch.randn(B, D, generator=torch.Generator().manual_seed(1)), torch.ones(B, D)
IDS = torch.tensor([0, 1, 1, -1, 2, 2])
PAIR = [("a", "b")]


# --- numbers and ids ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", LOSSES)
def test_a_scale_of_any_real_number_or_dtype(name: str) -> None:
    x, y, _ = (t.detach() for t in features())
    plain = LOSSES[name](x, y, 2.0)
    for kind in (np.float32, np.float64, np.float16, np.int64, np.array, Fraction):
        assert torch.equal(LOSSES[name](x, y, kind(2)), plain), kind  # type: ignore[operator]
    for dtype in (torch.float16, torch.bfloat16, torch.float64):
        scale = torch.tensor(2.0, dtype=dtype, requires_grad=True)
        loss = LOSSES[name](x, y, scale)
        loss.backward()
        assert torch.equal(loss, plain)
        assert scale.grad is not None
        assert scale.grad.dtype == dtype


def test_numpys_numbers_elsewhere() -> None:
    x, y = X.double(), Y.double()
    array = np.array
    for ours, plain in (
        (mb.ClipLoss(label_smoothing=np.float32(0.25)), mb.ClipLoss(label_smoothing=0.25)),
        (mb.InfoNCELoss(np.float32(0.5), margin=np.float64(0.1)), mb.InfoNCELoss(0.5, margin=0.1)),
        (
            mb.MatryoshkaLoss(mb.ClipLoss(), array([2, 4]), array([1.0, 0.5])),
            mb.MatryoshkaLoss(mb.ClipLoss(), [2, 4], [1.0, 0.5]),
        ),
    ):
        extra = () if isinstance(ours, mb.InfoNCELoss) else (3.0,)
        assert torch.equal(ours(x, y, *extra), plain(x, y, *extra))
        assert repr(ours) == repr(plain)
    towers = mb.InfoNCELoss(0.1, same_tower=(name for name in ("query", "positive")))  # type: ignore[arg-type]
    assert towers.same_tower == ("query", "positive")


@pytest.mark.parametrize("dtype", [torch.int32, torch.int16, torch.int8])
def test_ids_and_labels_of_any_integer_dtype(dtype: torch.dtype) -> None:
    small = IDS.to(dtype)
    for call in (
        lambda ids: mb.ClipLoss()(X, Y, 2.0, ids=ids),
        lambda ids: mb.ClipLoss(duplicates="ignored")(X, Y, 2.0, ids=ids),
        lambda ids: mb.SigLipLoss()(X, Y, 2.0, -1.0, ids=ids),
        lambda ids: mb.InfoNCELoss(0.5, same_tower=("query",))(X, Y, Y, ids=ids),
        lambda ids: mb.SupConLoss(0.5)(X, ids),
        lambda ids: mb.SupConLoss(0.5)(X, ids, Y, ids),
    ):
        assert torch.equal(call(small), call(IDS))


def test_values_are_not_checked_while_tracing() -> None:
    def loss(x: Tensor, w: Tensor, t: Tensor) -> Tensor:
        return mb.InfoNCELoss(0.1)(x, x, weights=w, temperature=t, ids=IDS)

    weights, temperature = torch.ones(B), torch.tensor(0.5)
    compiled = torch.compile(loss, backend="eager", fullgraph=True)
    torch.testing.assert_close(
        compiled(X, weights, temperature), loss(X, weights, temperature), rtol=1e-6, atol=1e-6
    )
    with FakeTensorMode() as mode:
        x, w, t = (mode.from_tensor(v) for v in (X, weights, temperature))
        mb.ClipLoss()(x, x, t, weights=w, ids=mode.from_tensor(IDS))
        mb.SigLipLoss()(x, x, t, t, weights=w)
    x, w = (t.to("meta") for t in (X, weights))
    for value in (
        mb.ClipLoss()(x, x, 2.0, weights=w),
        mb.SigLipLoss()(x, x, 2.0, -1.0, weights=w),
        mb.InfoNCELoss(0.5)(x, x, weights=w),
    ):
        assert value.is_meta


# --- unused arguments -----------------------------------------------------------------------------


@pytest.mark.parametrize("bias", [-10.0, float("nan"), float("inf")])
@pytest.mark.parametrize("shape", [(), (1,)])
def test_a_bias_that_cancels_has_a_gradient_of_zero(shape: Any, bias: float) -> None:
    leaf = torch.full(shape, bias, dtype=torch.float64, requires_grad=True)
    for options in ({}, {"ids": IDS}, {"weights": torch.zeros(B)}):
        loss = mb.ClipLoss()(X, Y, 2.0, leaf, **options)
        assert loss.dtype == torch.float32
        assert loss == mb.ClipLoss()(X, Y, 2.0, **options)
        assert torch.equal(torch.autograd.grad(loss, leaf)[0], torch.zeros_like(leaf))
    loss = mb.MultiModalLoss(PAIR)({"a": X, "b": Y}, 2.0, leaf)
    assert torch.autograd.grad(loss, leaf)[0] == 0


@pytest.mark.parametrize("loss_class", [mb.InfoNCELoss, mb.NTXentLoss, mb.DCLLoss, mb.SupConLoss])
def test_a_temperature_that_a_call_replaces_has_a_gradient_of_zero(loss_class: Any) -> None:
    loss = loss_class(nn.Parameter(torch.tensor([0.3])))
    other = IDS if loss_class is mb.SupConLoss else Y
    value = loss(X, other, temperature=0.5)
    assert torch.equal(value, loss_class(0.5)(X, other))
    value.backward()
    assert torch.equal(loss.temperature.grad, torch.zeros(1))


def test_a_modality_in_no_pair_has_a_gradient_of_zero() -> None:
    unused = Y.clone().fill_(torch.nan).requires_grad_()
    loss = mb.MultiModalLoss(PAIR)({"a": X, "b": Y, "c": unused, "d": None}, 2.0)
    assert torch.equal(loss, mb.ClipLoss()(X, Y, 2.0))
    loss.backward()
    assert torch.equal(unused.grad, torch.zeros_like(Y))  # type: ignore[arg-type]


# --- modules --------------------------------------------------------------------------------------


class Subclass(mb.ClipLoss):
    def __init__(self, gamma: float, unstored: int = 0) -> None:
        super().__init__()
        self.gamma = gamma


@pytest.mark.parametrize(
    ("loss", "expected"),
    [
        (
            mb.ClipLoss(label_smoothing=0.1),
            "ClipLoss(label_smoothing=0.1, duplicates='positive', normalize=False, group=None)",
        ),
        (Subclass(2.0), "Subclass(gamma=2.0)"),
        (
            mb.InfoNCELoss(0.05, margin=0.1, same_tower=("query",)),
            "InfoNCELoss(temperature=0.05, margin=0.1, margin_strategy='absolute', "
            "same_tower=('query',), reverse=None, share_negatives=False, hardness_mode=None, "
            "hardness_strength=0.0, "
            "label_smoothing=0.0, tau_plus=0.0, normalize=False, group=None)",
        ),
        (
            mb.NTXentLoss(nn.Parameter(torch.tensor([0.07]))),
            "NTXentLoss(temperature=0.07 (learnt), tau_plus=0.0, normalize=None, group=None)",
        ),
        (
            mb.DCLLoss(torch.tensor(0.07, device="meta")),
            "DCLLoss(temperature=meta, sigma=None, normalize=None, group=None)",
        ),
        (
            mb.MatryoshkaLoss(max, [2]),
            "MatryoshkaLoss(loss=<built-in function max>, dims=(2,), weights=(1.0,), "
            "normalize=True)",
        ),
        (
            mb.MultiModalLoss(PAIR, loss=mb.SigLipLoss()),
            "MultiModalLoss(\n  pairs=(('a', 'b'),), weights=(1.0,), normalize=False, group=None\n"
            "  (loss): SigLipLoss(normalize=False, group=None)\n)",
        ),
    ],
)
def test_repr_shows_all_settings(loss: nn.Module, expected: str) -> None:
    assert repr(loss) == expected


@pytest.mark.parametrize(
    "make",
    [
        lambda: mb.ClipLoss(label_smoothing=0.1),
        lambda: mb.InfoNCELoss(0.1, margin=0.3),
        lambda: mb.NTXentLoss(nn.Parameter(torch.tensor(0.3))),
        lambda: mb.SupConLoss(torch.tensor(0.3)),
        lambda: mb.MatryoshkaLoss(mb.SigLipLoss(), [2]),
        lambda: mb.MultiModalLoss(PAIR, weights=[2.0]),
    ],
)
def test_copies_pickles_and_state_dicts(make: Any) -> None:
    loss, file = make(), io.BytesIO()
    torch.save(loss, file)
    file.seek(0)
    for other in (
        copy.deepcopy(loss),
        pickle.loads(pickle.dumps(loss)),
        torch.load(file, weights_only=False),
    ):
        assert repr(other) == repr(loss)
        assert other is not loss
    make().load_state_dict(loss.state_dict())
    learnt = isinstance(getattr(loss, "temperature", None), nn.Parameter)
    assert list(loss.state_dict()) == (["temperature"] if learnt else [])


@pytest.mark.parametrize("make", [lambda t: t, nn.Parameter])
def test_a_tensors_temperature_moves_with_the_module(make: Any) -> None:
    loss = mb.NTXentLoss(make(torch.tensor(0.3)))
    expected = loss(X, Y)
    assert loss.to("meta").temperature.device.type == "meta"
    loss = mb.NTXentLoss(make(torch.tensor(0.25))).half()
    assert loss.temperature.dtype == torch.float16
    assert torch.equal(loss(X, Y), mb.NTXentLoss(0.25)(X, Y))
    assert torch.equal(mb.NTXentLoss(make(torch.tensor(0.3))).double()(X, Y), expected)
