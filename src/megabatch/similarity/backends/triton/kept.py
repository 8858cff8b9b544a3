"""The kernels around a gradient that waits for the backward pass: see `sigmoid_blocks.Kept`."""

# mypy: disallow-untyped-defs=False

from __future__ import annotations

import triton.language as tl

from megabatch.similarity.backends.triton.launch import kernel


@kernel
def keep(
    total, features, order, out, units, factor, inner, rows, d, total_stride, feature_stride,
    out_stride,
    B: tl.constexpr, BD: tl.constexpr, ORDER: tl.constexpr, UNITS: tl.constexpr,
    INNER: tl.constexpr, GAIN: tl.constexpr,
):  # fmt: skip
    """out[order] = factor * total / units in out's dtype.

    inner[program] = <features, total> / GAIN. UNITS: one a row is chosen, a power of two that
    brings its largest number to 2^14.
    """
    i = (tl.program_id(0) * B + tl.arange(0, B)).to(tl.int64)
    inside = i < rows
    to = i
    if ORDER:
        to = tl.load(order + i, mask=inside, other=0)
    scaling = tl.zeros((B,), tl.float32) + tl.load(factor)
    if UNITS:
        largest = tl.zeros((B,), tl.float32)
        for c in tl.range(0, d, BD):
            j = c + tl.arange(0, BD)
            mask = inside[:, None] & (j < d)[None, :]
            t = tl.load(total + i[:, None] * total_stride + j[None, :], mask=mask, other=0.0)
            largest = tl.maximum(largest, tl.max(tl.abs(t), 1))
        largest = tl.abs(largest * scaling)
        power = (largest.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
        usual = (power >= 2.0**-100) & (power <= 2.0**100)
        unit = tl.where(usual, power * 2.0**-14, 1.0)
        tl.store(units + to, unit, mask=inside)
        scaling = scaling / unit
    dot = tl.zeros((B, BD), tl.float32)
    for c in tl.range(0, d, BD):
        j = c + tl.arange(0, BD)
        mask = inside[:, None] & (j < d)[None, :]
        t = tl.load(total + i[:, None] * total_stride + j[None, :], mask=mask, other=0.0)
        if INNER:
            a = tl.load(features + i[:, None] * feature_stride + j[None, :], mask=mask, other=0.0)
            dot += t * a.to(tl.float32)
        value = (t * scaling[:, None]).to(out.dtype.element_ty)
        tl.store(out + to[:, None] * out_stride + j[None, :], value, mask=mask)
    if INNER:
        tl.store(inner + tl.program_id(0), tl.sum(tl.sum(dot, 1), 0) * (1.0 / GAIN))


@kernel
def release(
    kept, units, out, factor, times, rows, d, kept_stride, out_stride,
    B: tl.constexpr, BD: tl.constexpr, UNITS: tl.constexpr,
):  # fmt: skip
    """out = kept * units * factor * times in out's dtype."""
    i = (tl.program_id(0) * B + tl.arange(0, B)).to(tl.int64)
    inside = i < rows
    scaling = tl.zeros((B,), tl.float32) + tl.load(factor) * times
    if UNITS:
        scaling *= tl.load(units + i, mask=inside, other=0.0)
    for c in tl.range(0, d, BD):
        j = c + tl.arange(0, BD)
        mask = inside[:, None] & (j < d)[None, :]
        t = tl.load(kept + i[:, None] * kept_stride + j[None, :], mask=mask, other=0.0)
        value = (t.to(tl.float32) * scaling[:, None]).to(out.dtype.element_ty)
        tl.store(out + i[:, None] * out_stride + j[None, :], value, mask=mask)
