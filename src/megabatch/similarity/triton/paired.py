"""CLIP's loss of each pair and its gradient, in one launch each: see `losses.clip`.

Both take one stack per side, (4, m), with rows: negative, positive, positive_sum, positive_count.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from megabatch.similarity.ops import operator
from megabatch.similarity.triton.blocking import cdiv
from megabatch.similarity.triton.launch import kernel
from megabatch.similarity.triton.tiles import store_rows

#: Pairs per program.
BLOCK = 256


@operator("paired_losses")
def paired_losses(rows: Tensor, columns: Tensor, mean: bool) -> Tensor:
    """(m,), the mean of both sides' losses, from their stacks (4, m); `mean`: the pairs' mean, ().

    One launch, with `mean` two, and one for the gradient; torch operations would take 5 and 10.
    """
    size = rows.shape[1]
    out = rows.new_empty(size)
    with torch.cuda.device_of(rows):
        losses.launch(
            cdiv(size, BLOCK), rows=rows, row_stride=rows.stride(0),
            cols=columns, col_stride=columns.stride(0), out=out, size=size, B=BLOCK,
        )  # fmt: skip
    return out.mean() if mean else out


@operator("paired_losses_backward")
def paired_gradients(rows: Tensor, columns: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor]:
    """The stacks' gradients (4, m), contiguous, from that of the losses (m,) or of their mean."""
    of_mean = gradient.dim() == 0
    drows, dcols = rows.new_empty(rows.shape), columns.new_empty(columns.shape)
    size = rows.shape[1]
    with torch.cuda.device_of(rows):
        gradients.launch(
            cdiv(size, BLOCK), rows=rows, row_stride=rows.stride(0),
            cols=columns, col_stride=columns.stride(0),
            gradient=gradient, gradient_stride=0 if of_mean else gradient.stride(0),
            share=1.0 / size if of_mean else 1.0, drows=drows, dcols=dcols, size=size, B=BLOCK,
        )  # fmt: skip
    return drows, dcols


paired_losses.register_fake(
    lambda rows, columns, mean: rows.new_empty(() if mean else rows.shape[1])
)
paired_gradients.register_fake(
    lambda rows, columns, gradient: (rows.new_empty(rows.shape), columns.new_empty(columns.shape))
)
paired_losses.register_autograd(
    lambda ctx, gradient: (*paired_gradients(*ctx.saved_tensors, gradient), None),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs[:2]),
)


@kernel
def losses(rows, row_stride, cols, col_stride, out, size, B: tl.constexpr):
    """out = mean of softplus(negative - positive_sum) of the rows and of the columns."""
    i = tl.program_id(0) * B + tl.arange(0, B)
    inside = i < size
    of_row = _softplus(_margin(rows, row_stride, i, inside))
    of_col = _softplus(_margin(cols, col_stride, i, inside))
    tl.store(out + i, 0.5 * (of_row + of_col), mask=inside)


@kernel
def gradients(
    rows, row_stride, cols, col_stride, gradient, gradient_stride, share, drows, dcols, size,
    B: tl.constexpr,
):  # fmt: skip
    """Gradients of both stacks, written with stride `size`; of a loss, gradient * share."""
    i = tl.program_id(0) * B + tl.arange(0, B)
    inside = i < size
    upstream = tl.load(gradient + i.to(tl.int64) * gradient_stride, mask=inside, other=0.0)
    g = 0.5 * (upstream * share)
    zero = tl.zeros((B,), tl.float32)
    of_row = g * _sigmoid(_margin(rows, row_stride, i, inside))
    store_rows(drows, size, i, (of_row, zero, -of_row, zero), inside)
    of_col = g * _sigmoid(_margin(cols, col_stride, i, inside))
    store_rows(dcols, size, i, (of_col, zero, -of_col, zero), inside)


@triton.jit
def _margin(stack, stride, i, inside):
    negative = tl.load(stack + i, mask=inside, other=0.0)
    return negative - tl.load(stack + 2 * stride + i, mask=inside, other=0.0)


@triton.jit
def _softplus(z):
    """max(z, 0) + log1p(e^-|z|), with log1p by a series: Triton's logarithm is inexact near 1.

    log1p(e) = 2 atanh(t) with t = e / (2 + e), at most 1/3: the terms left out are 2e-9 of it.
    """
    e = tl.exp(-tl.abs(z))
    t = e / (2.0 + e)
    u = t * t
    series = 1.0 / 15
    for denominator in tl.static_range(13, 0, -2):
        series = series * u + 1.0 / denominator
    return tl.maximum(z, 0.0) + 2.0 * t * series


@triton.jit
def _sigmoid(z):
    e = tl.exp(-tl.abs(z))
    return tl.where(z < 0, e, 1.0) / (1.0 + e)
