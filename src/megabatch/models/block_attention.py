"""Attention of sequences of 65 to 640 tokens by Triton kernels.

A program has a block of one head's queries, and goes through the keys (Dao 2023, arXiv 2307.08691);
in the backward pass it has a block of queries, then another one a block of keys. Blocks are small,
as torch's kernels compute three blocks of 128 for the 257 tokens of a ViT-L/14, and what remains
after whole blocks is a smaller one. On one H200, both passes of 512 images of 257 tokens and 16
heads of 64 took 2.5 ms, 3.8 by cuDNN's kernels and 5.8 by torch's flash attention; of 577 tokens
2.2 instead of 2.5 ms (benchmarks/results/attention.json).
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

#: The longest that were measured had 577 tokens, with a small gain over cuDNN's kernels.
LONGEST = 640
#: Tokens that a program has, and of a step of its loop. Of the forms in the record above the best.
OWN, BLOCK, WARPS, STAGES = 64, 64, 4, 3


@operator("block_attention")
def block_attention(qkv: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    """Attention (n, length, heads, width) of queries, keys and values (n, length, 3, heads, width).

    In float16 or bfloat16, with sums in float32. The logits' scale is 1 / sqrt(width). Also returns
    the log-sum-exp of each row of logits in base 2, float32 (n, heads, length).
    """
    out, lse = _results(qkv)
    _launch(attention_of_blocks, qkv, causal, out=out, lse=lse)
    return out, lse


@operator("block_attention_backward")
def block_attention_gradient(
    qkv: Tensor, out: Tensor, lse: Tensor, dout: Tensor, causal: bool
) -> Tensor:
    """The gradient of qkv from that of the output."""
    dqkv = torch.empty_like(qkv, memory_format=torch.contiguous_format)
    given = {"dout": dout.contiguous(), "lse": lse, "delta": torch.empty_like(lse), "dqkv": dqkv}
    _launch(attention_of_queries, qkv, causal, **given, out=out)
    _launch(attention_of_keys, qkv, causal, **given)
    return dqkv


def _results(qkv: Tensor) -> tuple[Tensor, Tensor]:
    n, length, _, heads, width = qkv.shape
    out = qkv.new_empty(n, length, heads, width)
    return out, qkv.new_empty(n, heads, length, dtype=torch.float32)


def _launch(kernel: Any, qkv: Tensor, causal: bool, **tensors: Tensor) -> None:
    """Launch programs for all whole blocks of tokens, and others for what remains of a sequence."""
    n, length, _, heads, width = qkv.shape
    whole = length // OWN
    with torch.cuda.device_of(qkv):
        for partly, start, blocks, rows in (
            (False, 0, whole, OWN),
            (True, whole * OWN, 1, _rest(length, OWN)),
        ):
            if blocks and rows:
                kernel.launch(
                    n * heads * blocks, qkv=qkv.contiguous(), **tensors, size=length, start=start,
                    blocks=blocks, HEADS=heads, WIDTH=width, ROWS=rows, PARTLY=partly, BLOCK=BLOCK,
                    REST=_rest(length, BLOCK), CAUSAL=causal, STAGES=STAGES, num_warps=WARPS,
                )  # fmt: skip


def _rest(length: int, block: int) -> int:
    """The size of the block that remains after whole ones, 0 if none does."""
    rest = length % block
    return rest and max(16, triton.next_power_of_2(rest))


def _save(ctx: Any, inputs: tuple[Tensor, bool], output: tuple[Tensor, Tensor]) -> None:
    qkv, ctx.causal = inputs
    ctx.save_for_backward(qkv, *output)
    ctx.mark_non_differentiable(output[1])


def _gradient(ctx: Any, dout: Tensor, _: Any) -> tuple[Tensor, None]:
    qkv, out, lse = ctx.saved_tensors
    return block_attention_gradient(qkv, out, lse, dout, ctx.causal), None


block_attention.register_fake(lambda qkv, causal: _results(qkv))
block_attention_gradient.register_fake(
    lambda qkv, *_: torch.empty_like(qkv, memory_format=torch.contiguous_format)
)
block_attention.register_autograd(_gradient, setup_context=_save)


# --- forward --------------------------------------------------------------------------------------


@kernel
def attention_of_blocks(
    qkv, out, lse, size, start, blocks,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, PARTLY: tl.constexpr,
    BLOCK: tl.constexpr, REST: tl.constexpr, CAUSAL: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """The outputs and log-sum-exps of a block of queries."""
    own, head, first, first_out = _place(size, start, blocks, HEADS, WIDTH, ROWS)
    q = _load(qkv + first, own, size, 3 * HEADS * WIDTH, WIDTH, ROWS, PARTLY)
    top = tl.full([ROWS], float("-inf"), tl.float32)
    state = (top, tl.zeros([ROWS], tl.float32), tl.zeros([ROWS, WIDTH], tl.float32))
    whole = own if CAUSAL else size // BLOCK * BLOCK
    for at in tl.range(0, whole, BLOCK, num_stages=STAGES):
        state = _attend(q, qkv + first, own, at, size, state,
                        HEADS, WIDTH, ROWS, BLOCK, False, False)  # fmt: skip
    if CAUSAL:
        state = _attend(q, qkv + first, own, own, size, state,
                        HEADS, WIDTH, ROWS, ROWS, True, True)  # fmt: skip
    elif REST > 0:
        state = _attend(q, qkv + first, own, whole, size, state,
                        HEADS, WIDTH, ROWS, REST, True, False)  # fmt: skip
    top, total, sums = state
    rows = own + tl.arange(0, ROWS)
    tl.store(lse + head * size + rows, top + tl.log2(total), rows < size)
    _store(out + first_out, sums / total[:, None], own, size, HEADS * WIDTH, WIDTH, ROWS)


@triton.jit
def _attend(
    q, first, own, at, size, state,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
    PARTLY: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    """The running maximum, sum and weighted sum of values with a block of keys more."""
    top, total, sums = state
    k = _load(first + HEADS * WIDTH, at, size, 3 * HEADS * WIDTH, WIDTH, KEYS, PARTLY)
    v = _load(first + 2 * HEADS * WIDTH, at, size, 3 * HEADS * WIDTH, WIDTH, KEYS, PARTLY)
    s = tl.dot(q, tl.trans(k))
    if PARTLY:
        keys = (at + tl.arange(0, KEYS))[None, :]
        seen = keys < size
        if CAUSAL:
            seen = seen & (keys <= (own + tl.arange(0, ROWS))[:, None])
        s = tl.where(seen, s, float("-inf"))
    now = tl.maximum(top, tl.max(s, 1) * (WIDTH**-0.5 * LOG2E))
    p, kept = tl.exp2(s * (WIDTH**-0.5 * LOG2E) - now[:, None]), tl.exp2(top - now)
    return now, total * kept + tl.sum(p, 1), tl.dot(p.to(v.dtype), v, sums * kept[:, None])


# --- backward -------------------------------------------------------------------------------------


@kernel
def attention_of_queries(
    qkv, out, dout, lse, delta, dqkv, size, start, blocks,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, PARTLY: tl.constexpr,
    BLOCK: tl.constexpr, REST: tl.constexpr, CAUSAL: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """The gradient of a block of queries; `delta`, what softmax's gradient subtracts from each."""
    own, head, first, first_out = _place(size, start, blocks, HEADS, WIDTH, ROWS)
    rows = own + tl.arange(0, ROWS)
    q = _load(qkv + first, own, size, 3 * HEADS * WIDTH, WIDTH, ROWS, PARTLY)
    o = _load(out + first_out, own, size, HEADS * WIDTH, WIDTH, ROWS, PARTLY)
    do = _load(dout + first_out, own, size, HEADS * WIDTH, WIDTH, ROWS, PARTLY)
    products = tl.sum(o.to(tl.float32) * do.to(tl.float32), 1)
    tl.store(delta + head * size + rows, products, rows < size)
    of_rows = tl.load(lse + head * size + rows, rows < size, 0.0), products
    dq = tl.zeros([ROWS, WIDTH], tl.float32)
    whole = own if CAUSAL else size // BLOCK * BLOCK
    for at in tl.range(0, whole, BLOCK, num_stages=STAGES):
        dq = _of_queries(q, do, of_rows, dq, qkv + first, own, at, size,
                         HEADS, WIDTH, ROWS, BLOCK, False, False)  # fmt: skip
    if CAUSAL:
        dq = _of_queries(q, do, of_rows, dq, qkv + first, own, own, size,
                         HEADS, WIDTH, ROWS, ROWS, True, True)  # fmt: skip
    elif REST > 0:
        dq = _of_queries(q, do, of_rows, dq, qkv + first, own, whole, size,
                         HEADS, WIDTH, ROWS, REST, True, False)  # fmt: skip
    _store(dqkv + first, dq * WIDTH**-0.5, own, size, 3 * HEADS * WIDTH, WIDTH, ROWS)


@triton.jit
def _of_queries(
    q, do, of_rows, dq, first, own, at, size,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
    PARTLY: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    """The gradients of queries with a block of keys more; keys that do not exist are zeros."""
    lse, products = of_rows
    k = _load(first + HEADS * WIDTH, at, size, 3 * HEADS * WIDTH, WIDTH, KEYS, PARTLY)
    v = _load(first + 2 * HEADS * WIDTH, at, size, 3 * HEADS * WIDTH, WIDTH, KEYS, PARTLY)
    p = tl.exp2(tl.dot(q, tl.trans(k)) * (WIDTH**-0.5 * LOG2E) - lse[:, None])
    if CAUSAL:
        keys = (at + tl.arange(0, KEYS))[None, :]
        p = tl.where(keys <= (own + tl.arange(0, ROWS))[:, None], p, 0.0)
    ds = p * (tl.dot(do, tl.trans(v)) - products[:, None])
    return tl.dot(ds.to(k.dtype), k, dq)


@kernel
def attention_of_keys(
    qkv, dout, lse, delta, dqkv, size, start, blocks,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, PARTLY: tl.constexpr,
    BLOCK: tl.constexpr, REST: tl.constexpr, CAUSAL: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """The gradients of a block of keys and of their values."""
    own, head, first, first_out = _place(size, start, blocks, HEADS, WIDTH, ROWS)
    lse += head * size
    delta += head * size
    stride = 3 * HEADS * WIDTH
    k = _load(qkv + first + HEADS * WIDTH, own, size, stride, WIDTH, ROWS, PARTLY)
    v = _load(qkv + first + 2 * HEADS * WIDTH, own, size, stride, WIDTH, ROWS, PARTLY)
    sums = (tl.zeros([ROWS, WIDTH], tl.float32), tl.zeros([ROWS, WIDTH], tl.float32))
    whole = size // BLOCK * BLOCK
    for at in tl.range(own if CAUSAL else 0, whole, BLOCK, num_stages=STAGES):
        sums = _of_keys(k, v, sums, qkv + first, dout + first_out, lse, delta, own, at, size,
                        HEADS, WIDTH, ROWS, BLOCK, False, CAUSAL)  # fmt: skip
    if REST > 0:
        sums = _of_keys(k, v, sums, qkv + first, dout + first_out, lse, delta, own, whole, size,
                        HEADS, WIDTH, ROWS, REST, True, CAUSAL)  # fmt: skip
    dk, dv = sums
    _store(dqkv + first + HEADS * WIDTH, dk * WIDTH**-0.5, own, size, stride, WIDTH, ROWS)
    _store(dqkv + first + 2 * HEADS * WIDTH, dv, own, size, stride, WIDTH, ROWS)


@triton.jit
def _of_keys(
    k, v, sums, first, first_do, lse, delta, own, at, size,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, KEYS: tl.constexpr, ROWS: tl.constexpr,
    PARTLY: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    """The gradients of keys and values with a block of queries more; products are transposed."""
    dk, dv = sums
    rows = at + tl.arange(0, ROWS)
    q = _load(first, at, size, 3 * HEADS * WIDTH, WIDTH, ROWS, PARTLY)
    do = _load(first_do, at, size, HEADS * WIDTH, WIDTH, ROWS, PARTLY)
    # Rows that do not exist have no probabilities.
    of_rows = tl.load(lse + rows, rows < size, float("inf")) if PARTLY else tl.load(lse + rows)
    products = tl.load(delta + rows, rows < size, 0.0) if PARTLY else tl.load(delta + rows)
    p = tl.exp2(tl.dot(k, tl.trans(q)) * (WIDTH**-0.5 * LOG2E) - of_rows[None, :])
    if CAUSAL:
        p = tl.where((own + tl.arange(0, KEYS))[:, None] <= rows[None, :], p, 0.0)
    dv = tl.dot(p.to(do.dtype), do, dv)
    ds = p * (tl.dot(v, tl.trans(do)) - products[None, :])
    return tl.dot(ds.to(q.dtype), q, dk), dv


# --- places ---------------------------------------------------------------------------------------


@triton.jit
def _place(size, start, blocks, HEADS: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr):
    """A program's first token and head, and the head's offsets in qkv and in the output."""
    # The blocks of a head are neighbours, as they read the same.
    head = (tl.program_id(0) // blocks).to(tl.int64)
    own = start + tl.program_id(0) % blocks * ROWS
    sequence, of_sequence = head // HEADS, head % HEADS
    first = (sequence * size * 3 * HEADS + of_sequence) * WIDTH
    return own, head, first, (sequence * size * HEADS + of_sequence) * WIDTH


@triton.jit
def _load(
    first, start, size, stride, WIDTH: tl.constexpr, ROWS: tl.constexpr, PARTLY: tl.constexpr
):
    """A block of one head's vectors, zeros where they end."""
    rows, cols = start + tl.arange(0, ROWS), tl.arange(0, WIDTH)
    places = first + rows[:, None] * stride + cols[None, :]
    return tl.load(places, mask=(rows < size)[:, None], other=0.0) if PARTLY else tl.load(places)


@triton.jit
def _store(first, values, start, size, stride, WIDTH: tl.constexpr, ROWS: tl.constexpr):
    rows, cols = start + tl.arange(0, ROWS), tl.arange(0, WIDTH)
    places = first + rows[:, None] * stride + cols[None, :]
    tl.store(places, values.to(first.dtype.element_ty), mask=(rows < size)[:, None])
