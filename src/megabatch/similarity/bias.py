"""A number added to all logits of a column, as further columns of the features."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megabatch.similarity.arguments import (
    cast_for_autocast,
    check_scalar,
    check_two,
    check_vector,
)
from megabatch.similarity.ops import operator
from megabatch.similarity.pointwise import row_products

#: The rows' further features: as large as those of a unit vector of width 256, so that float16,
#: whose range is small, holds the columns' further features and their gradients likewise.
UNIT = 1 / 16


def with_column_bias(
    x: Tensor, y: Tensor, scale: float | Tensor, bias: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Operands of any reduction of this package for the logits `scale * <x_i, y_j> + bias_j`.

    No reduction, kernel or transfer needs to know of the bias: a column's further features sum up
    to `bias / scale`. Every format in which products are taken (bfloat16, float16, TF32) holds
    eight bits of mantissa, so three features hold a float32 number.

    Args:
        x: (m, d) features. y: (n, d), as in `logsumexp`. Under autocast both are cast first.
        scale: as in `logsumexp`, but not 0. Over several processes, pass `replicated(scale)`.
        bias: (n,) floating-point numbers; differentiable. Its gradient, the sum of its column's,
            is rounded to the dtype of y. With float16 features, it must be below 4,000 * scale.

    Returns:
        `(x, y, scale)`: features with 3 to 10 further columns, so that rows are whole 16 bytes
        (float64: 1 or 2), and the scale without a gradient, which comes through x.

    Raises:
        TypeError, ValueError: the message names the argument, its value and what was expected.
    """
    check_two(x, y)
    x, y = cast_for_autocast(x, y)
    scale, bias = check_scalar("scale", scale, x), check_vector("bias", bias, y.shape[0], y)
    fixed = scale.detach()
    parts = torch.stack(_parts(bias / (UNIT * fixed)), 1).to(y.dtype)
    missing = -(y.shape[1] + parts.shape[1]) % (16 // y.element_size())
    y = torch.cat([y, F.pad(parts, (0, missing))], 1)
    return _rows(x, scale, y.shape[1] - x.shape[1]), y, fixed


def _parts(values: Tensor) -> list[Tensor]:
    """Numbers of eight bits that sum up to float32 values, of which the first has the gradient."""
    if values.dtype == torch.float64:
        return [values]
    parts, rest = [], values.detach()
    for _ in range(3):
        # By its bits: torch.compile omits casts to bfloat16 and back.
        part = (rest.view(torch.int32) & -(1 << 16)).view(torch.float32)
        parts.append(part)
        rest = rest - part
    return [parts[0] + (values - values.detach()), *parts[1:]]


@operator("rows_of_column_bias")
def _rows(x: Tensor, scale: Tensor, width: int) -> Tensor:
    """x with so many further features.

    The scale's gradient, <x, dx> / scale, is found here. With the bias's own part, in both the
    reduction's and that of bias / scale, it would be the difference of two rounded sums.
    """
    return F.pad(x, (0, width), value=UNIT)


@_rows.register_fake
def _(x: Tensor, scale: Tensor, width: int) -> Tensor:
    return x.new_empty(x.shape[0], x.shape[1] + width)


def _autograd(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    x, scale = ctx.saved_tensors
    dx = gradient[:, : x.shape[1]]
    dscale = row_products(x, dx).sum() / scale if ctx.needs_input_grad[1] else None
    return dx, dscale, None


_rows.register_autograd(
    _autograd, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs[:2])
)
