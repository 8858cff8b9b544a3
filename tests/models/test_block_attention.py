"""Attention in blocks against float64, on a GPU or in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

pytest.importorskip("triton")
from megabatch.models.block_attention import block_attention
from tests.similarity.triton import DEVICE, GPU, HALVES

pytestmark = [pytest.mark.gpu] if GPU else []


def exact(qkv: Tensor, causal: bool) -> Tensor:
    q, k, v = (part.transpose(1, 2) for part in qkv.double().unbind(2))
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal).transpose(1, 2)


def made(length: int, width: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Queries, keys and values of two heads with large logits, and a gradient of the output."""
    shape = (2, length, 3, 2, width)
    qkv = torch.randn(shape, device=DEVICE, dtype=dtype) * 2
    return qkv.requires_grad_(), torch.randn(2, length, 2, width, device=DEVICE, dtype=dtype)


@pytest.mark.parametrize("dtype", HALVES if GPU else [torch.float16, torch.float32])
@pytest.mark.parametrize(("length", "width"), [(64, 32), (65, 32), (100, 64), (128, 32), (197, 32)])
@pytest.mark.parametrize("own", [64, 128])
@pytest.mark.parametrize("causal", [False, True])
def test_output_and_gradient(
    length: int,
    width: int,
    dtype: torch.dtype,
    causal: bool,
    own: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("megabatch.models.block_attention.OWN", own)
    qkv, upstream = made(length, width, dtype)
    out, _ = block_attention(qkv, causal)
    truth = exact(qkv, causal)
    (found,) = torch.autograd.grad(out, qkv, upstream)
    (expected,) = torch.autograd.grad(truth, qkv, upstream.double())
    for one, two in ((out, truth), (found, expected)):
        error = (one.double() - two.double()).norm() / two.double().norm()
        assert error < (2e-6 if dtype == torch.float32 else torch.finfo(dtype).eps)


@pytest.mark.parametrize("causal", [False, True])
def test_the_operator_for_tracers(causal: bool) -> None:
    qkv, _ = made(70, 32, torch.float32)
    torch.library.opcheck(block_attention.custom, (qkv, causal))


def test_values_of_any_strides() -> None:
    qkv, upstream = made(70, 32, torch.float32)
    strided = qkv.detach().transpose(0, 1).contiguous().transpose(0, 1).requires_grad_()
    both = [block_attention(t, True)[0] for t in (qkv, strided)]
    assert torch.equal(*both)
    spread = upstream.repeat_interleave(2, 3)[..., ::2]
    grads = [
        torch.autograd.grad(o, t, g)[0]
        for o, t, g in zip(both, (qkv, strided), (upstream, spread), strict=True)
    ]
    assert torch.equal(*grads)
