"""GELU of graphs against float64 and torch's own."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megabatch.models.gelu import _GELU, GraphGELU, normal

HALVES = [torch.float16, torch.bfloat16]


def with_gradient(function: object, x: Tensor) -> tuple[Tensor, Tensor]:
    x = x.detach().requires_grad_()
    value = function(x)  # type: ignore[operator]
    (gradient,) = torch.autograd.grad(value.sum(), x)
    return value.detach(), gradient


def test_float32_within_its_bound() -> None:
    x = torch.linspace(-9, 9, 400_001)
    distribution, density = normal(x)
    truth = torch.special.erfc(-x.double() / 2**0.5) / 2
    assert ((distribution - truth).abs() <= 3e-6 * truth).all()
    bell = torch.exp(-(x.double() ** 2) / 2) / (2 * torch.pi) ** 0.5
    assert ((density - bell).abs() <= 3e-6 * bell).all()


@pytest.mark.parametrize("dtype", HALVES)
def test_no_less_exact_than_torchs(dtype: torch.dtype) -> None:
    x = (torch.randn(200_000, generator=torch.Generator().manual_seed(0)) * 2).to(dtype)
    exact = with_gradient(F.gelu, x.double())
    own, torchs = (with_gradient(function, x) for function in (_GELU.apply, F.gelu))
    for truth, one, two in zip(exact, own, torchs, strict=True):
        assert (one - truth).norm() <= 1.001 * (two - truth).norm()
        assert (one - truth).abs().max() <= 1.001 * (two - truth).abs().max()


@pytest.mark.parametrize("dtype", HALVES)
def test_values_at_the_ends(dtype: torch.dtype) -> None:
    largest = torch.finfo(dtype).max
    x = torch.tensor([0.0, largest, -largest, float("nan")], dtype=dtype)
    for one, two in zip(
        with_gradient(_GELU.apply, x), with_gradient(F.gelu, x.double()), strict=True
    ):
        assert torch.equal(one[:3].double(), two[:3])
        assert one[3].isnan()


def test_only_in_graphs_and_in_16_bits() -> None:
    layer = GraphGELU()
    compiled = torch.compile(layer, backend="aot_eager")
    x = torch.linspace(-4, 4, 1000)
    try:
        for dtype in (*HALVES, torch.float32):
            own = F.gelu if dtype == torch.float32 else _GELU.apply
            assert torch.equal(layer(x.to(dtype)), F.gelu(x.to(dtype)))
            assert torch.equal(compiled(x.to(dtype)), own(x.to(dtype)))
    finally:
        torch.compiler.reset()


def test_graphs_for_all_shapes_have_no_numbers_as_inputs() -> None:
    inputs: list[list[Tensor]] = []

    def backend(graph: torch.fx.GraphModule, given: list[Tensor]) -> object:
        inputs.append([one for one in given if isinstance(one, Tensor)])
        return graph.forward

    compiled = torch.compile(GraphGELU(), backend=backend, dynamic=True)
    try:
        x = torch.randn(6, 8, dtype=torch.bfloat16, requires_grad=True)
        compiled(x).sum().backward()
    finally:
        torch.compiler.reset()
    assert [[one.shape for one in given] for given in inputs] == [[x.shape]]


def test_what_a_graph_keeps() -> None:
    """The input alone, as of torch's GELU: the second product gets its input again."""
    kept = []
    for activation in (nn.GELU(), GraphGELU()):
        torch.manual_seed(0)
        layers = nn.Sequential(nn.Linear(64, 256), activation, nn.Linear(256, 64)).bfloat16()
        compiled = torch.compile(layers, backend="aot_eager_decomp_partition")
        x, sizes = torch.randn(32, 64, dtype=torch.bfloat16, requires_grad=True), []
        try:
            compiled(x).sum().backward()
            with torch.autograd.graph.saved_tensors_hooks(
                lambda t, sizes=sizes: (sizes.append(t.nbytes), t)[1], lambda t: t
            ):
                compiled(x)
        finally:
            torch.compiler.reset()
        kept.append(sum(sizes))
    assert kept[0] == kept[1] > 0
