"""The MLP with kernels of GELU against float64, on a GPU or in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

pytest.importorskip("triton")
from megabatch.models.mlp import gelu, gelu_gradient, mlp
from tests.models.attention import DTYPES, MARKS
from tests.similarity.triton import DEVICE

pytestmark = MARKS


def with_gradient(x: Tensor, upstream: Tensor) -> tuple[Tensor, Tensor]:
    """GELU and its gradient by the kernels; checks the gradient's sums, which are not rounded."""
    again, gradient, sums = gelu_gradient(x, upstream)
    value = gelu(x)
    assert torch.equal(again.nan_to_num(), value.nan_to_num())
    exact = torchs(x.double(), upstream.double())[1]
    off = (sums.double().sum(0) - exact.sum(0)).abs()
    assert (off <= 1e-5 * exact.abs().sum(0)).logical_or(exact.sum(0).isnan()).all()
    return value, gradient


def torchs(x: Tensor, upstream: Tensor) -> tuple[Tensor, Tensor]:
    x = x.detach().requires_grad_()
    value = F.gelu(x)
    (gradient,) = torch.autograd.grad(value, x, upstream)
    return value.detach(), gradient


def test_float32_within_its_bound() -> None:
    x = torch.linspace(-9, 9, 128 * 300, device=DEVICE).view(300, 128)
    value, gradient = with_gradient(x, torch.ones_like(x))
    wide = x.double()
    tail = torch.special.erfc(-wide / 2**0.5) / 2
    bell = torch.exp(-(wide**2) / 2) / (2 * torch.pi) ** 0.5
    assert ((value - wide * tail).abs() <= 2e-5 * (wide * tail).abs() + 1e-14).all()
    assert (
        (gradient - tail - wide * bell).abs() <= 2e-5 * (tail + wide.abs() * bell) + 1e-14
    ).all()


@pytest.mark.parametrize("dtype", DTYPES[:-1] if DEVICE == "cpu" else DTYPES)
def test_no_less_exact_than_torchs(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    x, upstream = (2 * torch.randn(2, 260, 256, generator=generator)).to(DEVICE, dtype)
    exact = torchs(x.double(), upstream.double())
    found, expected = with_gradient(x, upstream), torchs(x, upstream)
    for truth, one, two in zip(exact, found, expected, strict=True):
        assert (one - truth).norm() <= 1.001 * (two - truth).norm()
        assert (one - truth).abs().max() <= 1.001 * (two - truth).abs().max()


@pytest.mark.parametrize("dtype", DTYPES)
def test_values_at_the_ends(dtype: torch.dtype) -> None:
    largest = torch.finfo(dtype).max
    x = torch.tensor([0.0, largest, -largest, float("nan")], device=DEVICE, dtype=dtype)
    x = x.repeat(32)[None]
    upstream = torch.ones_like(x)
    for one, two in zip(
        with_gradient(x, upstream), torchs(x.double(), upstream.double()), strict=True
    ):
        rtol = 1e-5 if dtype == torch.float32 else 0.0
        torch.testing.assert_close(one[0, :3].double(), two[0, :3], rtol=rtol, atol=0.0)
        assert one[0, 3].isnan()


@pytest.mark.parametrize("rows", [1, 16, 255, 600])
@pytest.mark.parametrize("dtype", DTYPES)
def test_output_and_gradients_are_no_less_exact_than_torchs(dtype: torch.dtype, rows: int) -> None:
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(24, 256), nn.GELU(), nn.Linear(256, 24)).to(DEVICE, dtype)
    x = torch.randn(rows, 2, 24, device=DEVICE).to(dtype).requires_grad_()
    upstream = torch.randn(rows, 2, 24, device=DEVICE).to(dtype)

    def results(out: Tensor) -> list[Tensor]:
        grads = torch.autograd.grad(out, [x, *layers.parameters()], upstream.to(out.dtype))
        return [out.detach(), *grads]

    first, _, last = layers
    own = results(mlp(x, (first.weight, first.bias), (last.weight, last.bias)))
    plain = results(layers(x))
    exact = [t.double() for t in results(layers.double()(x.double()))]
    for truth, one, two in zip(exact, own, plain, strict=True):
        scale = truth.norm()
        tolerance = 1e-5 if dtype == torch.float32 else 1e-3
        assert (one - truth).norm() <= 1.05 * (two - truth).norm() + tolerance * scale


def test_the_operators_for_tracers() -> None:
    x = torch.randn(20, 128, device=DEVICE)
    torch.library.opcheck(gelu.custom, (x,))
    torch.library.opcheck(gelu_gradient.custom, (x, torch.randn_like(x)))


def test_values_of_any_strides() -> None:
    x, upstream = torch.randn(2, 128, 20, device=DEVICE)
    strided = with_gradient(x.T, upstream.T)
    for one, two in zip(strided, with_gradient(x.T.contiguous(), upstream.T.clone()), strict=True):
        assert torch.equal(one, two)


def test_what_waits_for_the_backward_pass() -> None:
    """Its input, GELU's, and the weights, in a graph too."""
    x = torch.randn(32, 64, device=DEVICE, requires_grad=True)
    layers = nn.Linear(64, 256).to(DEVICE), nn.Linear(256, 64).to(DEVICE)

    def run(x: Tensor) -> Tensor:
        return mlp(x, *((layer.weight, layer.bias) for layer in layers))

    try:
        for function in (run, torch.compile(run, backend="aot_eager_decomp_partition")):
            function(x).sum().backward()
            sizes: list[int] = []
            with torch.autograd.graph.saved_tensors_hooks(
                lambda t, sizes=sizes: (sizes.append(t.numel()), t)[1], lambda t: t
            ):
                function(x)
            # A graph may keep views of the weights.
            assert sum(sizes) <= 32 * 64 + 32 * 256 + 2 * 64 * 256
    finally:
        torch.compiler.reset()


def test_graphs_have_its_kernels_and_the_same_results() -> None:
    x = torch.randn(6, 8, 64, device=DEVICE, requires_grad=True)
    layers = nn.Linear(64, 128).to(DEVICE), nn.Linear(128, 64).to(DEVICE)

    def run(x: Tensor) -> Tensor:
        return mlp(x, *((layer.weight, layer.bias) for layer in layers))

    try:
        found = []
        for function in (run, torch.compile(run, backend="aot_eager", dynamic=True)):
            for columns in (8, 5):
                out = function(x[:, :columns])
                found.append((out, *torch.autograd.grad(out.square().sum(), [x, layers[0].bias])))
        for one, two in zip(found[:2], found[2:], strict=True):
            torch.testing.assert_close(one, two, rtol=1e-6, atol=1e-6)
    finally:
        torch.compiler.reset()
