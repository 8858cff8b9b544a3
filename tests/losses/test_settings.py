"""Numbers, ids, weights and dtypes that all losses take or refuse."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nested import nested_tensor

import megabatch as mb

pytestmark = pytest.mark.filterwarnings("ignore:.*lengths of rows")

B, D = 6, 4
X, Y = torch.randn(B, D, generator=torch.Generator().manual_seed(1)), torch.ones(B, D)
OWN = torch.ones(B, 3, D)
IDS = torch.tensor([0, 1, 1, -1, 2, 2])
PAIR = [("a", "b")]

#: Name -> a loss of two towers' features and a scale, a number or a tensor.
LOSSES: dict[str, Callable[[Any, Any, Any], Tensor]] = {
    "clip": lambda x, y, s: mb.ClipLoss()(x, y, s, s),
    "clip, ids": lambda x, y, s: mb.ClipLoss(label_smoothing=0.1)(x, y, s, ids=IDS),
    "siglip": lambda x, y, s: mb.SigLipLoss()(x, y, s, s),
    "infonce": lambda x, y, s: mb.InfoNCELoss(0.1)(x, y, y, queue=y, temperature=s),
    "infonce, own": lambda x, y, s: mb.InfoNCELoss(s)(x, y, OWN.to(y.dtype)),
    "ntxent": lambda x, y, s: mb.NTXentLoss(0.1)(x, y, temperature=s),
    "dcl": lambda x, y, s: mb.DCLLoss(s)(x, y),
    "supcon": lambda x, y, s: mb.SupConLoss(s)(x, IDS, y, IDS),
    "sincere": lambda x, y, s: mb.SincereLoss(s)(x, IDS, y, IDS),
    "distillation": lambda x, y, s: sum(mb.DistillClipLoss()(x, y, s, y, x, 2.0)),
    "matryoshka": lambda x, y, s: mb.MatryoshkaLoss(mb.ClipLoss(), [2, 4])(x, y, s),
    "several modalities": lambda x, y, s: mb.MultiModalLoss(PAIR)({"a": x, "b": y}, s),
}


# --- accepted -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "dtypes", [(torch.bfloat16, torch.float32), (torch.float32, torch.float16)]
)
@pytest.mark.parametrize("name", LOSSES)
def test_towers_of_two_dtypes_under_autocast(name: str, dtypes: Any) -> None:
    x, y = (t.clone().to(d).requires_grad_() for t, d in zip((X, Y), dtypes, strict=True))
    cast = [t.detach().bfloat16() for t in (x, y)]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = LOSSES[name](x, y, 2.0)
        loss.backward()
    # Matryoshka's prefixes are normalised before they are cast.
    torch.testing.assert_close(
        loss, LOSSES[name](*cast, 2.0), rtol=1e-2 if name == "matryoshka" else 0, atol=1e-6
    )
    for features in (x, y):
        assert features.grad is not None
        assert features.grad.dtype == features.dtype
    with pytest.raises(TypeError, match=r"expected torch\.\w+ as .* has, got torch\.\w+"):
        LOSSES[name](x, y, 2.0)


@pytest.mark.parametrize(
    "scale",
    [np.float32(2), np.float64(2), np.float16(2), np.int64(2), np.array(2.0), Fraction(2)],
    ids=lambda scale: type(scale).__name__,
)
@pytest.mark.parametrize("name", LOSSES)
def test_any_real_number(name: str, scale: Any) -> None:
    assert torch.equal(LOSSES[name](X, Y, scale), LOSSES[name](X, Y, 2.0))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("name", LOSSES)
def test_a_scale_of_another_dtype(name: str, dtype: torch.dtype) -> None:
    scale = torch.tensor(2.0, dtype=dtype, requires_grad=True)
    loss = LOSSES[name](X, Y, scale)
    loss.backward()
    assert loss.dtype == torch.float32
    assert scale.grad is not None
    assert scale.grad.dtype == dtype
    assert torch.equal(loss, LOSSES[name](X, Y, 2.0))


def test_numpys_numbers_elsewhere() -> None:
    x, y = X.double(), Y.double()
    for ours, plain in (
        (mb.ClipLoss(label_smoothing=np.float32(0.25)), mb.ClipLoss(label_smoothing=0.25)),
        (mb.InfoNCELoss(np.float32(0.5), margin=np.float64(0.1)), mb.InfoNCELoss(0.5, margin=0.1)),
        (
            mb.MatryoshkaLoss(mb.ClipLoss(), np.array([2, 4]), np.array([1.0, 0.5])),
            mb.MatryoshkaLoss(mb.ClipLoss(), [2, 4], [1.0, 0.5]),
        ),
    ):
        extra = () if isinstance(ours, mb.InfoNCELoss) else (3.0,)
        assert torch.equal(ours(x, y, *extra), plain(x, y, *extra))
        assert repr(ours) == repr(plain)


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


def test_siglip_without_a_bias_as_openclip_takes_it() -> None:
    assert torch.equal(mb.SigLipLoss()(X, Y, 2.0, None), mb.SigLipLoss()(X, Y, 2.0, 0.0))


def test_towers_of_the_same_tensor() -> None:
    x = X.clone().requires_grad_()
    y = X.clone().requires_grad_()
    z = X.clone().requires_grad_()
    mb.ClipLoss()(x, x, 2.0).backward()
    mb.ClipLoss()(y, z, 2.0).backward()
    assert x.grad is not None
    torch.testing.assert_close(x.grad, y.grad + z.grad)


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("name", LOSSES)
def test_features_on_meta(name: str, autocast: bool) -> None:
    """No check reads a value; results have the right shape, dtype and device."""
    x, y, own, ids = (t.to("meta") for t in (X, Y, OWN, IDS))
    x.requires_grad_()
    scale = torch.tensor(0.5, device="meta", requires_grad=True)
    with mock.patch.dict(globals(), OWN=own, IDS=ids), torch.autocast("cpu", enabled=autocast):
        loss = LOSSES[name](x, y, scale)
        loss.backward()
    assert loss.is_meta
    assert loss.dtype == torch.float32
    assert x.grad is not None
    assert x.grad.is_meta
    assert x.grad.shape == x.shape


@pytest.mark.parametrize("name", ["clip", "siglip", "infonce"])
def test_weights_on_meta(name: str) -> None:
    x, y, w = (t.to("meta") for t in (X, Y, torch.ones(B)))
    with mock.patch.dict(globals(), X=x, Y=y):
        assert WEIGHTED[name](w).is_meta


# --- refused --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", LOSSES)
def test_features_that_are_not_dense(name: str) -> None:
    for bad, word in (
        (X.to_sparse(), "sparse_coo"),
        (nested_tensor([X, Y], layout=torch.jagged), "nested"),
        (X.to(torch.complex64), "complex64"),
    ):
        for arguments in ((bad, Y), (X, bad)):
            with pytest.raises((TypeError, ValueError)) as caught:
                LOSSES[name](*arguments, 2.0)
            assert word in str(caught.value)


@pytest.mark.parametrize("name", ["negatives", "queue"])
def test_other_features_that_are_not_dense(name: str) -> None:
    with pytest.raises(TypeError, match=rf"{name}: expected a dense tensor, got layout"):
        mb.InfoNCELoss(0.1)(X, Y, **{name: Y.to_sparse()})


WEIGHTED: dict[str, Callable[[Tensor], Tensor]] = {
    "clip": lambda w: mb.ClipLoss()(X, Y, 2.0, weights=w),
    "siglip": lambda w: mb.SigLipLoss()(X, Y, 2.0, -1.0, weights=w),
    "infonce": lambda w: mb.InfoNCELoss(0.5)(X, Y, weights=w),
}


@pytest.mark.parametrize("bad", [-1.0, -1e-30, float("nan"), float("inf")])
@pytest.mark.parametrize("name", WEIGHTED)
def test_weights_that_are_negative_or_no_numbers(name: str, bad: float) -> None:
    weights = torch.ones(B)
    weights[2] = bad
    with pytest.raises(ValueError, match=r"weights: expected finite, non-negative numbers, got"):
        WEIGHTED[name](weights)
    WEIGHTED[name](torch.zeros(B))


@pytest.mark.parametrize("loss_class", [mb.InfoNCELoss, mb.NTXentLoss, mb.DCLLoss, mb.SupConLoss])
@pytest.mark.parametrize("bad", [0.0, -0.1, float("nan"), float("inf")])
def test_temperatures_that_are_not_positive(loss_class: Any, bad: float) -> None:
    other = IDS if loss_class is mb.SupConLoss else Y
    for made in (bad, torch.tensor(bad), torch.tensor([bad]).half(), np.float32(bad)):
        with pytest.raises(ValueError, match="temperature: expected a"):
            loss_class(made)
        with pytest.raises(ValueError, match="temperature: expected a"):
            loss_class(0.1)(X, other, temperature=made)
    learnt = nn.Parameter(torch.tensor(0.1))
    loss = loss_class(learnt)
    with torch.no_grad():
        learnt.fill_(bad)  # an optimizer can do this
    with pytest.raises(ValueError, match="temperature: expected a"):
        loss(X, other)
    plain = loss_class(0.1)
    plain.temperature = bad
    with pytest.raises(ValueError, match="temperature: expected a"):
        plain(X, other)


def test_values_are_not_checked_while_tracing() -> None:
    def loss(x: Tensor, w: Tensor, t: Tensor) -> Tensor:
        return mb.InfoNCELoss(0.1)(x, x, weights=w, temperature=t, ids=IDS)

    weights, temperature = torch.ones(B), torch.tensor(0.5)
    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(
        compiled(X, weights, temperature), loss(X, weights, temperature), rtol=1e-6, atol=1e-6
    )
    with FakeTensorMode() as mode:
        x, w, t = (mode.from_tensor(v) for v in (X, weights, temperature))
        mb.ClipLoss()(x, x, t, weights=w, ids=mode.from_tensor(IDS))
        mb.SigLipLoss()(x, x, t, t, weights=w)


def test_a_string_is_no_pair_of_modalities() -> None:
    for pairs in (["ab"], "ab", [("a", "b"), "ab"]):
        with pytest.raises(TypeError, match=r"pairs: expected pairs of names, got '"):
            mb.MultiModalLoss(pairs)  # type: ignore[arg-type]


def test_the_same_tower_twice() -> None:
    with pytest.raises(ValueError, match=r"same_tower: expected each name once, got \('query', 'q"):
        mb.InfoNCELoss(0.1, same_tower=("query", "query"))
    towers = mb.InfoNCELoss(0.1, same_tower=(name for name in ("query", "positive")))  # type: ignore[arg-type]
    assert towers.same_tower == ("query", "positive")


@pytest.mark.parametrize("loss_class", [mb.InfoNCELoss, mb.NTXentLoss, mb.DCLLoss, mb.SupConLoss])
def test_errors_name_the_class_that_was_called(loss_class: Any) -> None:
    for arguments, options in (((), {}), ((0.1,), {"temprature": 1}), ((0.1, 0.2), {})):
        with pytest.raises(TypeError, match=loss_class.__name__):
            loss_class(*arguments, **options)


# --- unused arguments -----------------------------------------------------------------------------


@pytest.mark.parametrize("bias", [-10.0, float("nan"), float("inf")])
@pytest.mark.parametrize("shape", [(), (1,)])
def test_a_bias_that_cancels_has_a_gradient_of_zero(shape: Any, bias: float) -> None:
    leaf = torch.full(shape, bias, dtype=torch.float64, requires_grad=True)
    for options in ({}, {"ids": IDS}, {"weights": torch.zeros(B)}):
        leaf.grad = None
        loss = mb.ClipLoss()(X, Y, 2.0, leaf, **options)
        assert loss.dtype == torch.float32
        assert loss == mb.ClipLoss()(X, Y, 2.0, **options)
        loss.backward()
        assert leaf.grad is not None
        assert torch.equal(leaf.grad, torch.zeros(shape, dtype=torch.float64))
    loss = mb.MultiModalLoss(PAIR)({"a": X, "b": Y}, 2.0, leaf)
    assert torch.autograd.grad(loss, leaf)[0] == 0


@pytest.mark.parametrize("loss_class", [mb.InfoNCELoss, mb.NTXentLoss, mb.DCLLoss, mb.SupConLoss])
def test_a_temperature_that_a_call_replaces_has_a_gradient_of_zero(loss_class: Any) -> None:
    loss, other = (
        loss_class(nn.Parameter(torch.tensor([0.3]))),
        IDS if loss_class is mb.SupConLoss else Y,
    )
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
