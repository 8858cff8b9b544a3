"""Checks of attention kernels against float64, on a GPU or in Triton's interpreter."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.similarity.triton import DEVICE, GPU, HALVES

#: Attention of qkv (n, length, 3, heads, width), causal or not.
Attention = Callable[[Tensor, bool], Tensor]
MARKS = [pytest.mark.gpu] if GPU else []
DTYPES = HALVES if GPU else [torch.float16, torch.float32]


def made(length: int, width: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Queries, keys and values of two heads with large logits, and a gradient of the output."""
    shape = (3, length, 3, 2, width)
    qkv = torch.randn(shape, device=DEVICE, dtype=dtype) * 2
    return qkv.requires_grad_(), torch.randn(3, length, 2, width, device=DEVICE, dtype=dtype)


def check_output_and_gradient(
    attention: Attention, length: int, width: int, dtype: torch.dtype, causal: bool
) -> None:
    qkv, upstream = made(length, width, dtype)
    q, k, v = (part.transpose(1, 2) for part in qkv.double().unbind(2))
    truth = F.scaled_dot_product_attention(q, k, v, is_causal=causal).transpose(1, 2)
    out = attention(qkv, causal)
    (found,) = torch.autograd.grad(out, qkv, upstream)
    (expected,) = torch.autograd.grad(truth, qkv, upstream.double())
    for one, two in ((out, truth), (found, expected)):
        error = (one.double() - two.double()).norm() / two.double().norm()
        assert error < (2e-6 if dtype == torch.float32 else torch.finfo(dtype).eps)


def check_values_of_any_strides(attention: Attention, length: int) -> None:
    qkv, upstream = made(length, 32, torch.float32)
    strided = qkv.detach().transpose(0, 1).contiguous().transpose(0, 1).requires_grad_()
    both = [attention(t, True) for t in (qkv, strided)]
    assert torch.equal(*both)
    spread = upstream.repeat_interleave(2, 3)[..., ::2]
    grads = [
        torch.autograd.grad(o, t, g)[0]
        for o, t, g in zip(both, (qkv, strided), (upstream, spread), strict=True)
    ]
    assert torch.equal(*grads)
