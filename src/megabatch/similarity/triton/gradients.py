"""The last step of a gradient of features, row by row: scale, round, store."""

from __future__ import annotations

import triton.language as tl
from torch import Tensor

from megabatch.similarity.triton.blocking import cdiv
from megabatch.similarity.triton.launch import kernel

#: Rows and columns that a program takes at once.
ROWS, COLS = 16, 128


def scale_rows(
    total: Tensor,
    out: Tensor | None,
    factor: Tensor,
    width: int,
    divisor: int = 1,
    *,
    features: Tensor | None = None,
    order: Tensor | None = None,
    row_scale: Tensor | None = None,
    choose: bool = False,
    gain: float = 1.0,
) -> Tensor | None:
    """out[order] = total's first `width` columns, times factors: see `scaled_rows`.

    Returns:
        parts of the sum <features, total> / gain; None without features.
    """
    size, programs = len(total), cdiv(len(total), ROWS)
    parts = None if features is None else factor.new_empty(programs)
    if programs:
        scaled_rows.launch(
            programs, total=total, features=features, order=order, out=out, row_scale=row_scale,
            factor=factor, divisor=divisor, scale_grad_parts=parts, rows=size, d=width,
            total_stride=total.stride(0),
            feature_stride=0 if features is None else features.stride(0),
            out_stride=0 if out is None else out.stride(0),
            ROWS=ROWS, COLS=COLS, CHOOSE=choose, GAIN=gain,
        )  # fmt: skip
    return parts


@kernel
def scaled_rows(
    total, features, order, out, row_scale, factor, divisor, scale_grad_parts, rows, d,
    total_stride, feature_stride, out_stride,
    ROWS: tl.constexpr, COLS: tl.constexpr, CHOOSE: tl.constexpr, GAIN: tl.constexpr,
):  # fmt: skip
    """out[order] = factor * divisor * row_scale * total in out's dtype.

    scale_grad_parts[program] = <features, total> / GAIN. CHOOSE: instead of reading row_scale, the
    kernel writes it and divides by it: for each row the power of two that brings its largest number
    to 2^14.
    """
    i = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    inside = i < rows
    to = i
    if order is not None:
        to = tl.load(order + i, mask=inside, other=0)
    multiplier = tl.full((ROWS,), tl.load(factor) * divisor, tl.float32)
    if CHOOSE:
        largest = tl.zeros((ROWS,), tl.float32)
        for c in tl.range(0, d, COLS):
            j = c + tl.arange(0, COLS)
            mask = inside[:, None] & (j < d)[None, :]
            t = tl.load(total + i[:, None] * total_stride + j[None, :], mask=mask, other=0.0)
            largest = tl.maximum(largest, tl.max(tl.abs(t), 1))
        largest = tl.abs(largest * multiplier)
        power = (largest.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
        usual = (power >= 2.0**-100) & (power <= 2.0**100)
        own_scale = tl.where(usual, power * 2.0**-14, 1.0)
        tl.store(row_scale + to, own_scale, mask=inside)
        multiplier = multiplier / own_scale
    elif row_scale is not None:
        multiplier *= tl.load(row_scale + i, mask=inside, other=0.0)
    dot = tl.zeros((ROWS, COLS), tl.float32)
    for c in tl.range(0, d, COLS):
        j = c + tl.arange(0, COLS)
        mask = inside[:, None] & (j < d)[None, :]
        t = tl.load(total + i[:, None] * total_stride + j[None, :], mask=mask, other=0.0)
        if features is not None:
            a = tl.load(features + i[:, None] * feature_stride + j[None, :], mask=mask, other=0.0)
            dot += t * a.to(tl.float32)
        if out is not None:
            value = (t.to(tl.float32) * multiplier[:, None]).to(out.dtype.element_ty)
            tl.store(out + to[:, None] * out_stride + j[None, :], value, mask=mask)
    if features is not None:
        part = tl.sum(tl.sum(dot, 1), 0) * (1.0 / GAIN)
        tl.store(scale_grad_parts + tl.program_id(0), part)
