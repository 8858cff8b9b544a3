"""Attention of sequences of at most 64 tokens by Triton kernels.

A program holds one head's whole sequence: there is no loop and no running sum, and the backward
pass needs no statistics of the forward pass. On one H200, both passes of 2,048 images of 50 tokens
and 12 heads of 64 took 0.57 ms in an experiment with the same form, and 1.87 to 3.7 by torch's
kernels (benchmarks/results/tower-experiments.json). Whole steps of ViT-B/32 became 1.11 times as
fast (benchmarks/results/fast-blocks.json).
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from megabatch.similarity.ops import operator
from megabatch.similarity.triton.launch import kernel
from megabatch.similarity.triton.tiles import LOG2E

LONGEST = 64
#: Widths of a head.
WIDTHS: tuple[int, ...] = (32, 64)
#: Warps by the number of tokens in a program.
_WARPS = {16: 1, 32: 2, 64: 4}


@operator("short_attention")
def short_attention(qkv: Tensor, causal: bool) -> Tensor:
    """Attention (n, length, heads, width) of queries, keys and values (n, length, 3, heads, width).

    In float16 or bfloat16, with sums in float32. The logits' scale is 1 / sqrt(width).
    """
    out = _like_queries(qkv)
    _launch(attention_forward, qkv, causal, out=out)
    return out


@operator("short_attention_backward")
def short_attention_gradient(qkv: Tensor, dout: Tensor, causal: bool) -> Tensor:
    """The gradient of qkv from that of the output."""
    dqkv = torch.empty_like(qkv, memory_format=torch.contiguous_format)
    _launch(attention_backward, qkv, causal, dout=dout.contiguous(), dqkv=dqkv)
    return dqkv


def _like_queries(qkv: Tensor) -> Tensor:
    return qkv.new_empty(*qkv.shape[:2], *qkv.shape[3:])


def _launch(kernel: Any, qkv: Tensor, causal: bool, **tensors: Tensor) -> None:
    n, length, _, heads, width = qkv.shape
    block = max(16, triton.next_power_of_2(length))
    with torch.cuda.device_of(qkv):
        kernel.launch(
            n * heads, qkv=qkv.contiguous(), **tensors, n=n, size=length,
            HEADS=heads, WIDTH=width, BLOCK=block, CAUSAL=causal, num_warps=_WARPS[block],
        )  # fmt: skip


def _save(ctx: Any, inputs: tuple[Tensor, bool], output: Tensor) -> None:
    qkv, ctx.causal = inputs
    ctx.save_for_backward(qkv)


def _gradient(ctx: Any, dout: Tensor) -> tuple[Tensor, None]:
    (qkv,) = ctx.saved_tensors
    return short_attention_gradient(qkv, dout, ctx.causal), None


short_attention.register_fake(lambda qkv, causal: _like_queries(qkv))
short_attention_gradient.register_fake(
    lambda qkv, dout, causal: torch.empty_like(qkv, memory_format=torch.contiguous_format)
)
short_attention.register_autograd(_gradient, setup_context=_save)


@kernel
def attention_forward(
    qkv, out, n, size,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    """One head's output for one sequence."""
    place, inside = _places(n, size, HEADS, WIDTH, BLOCK, 1)
    _, _, v, p, _ = _probabilities(qkv, n, size, HEADS, WIDTH, BLOCK, CAUSAL)
    tl.store(out + place, tl.dot(p.to(v.dtype), v).to(v.dtype), mask=inside)


@kernel
def attention_backward(
    qkv, dout, dqkv, n, size,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    """The gradients of the same head's queries, keys and values."""
    of_out, inside = _places(n, size, HEADS, WIDTH, BLOCK, 1)
    q, k, v, p, place = _probabilities(qkv, n, size, HEADS, WIDTH, BLOCK, CAUSAL)
    do = tl.load(dout + of_out, mask=inside, other=0.0)
    dv = tl.dot(tl.trans(p.to(v.dtype)), do)
    dp = tl.dot(do, tl.trans(v))
    ds = (p * (dp - tl.sum(p * dp, 1)[:, None]) * WIDTH**-0.5).to(v.dtype)
    tl.store(dqkv + place, tl.dot(ds, k).to(v.dtype), mask=inside)
    tl.store(dqkv + place + HEADS * WIDTH, tl.dot(tl.trans(ds), q).to(v.dtype), mask=inside)
    tl.store(dqkv + place + 2 * HEADS * WIDTH, dv.to(v.dtype), mask=inside)


@triton.jit
def _probabilities(
    qkv, n, size,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    """Queries, keys, values, their probabilities (queries x keys), and the queries' places."""
    place, inside = _places(n, size, HEADS, WIDTH, BLOCK, 3)
    q = tl.load(qkv + place, mask=inside, other=0.0)
    k = tl.load(qkv + place + HEADS * WIDTH, mask=inside, other=0.0)
    v = tl.load(qkv + place + 2 * HEADS * WIDTH, mask=inside, other=0.0)
    rows = tl.arange(0, BLOCK)
    seen = (rows < size)[None, :]
    if CAUSAL:
        seen = seen & (rows[None, :] <= rows[:, None])
    s = tl.where(seen, tl.dot(q, tl.trans(k)) * (WIDTH**-0.5 * LOG2E), float("-inf"))
    p = tl.exp2(s - tl.max(s, 1)[:, None])
    return q, k, v, p / tl.sum(p, 1)[:, None], place


@triton.jit
def _places(
    n, size, HEADS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr
):
    """Offsets of this program's tokens in tensors of so many parts, and whether they exist."""
    sequence, head = tl.program_id(0) % n, tl.program_id(0) // n
    rows, cols = tl.arange(0, BLOCK), tl.arange(0, WIDTH)
    tokens = sequence.to(tl.int64) * size + rows
    place = tokens[:, None] * (PARTS * HEADS * WIDTH) + head * WIDTH + cols[None, :]
    return place, (rows < size)[:, None]
