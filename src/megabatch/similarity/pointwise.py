"""The logits of the pairs (i, i), without an fp32 copy of the features."""

from __future__ import annotations

import torch
from torch import Tensor

from megabatch.similarity.arguments import (
    accumulator_dtype,
    cast_for_autocast,
    check_same_rows,
    check_scalar,
    check_two,
)
from megabatch.similarity.matrix import strips
from megabatch.similarity.ops import operator

#: Elements of x widened at a time.
CHUNK = 1 << 22


def paired(x: Tensor, y: Tensor, scale: float | Tensor = 1.0) -> Tensor:
    """The logits scale * <x_i, y_i>, (m,), products and sums in float32 (float64 for float64).

    Args:
        x, y: (m, d), same dtype and device. scale: a number or a tensor of shape () or (1,).

    Raises:
        TypeError, ValueError: the message names the argument, its value and what was expected.
    """
    check_two(x, y)
    check_same_rows(x, y)
    x, y = cast_for_autocast(x, y)
    scale = check_scalar("scale", scale, x)
    # Multiplied outside the operator: the scale's gradient then needs no second pass.
    return row_products(x, y) * scale


@operator("row_products")
def row_products(x: Tensor, y: Tensor) -> Tensor:
    """<x_i, y_i> for each row."""
    dtype = accumulator_dtype(x.dtype)
    out = x.new_empty(x.shape[0], dtype=dtype)
    for i in _chunks(x):
        torch.sum(x[i].to(dtype) * y[i], dim=1, dtype=dtype, out=out[i])
    return out


@row_products.register_fake
def _(x: Tensor, y: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], dtype=accumulator_dtype(x.dtype))


@operator("scale_rows")
def scale_rows(x: Tensor, factor: Tensor) -> Tensor:
    """factor_i * x_i, multiplied in the factor's dtype and returned in x's."""
    out = torch.empty_like(x)
    for i in _chunks(x):
        out[i] = x[i] * factor[i, None]
    return out


@scale_rows.register_fake
def _(x: Tensor, factor: Tensor) -> Tensor:
    return torch.empty_like(x)


def _chunks(x: Tensor):  # type: ignore[no-untyped-def]
    return strips(x.shape[0], max(1, CHUNK // x.shape[1]))


def _autograd(ctx, gradient):  # type: ignore[no-untyped-def]
    x, y = ctx.saved_tensors
    dx = scale_rows(y, gradient) if ctx.needs_input_grad[0] else None
    dy = scale_rows(x, gradient) if ctx.needs_input_grad[1] else None
    return dx, dy


row_products.register_autograd(
    _autograd, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs)
)
