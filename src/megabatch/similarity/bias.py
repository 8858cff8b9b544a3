"""A number added to all logits of a column, as further columns of the features.

So no kernel, schedule or transfer knows of it: a column's further features sum up to bias / scale.
Every format in which products are taken (bfloat16, float16, TF32) holds eight bits of mantissa, so
three features hold a float32 number.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from megabatch.similarity.arguments import check_vector, extremes

#: The rows' further features: as large as a unit vector's of width 256, so that float16,
#: whose range is small, holds the columns' further features and their gradients likewise.
UNIT = 1 / 16


def with_column_bias(x: Tensor, y: Tensor, scale: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """Features with the products `<x_i, y_j> + bias_j / scale`, whose rows are whole 16 bytes.

    The scale gets no gradient here: with its own part of that, the reduction's would have to
    contain the bias's as well, and the two would cancel but for their rounding.
    """
    bias = check_vector("col_bias", bias, y.shape[0], y)
    parts = torch.stack(_parts(bias / (UNIT * scale.detach())), 1).to(y.dtype)
    # An infinite part would silently drop its column, or all others.
    parts = parts.masked_fill(parts.isinf(), torch.nan)
    found = extremes(parts)
    if found is not None and math.isnan(found[0]):
        name, (low, high) = str(y.dtype).removeprefix("torch."), extremes(bias) or found
        raise ValueError(
            "col_bias (in a loss, -log_q): expected finite numbers that, times 16 and divided by "
            f"the scale, fit into {name}, got {low:.6g} to {high:.6g}"
        )
    missing = -(y.shape[1] + parts.shape[1]) % (16 // y.element_size())
    further = F.pad(parts, (0, missing))
    return F.pad(x, (0, further.shape[1]), value=UNIT), torch.cat([y, further], 1)


def _parts(values: Tensor) -> list[Tensor]:
    """Numbers of eight bits that sum up to float32 values, of which the first has the gradient."""
    if values.dtype == torch.float64:
        return [values]
    parts, rest = [], values.detach()
    for _ in range(3):
        # Cut off as bits, since torch.compile omits casts to bfloat16 and back.
        part = (rest.view(torch.int32) & -(1 << 16)).view(torch.float32)
        parts.append(part)
        rest = rest - part
    return [parts[0] + (values - values.detach()), *parts[1:]]
