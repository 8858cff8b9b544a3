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
def short_attention(
    qkv: Tensor,
    causal: bool,
    seen: Tensor | None = None,
    dropout: float = 0.0,
    seed: Tensor | None = None,
) -> Tensor:
    """Attention (n, length, heads, width) of queries, keys and values (n, length, 3, heads, width).

    In float16 or bfloat16, with sums in float32. The logits' scale is 1 / sqrt(width).

    Args:
        qkv: see above.
        causal: whether tokens see only those before them.
        seen: bool (n, length), False for tokens that none sees, such as padding; a sequence of
            these alone gives zeros. None: all are seen.
        dropout: the share of probabilities that are dropped; others grow by 1 / (1 - dropout).
        seed: of what is dropped, int64 (1,); needed with dropout.
    """
    out = _like_queries(qkv)
    _launch(attention_forward, qkv, causal, seen, dropout, seed, out=out)
    return out


@operator("short_attention_backward")
def short_attention_gradient(
    qkv: Tensor,
    dout: Tensor,
    causal: bool,
    seen: Tensor | None,
    dropout: float,
    seed: Tensor | None,
) -> Tensor:
    """The gradient of qkv from that of the output."""
    dqkv = torch.empty_like(qkv, memory_format=torch.contiguous_format)
    options = (causal, seen, dropout, seed)
    _launch(attention_backward, qkv, *options, dout=dout.contiguous(), dqkv=dqkv)
    return dqkv


def _like_queries(qkv: Tensor) -> Tensor:
    return qkv.new_empty(*qkv.shape[:2], *qkv.shape[3:])


def _launch(
    kernel: Any, qkv: Tensor, causal: bool, seen: Any, dropout: float, seed: Any, **tensors: Tensor
) -> None:
    n, length, _, heads, width = qkv.shape
    block = max(16, triton.next_power_of_2(length))
    with torch.cuda.device_of(qkv):
        kernel.launch(
            n * heads, qkv=qkv.contiguous(), **tensors, n=n, size=length,
            seen=None if seen is None else seen.contiguous(), seed=seed if dropout else None,
            HEADS=heads, WIDTH=width, BLOCK=block, CAUSAL=causal, DROPOUT=dropout,
            num_warps=_WARPS[block],
        )  # fmt: skip


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    qkv, ctx.causal, seen, ctx.dropout, seed = inputs + (None, 0.0, None)[len(inputs) - 2 :]
    ctx.save_for_backward(qkv, seen, seed)


def _gradient(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
    qkv, seen, seed = ctx.saved_tensors
    dqkv = short_attention_gradient(qkv, dout, ctx.causal, seen, ctx.dropout, seed)
    return dqkv, *(None,) * (len(ctx.needs_input_grad) - 1)


short_attention.register_fake(lambda qkv, *_: _like_queries(qkv))
short_attention_gradient.register_fake(
    lambda qkv, *_: torch.empty_like(qkv, memory_format=torch.contiguous_format)
)
short_attention.register_autograd(_gradient, setup_context=_save)


@kernel
def attention_forward(
    qkv, out, n, size, seen, seed,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, CAUSAL: tl.constexpr,
    DROPOUT: tl.constexpr,
):  # fmt: skip
    """One head's output for one sequence."""
    place, inside = _places(n, size, HEADS, WIDTH, BLOCK, 1)
    _, _, v, p, _ = _probabilities(qkv, n, size, seen, HEADS, WIDTH, BLOCK, CAUSAL)
    p *= _kept(seed, BLOCK, DROPOUT)
    tl.store(out + place, tl.dot(p.to(v.dtype), v).to(v.dtype), mask=inside)


@kernel
def attention_backward(
    qkv, dout, dqkv, n, size, seen, seed,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, CAUSAL: tl.constexpr,
    DROPOUT: tl.constexpr,
):  # fmt: skip
    """The gradients of the same head's queries, keys and values."""
    of_out, inside = _places(n, size, HEADS, WIDTH, BLOCK, 1)
    q, k, v, p, place = _probabilities(qkv, n, size, seen, HEADS, WIDTH, BLOCK, CAUSAL)
    do = tl.load(dout + of_out, mask=inside, other=0.0)
    kept = _kept(seed, BLOCK, DROPOUT)
    dv = tl.dot(tl.trans((p * kept).to(v.dtype)), do)
    dp = tl.dot(do, tl.trans(v)) * kept
    ds = (p * (dp - tl.sum(p * dp, 1)[:, None]) * WIDTH**-0.5).to(v.dtype)
    tl.store(dqkv + place, tl.dot(ds, k).to(v.dtype), mask=inside)
    tl.store(dqkv + place + HEADS * WIDTH, tl.dot(tl.trans(ds), q).to(v.dtype), mask=inside)
    tl.store(dqkv + place + 2 * HEADS * WIDTH, dv.to(v.dtype), mask=inside)


@triton.jit
def _probabilities(
    qkv, n, size, seen,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    """Queries, keys, values, their probabilities (queries x keys), and the queries' places."""
    place, inside = _places(n, size, HEADS, WIDTH, BLOCK, 3)
    q = tl.load(qkv + place, mask=inside, other=0.0)
    k = tl.load(qkv + place + HEADS * WIDTH, mask=inside, other=0.0)
    v = tl.load(qkv + place + 2 * HEADS * WIDTH, mask=inside, other=0.0)
    rows = tl.arange(0, BLOCK)
    shown = (rows < size)[None, :]
    if CAUSAL:
        shown = shown & (rows[None, :] <= rows[:, None])
    if seen is not None:
        tokens = (tl.program_id(0) % n).to(tl.int64) * size + rows
        shown = shown & (tl.load(seen + tokens, mask=rows < size, other=0) != 0)[None, :]
    s = tl.where(shown, tl.dot(q, tl.trans(k)) * (WIDTH**-0.5 * LOG2E), float("-inf"))
    highest = tl.max(s, 1)
    if seen is not None:
        highest = tl.maximum(highest, -1e30)  # not infinite where nothing is shown
    p = tl.exp2(s - highest[:, None])
    total = tl.sum(p, 1)
    if seen is not None:
        total = tl.maximum(total, 1.0)  # at least that where something is shown
    return q, k, v, p / total[:, None], place


@triton.jit
def _kept(seed, BLOCK: tl.constexpr, DROPOUT: tl.constexpr):
    """The factors by which dropout multiplies probabilities: 0 or 1 / (1 - DROPOUT)."""
    if DROPOUT == 0:
        return 1.0
    else:  # Triton compiles what follows a `return` of one branch
        # Four numbers at a time take a third of the instructions.
        rows, cols = tl.arange(0, BLOCK), tl.arange(0, BLOCK // 4)
        first = tl.program_id(0).to(tl.int64) * (BLOCK * BLOCK // 4)
        places = first + rows[:, None] * (BLOCK // 4) + cols[None, :]
        a, b, c, d = tl.rand4x(tl.load(seed), places)
        drawn = tl.reshape(tl.join(tl.join(a, b), tl.join(c, d)), [BLOCK, BLOCK])
        return tl.where(drawn < DROPOUT, 0.0, 1 / (1 - DROPOUT))


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
