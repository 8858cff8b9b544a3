"""Convolutions of patches: the product of patches and weights that half precision computes."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path

import open_clip
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from megabatch.models import create
from megabatch.models.patches import PatchConvolution, multiply_patches
from tests.models.tiny import TINY
from tests.models.tiny_clip import save_tiny_clip


def changed(layer: nn.Conv2d) -> nn.Conv2d:
    """A copy of a layer of which `multiply_patches` was told."""
    model = nn.Sequential(copy.deepcopy(layer))
    multiply_patches(model)
    assert isinstance(model[0], nn.Conv2d)
    return model[0]


def with_gradients(output: Tensor, *inputs: Tensor) -> list[Tensor]:
    """The output, and the gradients of a sum of its powers."""
    return [output, *torch.autograd.grad(output.double().pow(3).sum(), inputs)]


@given(
    n=st.integers(0, 3),
    channels=st.integers(1, 4),
    width=st.integers(1, 9),
    kernel=st.tuples(st.integers(8, 11), st.integers(8, 11)),
    size=st.tuples(st.integers(11, 40), st.integers(11, 40)),
    bias=st.booleans(),
)
@settings(max_examples=40)
def test_the_product_is_the_convolution(
    n: int, channels: int, width: int, kernel: tuple[int, int], size: tuple[int, int], bias: bool
) -> None:
    ours = changed(nn.Conv2d(channels, width, kernel, kernel, bias=bias, dtype=torch.float64))
    assert isinstance(ours, PatchConvolution)
    images = torch.randn(n, channels, *size, dtype=torch.float64, requires_grad=True)
    inputs = images, *ours.parameters()
    expected = with_gradients(nn.Conv2d.forward(ours, images), *inputs)
    found = with_gradients(ours.product(images, torch.float64), *inputs)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_as_exact_as_a_convolution(dtype: torch.dtype) -> None:
    own = nn.Conv2d(3, 64, 16, 16, dtype=dtype)
    ours = changed(own)
    images = torch.randn(5, 3, 64, 80, dtype=dtype)
    exact = copy.deepcopy(own).double()(images.double())
    error, theirs = ((layer(images).double() - exact).square().mean() for layer in (ours, own))
    assert ours(images).dtype == dtype
    assert error <= 1.1 * theirs


def test_autocast_decides() -> None:
    own = nn.Conv2d(3, 20, 8, 8)
    ours = changed(own)
    images = torch.randn(2, 3, 24, 32)
    assert torch.equal(ours(images), own(images))  # float32: torch's own convolution
    assert torch.equal(ours(images[0]), own(images[0]))
    with torch.autocast("cpu", torch.bfloat16):
        features = ours(images)
        assert torch.equal(features, ours.product(images, torch.bfloat16))  # type: ignore[operator]
        exact = copy.deepcopy(ours).double()(images.double())
    assert (features.dtype, exact.dtype) == (torch.bfloat16, torch.float64)
    assert features.flatten(2).transpose(1, 2).is_contiguous()
    torch.testing.assert_close(features.double(), exact, rtol=0.02, atol=0.02)


def test_it_is_one_graph() -> None:
    ours = changed(nn.Conv2d(3, 20, 8, 8))
    compiled = torch.compile(ours, backend="aot_eager", fullgraph=True)
    images = torch.randn(2, 3, 24, 32)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(compiled(images), ours(images))


@pytest.mark.parametrize(
    "layer",
    [
        nn.Conv2d(3, 8, 4, 4),
        nn.Conv2d(3, 8, 8, 4),
        nn.Conv2d(3, 8, 8, (8, 4)),
        nn.Conv2d(3, 8, 8, 8, padding=1),
        nn.Conv2d(3, 8, 8, 8, dilation=2),
        nn.Conv2d(4, 8, 8, 8, groups=2),
        nn.ConvTranspose2d(3, 8, 8, 8),
    ],
)
def test_other_convolutions_stay(layer: nn.Module) -> None:
    model = nn.Sequential(copy.deepcopy(layer))
    multiply_patches(model)
    assert type(model[0]) is type(layer)


def test_models_have_them_and_keep_their_weights(tmp_path: Path) -> None:
    torch.manual_seed(3)
    module = create(TINY).module
    torch.manual_seed(3)
    theirs = open_clip.create_model(TINY)
    assert isinstance(module.visual.conv1, PatchConvolution)  # type: ignore[union-attr]
    torch.testing.assert_close(module.state_dict(), theirs.state_dict(), rtol=0, atol=0)
    for kind in ("clip", "siglip"):
        theirs = create(f"hf:{save_tiny_clip(tmp_path / kind, kind)}").module
        assert any(isinstance(layer, PatchConvolution) for layer in theirs.modules())


def test_copies_are_of_the_class() -> None:
    ours = changed(nn.Conv2d(3, 20, 8, 8, padding="valid")).bfloat16()
    images = torch.randn(2, 3, 24, 32, dtype=torch.bfloat16)
    for copied in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
        assert type(copied) is PatchConvolution
        assert torch.equal(copied(images), ours(images))
