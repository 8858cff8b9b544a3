"""Attention of sequences of some hundred tokens by Triton kernels.

A program has a block of one head's queries, and goes through the keys (Dao 2023, arXiv 2307.08691);
in the backward pass it has a block of keys, then one of queries. Blocks are small, as torch's
kernels compute three blocks of 128 for the 257 tokens of a ViT-L/14. What remains after whole
blocks is a smaller one.
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

#: To be measured: above it torch's kernels are faster.
LONGEST = 320
OWN, BLOCK, WARPS, STAGES = 64, 64, 4, 2


@operator("block_attention")
def block_attention(qkv: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    """Attention (n, length, heads, width) of queries, keys and values (n, length, 3, heads, width).

    In float16 or bfloat16, with sums in float32. The logits' scale is 1 / sqrt(width). Also returns
    the log-sum-exp of each row of logits in base 2, float32 (n, heads, length).
    """
    out, lse = _results(qkv)
    _launch(forward, qkv, causal, qkv=qkv.contiguous(), out=out, lse=lse)
    return out, lse


@operator("block_attention_backward")
def block_attention_gradient(
    qkv: Tensor, out: Tensor, lse: Tensor, dout: Tensor, causal: bool
) -> Tensor:
    """The gradient of qkv from that of the output."""
    dqkv = torch.empty_like(qkv, memory_format=torch.contiguous_format)
    delta, dout = torch.empty_like(lse), dout.contiguous()
    given = {"qkv": qkv.contiguous(), "dout": dout, "lse": lse, "delta": delta, "dqkv": dqkv}
    _launch(gradients_of_queries, qkv, causal, **given, out=out)
    _launch(gradients_of_keys, qkv, causal, **given)
    return dqkv


def _results(qkv: Tensor) -> tuple[Tensor, Tensor]:
    n, length, _, heads, width = qkv.shape
    out = qkv.new_empty(n, length, heads, width)
    return out, qkv.new_empty(n, heads, length, dtype=torch.float32)


def _launch(kernel: Any, like: Tensor, causal: bool, **tensors: Tensor) -> None:
    n, length, _, heads, width = like.shape
    with torch.cuda.device_of(like):
        kernel.launch(
            n * heads * triton.cdiv(length, OWN), **tensors, size=length,
            HEADS=heads, WIDTH=width, OWN=OWN, OWN_REST=_rest(length, OWN), BLOCK=BLOCK,
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
    lambda qkv, out, lse, dout, causal: torch.empty_like(qkv, memory_format=torch.contiguous_format)
)
block_attention.register_autograd(_gradient, setup_context=_save)


@kernel
def forward(
    qkv, out, lse, size,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, OWN: tl.constexpr, OWN_REST: tl.constexpr,
    BLOCK: tl.constexpr, REST: tl.constexpr, CAUSAL: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """The outputs and log-sum-exps of a block of queries."""
    block, sequence, head = _place(size, HEADS, OWN)
    if block * OWN + OWN <= size:
        _outputs(qkv, out, lse, size, block * OWN, sequence, head,
                 HEADS, WIDTH, OWN, False, BLOCK, REST, CAUSAL, STAGES)  # fmt: skip
    elif OWN_REST > 0:
        _outputs(qkv, out, lse, size, block * OWN, sequence, head,
                 HEADS, WIDTH, OWN_REST, True, BLOCK, REST, CAUSAL, STAGES)  # fmt: skip


@triton.jit
def _outputs(
    qkv, out, lse, size, first_row, sequence, head,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, PARTLY: tl.constexpr,
    BLOCK: tl.constexpr, REST: tl.constexpr, CAUSAL: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    first = qkv + (sequence * size * 3 * HEADS + head) * WIDTH
    q = _load(first, first_row, size, 3 * HEADS * WIDTH, WIDTH, ROWS, PARTLY)
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    sums = tl.zeros([ROWS, WIDTH], tl.float32)
    whole = first_row if CAUSAL else size // BLOCK * BLOCK
    for start in tl.range(0, whole, BLOCK, num_stages=STAGES):
        top, total, sums = _attend(
            q, first, first_row, start, size, top, total, sums, HEADS, WIDTH, ROWS, BLOCK,
            False, False)  # fmt: skip
    if CAUSAL:
        top, total, sums = _attend(
            q, first, first_row, whole, size, top, total, sums, HEADS, WIDTH, ROWS, ROWS,
            True, True)  # fmt: skip
    elif REST > 0:
        top, total, sums = _attend(
            q, first, first_row, whole, size, top, total, sums, HEADS, WIDTH, ROWS, REST,
            True, False)  # fmt: skip
    rows = first_row + tl.arange(0, ROWS)
    tl.store(lse + (sequence * HEADS + head) * size + rows, top + tl.log2(total), rows < size)
    _store(out + (sequence * size * HEADS + head) * WIDTH, sums / total[:, None],
           first_row, size, HEADS * WIDTH, WIDTH, ROWS)  # fmt: skip


@triton.jit
def _attend(
    q, first, first_row, start, size, top, total, sums,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
    MASKED: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    """The running maximum, sum and weighted sum of values with a block of keys more."""
    k = _load(first + HEADS * WIDTH, start, size, 3 * HEADS * WIDTH, WIDTH, KEYS, MASKED)
    v = _load(first + 2 * HEADS * WIDTH, start, size, 3 * HEADS * WIDTH, WIDTH, KEYS, MASKED)
    s = tl.dot(q, tl.trans(k))
    if MASKED:
        keys = (start + tl.arange(0, KEYS))[None, :]
        seen = keys < size
        if CAUSAL:
            seen = seen & (keys <= (first_row + tl.arange(0, ROWS))[:, None])
        s = tl.where(seen, s, float("-inf"))
    now = tl.maximum(top, tl.max(s, 1) * (WIDTH**-0.5 * LOG2E))
    p, kept = tl.exp2(s * (WIDTH**-0.5 * LOG2E) - now[:, None]), tl.exp2(top - now)
    sums = tl.dot(p.to(v.dtype), v, sums * kept[:, None])
    return now, total * kept + tl.sum(p, 1), sums


@kernel
def gradients_of_queries(
    qkv, out, dout, lse, delta, dqkv, size,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, OWN: tl.constexpr, OWN_REST: tl.constexpr,
    BLOCK: tl.constexpr, REST: tl.constexpr, CAUSAL: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """The gradient of a block of queries; `delta`, what softmax's gradient subtracts from each."""
    block, sequence, head = _place(size, HEADS, OWN)
    if block * OWN + OWN <= size:
        _of_block_of_queries(
            qkv, out, dout, lse, delta, dqkv, size, block * OWN, sequence, head,
            HEADS, WIDTH, OWN, False, BLOCK, REST, CAUSAL, STAGES)  # fmt: skip
    elif OWN_REST > 0:
        _of_block_of_queries(
            qkv, out, dout, lse, delta, dqkv, size, block * OWN, sequence, head,
            HEADS, WIDTH, OWN_REST, True, BLOCK, REST, CAUSAL, STAGES)  # fmt: skip


@triton.jit
def _of_block_of_queries(
    qkv, out, dout, lse, delta, dqkv, size, first_row, sequence, head,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, PARTLY: tl.constexpr,
    BLOCK: tl.constexpr, REST: tl.constexpr, CAUSAL: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    first = (sequence * size * 3 * HEADS + head) * WIDTH
    first_out = (sequence * size * HEADS + head) * WIDTH
    rows = first_row + tl.arange(0, ROWS)
    places = (sequence * HEADS + head) * size + rows
    q = _load(qkv + first, first_row, size, 3 * HEADS * WIDTH, WIDTH, ROWS, PARTLY)
    o = _load(out + first_out, first_row, size, HEADS * WIDTH, WIDTH, ROWS, PARTLY)
    do = _load(dout + first_out, first_row, size, HEADS * WIDTH, WIDTH, ROWS, PARTLY)
    products = tl.sum(o.to(tl.float32) * do.to(tl.float32), 1)
    tl.store(delta + places, products, rows < size)
    of_rows = tl.load(lse + places, rows < size, 0.0), products
    dq = tl.zeros([ROWS, WIDTH], tl.float32)
    whole = first_row if CAUSAL else size // BLOCK * BLOCK
    for start in tl.range(0, whole, BLOCK, num_stages=STAGES):
        dq = _of_queries(q, do, of_rows, dq, qkv + first, first_row, start, size,
                         HEADS, WIDTH, ROWS, BLOCK, False, False)  # fmt: skip
    if CAUSAL:
        dq = _of_queries(q, do, of_rows, dq, qkv + first, first_row, whole, size,
                         HEADS, WIDTH, ROWS, ROWS, True, True)  # fmt: skip
    elif REST > 0:
        dq = _of_queries(q, do, of_rows, dq, qkv + first, first_row, whole, size,
                         HEADS, WIDTH, ROWS, REST, False, True)  # fmt: skip
    _store(dqkv + first, dq * WIDTH**-0.5, first_row, size, 3 * HEADS * WIDTH, WIDTH, ROWS)


@kernel
def gradients_of_keys(
    qkv, dout, lse, delta, dqkv, size,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, OWN: tl.constexpr, OWN_REST: tl.constexpr,
    BLOCK: tl.constexpr, REST: tl.constexpr, CAUSAL: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """The gradients of a block of keys and of their values."""
    block, sequence, head = _place(size, HEADS, OWN)
    if block * OWN + OWN <= size:
        _of_block_of_keys(
            qkv, dout, lse, delta, dqkv, size, block * OWN, sequence, head,
            HEADS, WIDTH, OWN, False, BLOCK, REST, CAUSAL, STAGES)  # fmt: skip
    elif OWN_REST > 0:
        _of_block_of_keys(
            qkv, dout, lse, delta, dqkv, size, block * OWN, sequence, head,
            HEADS, WIDTH, OWN_REST, True, BLOCK, REST, CAUSAL, STAGES)  # fmt: skip


@triton.jit
def _of_block_of_keys(
    qkv, dout, lse, delta, dqkv, size, own, sequence, head,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, PARTLY: tl.constexpr,
    BLOCK: tl.constexpr, REST: tl.constexpr, CAUSAL: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    first = (sequence * size * 3 * HEADS + head) * WIDTH
    first_do = dout + (sequence * size * HEADS + head) * WIDTH
    lse += (sequence * HEADS + head) * size
    delta += (sequence * HEADS + head) * size
    stride = 3 * HEADS * WIDTH
    k = _load(qkv + first + HEADS * WIDTH, own, size, stride, WIDTH, ROWS, PARTLY)
    v = _load(qkv + first + 2 * HEADS * WIDTH, own, size, stride, WIDTH, ROWS, PARTLY)
    dk = tl.zeros([ROWS, WIDTH], tl.float32)
    dv = tl.zeros([ROWS, WIDTH], tl.float32)
    whole = size // BLOCK * BLOCK
    for start in tl.range(own if CAUSAL else 0, whole, BLOCK, num_stages=STAGES):
        dk, dv = _of_keys(k, v, dk, dv, qkv + first, first_do, lse, delta, own, start, size,
                          HEADS, WIDTH, ROWS, BLOCK, CAUSAL, False)  # fmt: skip
    if REST > 0:
        dk, dv = _of_keys(k, v, dk, dv, qkv + first, first_do, lse, delta, own, whole, size,
                          HEADS, WIDTH, ROWS, REST, CAUSAL, True)  # fmt: skip
    _store(dqkv + first + HEADS * WIDTH, dk * WIDTH**-0.5, own, size, stride, WIDTH, ROWS)
    _store(dqkv + first + 2 * HEADS * WIDTH, dv, own, size, stride, WIDTH, ROWS)


@triton.jit
def _of_keys(
    k, v, dk, dv, first, do_first, lse, delta, own, start, size,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, KEYS: tl.constexpr, ROWS: tl.constexpr,
    CAUSAL: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """The gradients of keys and values with a block of queries more; products are transposed."""
    rows = start + tl.arange(0, ROWS)
    q = _load(first, start, size, 3 * HEADS * WIDTH, WIDTH, ROWS, MASKED)
    do = _load(do_first, start, size, HEADS * WIDTH, WIDTH, ROWS, MASKED)
    if MASKED:  # rows that do not exist have no probabilities
        of_rows = tl.load(lse + rows, rows < size, float("inf"))
        products = tl.load(delta + rows, rows < size, 0.0)
    else:
        of_rows, products = tl.load(lse + rows), tl.load(delta + rows)
    s = tl.dot(k, tl.trans(q)) * (WIDTH**-0.5 * LOG2E)
    p = tl.exp2(s - of_rows[None, :])
    if CAUSAL:
        p = tl.where((own + tl.arange(0, KEYS))[:, None] <= rows[None, :], p, 0.0)
    dv = tl.dot(p.to(do.dtype), do, dv)
    ds = p * (tl.dot(v, tl.trans(do)) - products[None, :])
    return tl.dot(ds.to(q.dtype), q, dk), dv


@triton.jit
def _of_queries(
    q, do, of_rows, dq, first, own, start, size,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
    CAUSAL: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """The gradients of queries with a block of keys more; keys that do not exist are zeros."""
    k = _load(first + HEADS * WIDTH, start, size, 3 * HEADS * WIDTH, WIDTH, KEYS, MASKED)
    v = _load(first + 2 * HEADS * WIDTH, start, size, 3 * HEADS * WIDTH, WIDTH, KEYS, MASKED)
    lse, products = of_rows
    s = tl.dot(q, tl.trans(k)) * (WIDTH**-0.5 * LOG2E)
    p = tl.exp2(s - lse[:, None])
    if CAUSAL:
        keys = (start + tl.arange(0, KEYS))[None, :]
        p = tl.where(keys <= (own + tl.arange(0, ROWS))[:, None], p, 0.0)
    ds = p * (tl.dot(do, tl.trans(v)) - products[:, None])
    return tl.dot(ds.to(k.dtype), k, dq)


@triton.jit
def _place(size, HEADS: tl.constexpr, BLOCK: tl.constexpr):
    """A program's block, sequence and head: those of one head are neighbours."""
    blocks = tl.cdiv(size, BLOCK)
    item = tl.program_id(0) // blocks
    return tl.program_id(0) % blocks, (item // HEADS).to(tl.int64), item % HEADS


@triton.jit
def _load(
    first, start, size, stride, WIDTH: tl.constexpr, ROWS: tl.constexpr, MASKED: tl.constexpr
):
    """A block of one head's vectors, zeros where they end."""
    rows, cols = start + tl.arange(0, ROWS), tl.arange(0, WIDTH)
    places = first + rows[:, None] * stride + cols[None, :]
    if MASKED:
        return tl.load(places, mask=(rows < size)[:, None], other=0.0)
    return tl.load(places)


@triton.jit
def _store(first, values, start, size, stride, WIDTH: tl.constexpr, ROWS: tl.constexpr):
    rows, cols = start + tl.arange(0, ROWS), tl.arange(0, WIDTH)
    places = first + rows[:, None] * stride + cols[None, :]
    tl.store(places, values.to(first.dtype.element_ty), mask=(rows < size)[:, None])
