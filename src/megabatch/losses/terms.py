"""Expressions that several losses share, over one side of a split similarity matrix."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from megabatch.similarity import Split
from megabatch.similarity.ops import operator


def cross_entropy(side: Split) -> Tensor:
    """Each row's -log softmax probability of a positive, the mean over its positives; (rows,).

    The softmax runs over positives and negatives:
    `log(e^negative + e^positive) - positive_sum / positive_count`. 0 where there is no positive.
    """
    mean = side.positive_sum / side.positive_count.clamp(min=1)
    # The log-sum-exp of one positive is its logit. Taking that from the sum gives a single upstream
    # gradient 1 - p in each tile, instead of p and -1, whose difference cancels as p nears 1.
    single = side.positive_count == 1
    positive = torch.where(single, mean, side.positive)
    spread = torch.where(single, 0.0, side.positive - mean)
    losses = spread + minus_log_probability(positive, side.negative)
    return zero_without_positive(losses, side)


def zero_without_positive(losses: Tensor, side: Split) -> Tensor:
    """A row's loss, or without positives 0, or NaN if one of its logits is not finite."""
    known = side.negative < torch.inf  # -inf: without negatives either
    nothing = torch.zeros_like(losses).masked_fill(~known, torch.nan)
    return torch.where(side.positive_count == 0, nothing, losses)


def minus_log_probability(positive: Tensor, negative: Tensor) -> Tensor:
    """-log(e^positive / (e^positive + e^negative)), accurate also near 0.

    Above its threshold softplus returns its argument: with torch's default of 20 the error is 2e-9,
    with 50 it is below float64's rounding.
    """
    return F.softplus(negative - positive, threshold=50)


def scale_gradient(tensor: Tensor, factor: float | Tensor) -> Tensor:
    """`tensor` as it is, its gradient multiplied by `factor`.

    Args:
        tensor: any shape. factor: a number, or a tensor that broadcasts to that shape; it gets no
            gradient.
    """
    if not isinstance(factor, Tensor):
        factor = torch.full((), factor, dtype=tensor.dtype, device=tensor.device)
    return _scale_gradient(tensor, factor.detach())


@operator("scale_gradient")
def _scale_gradient(tensor: Tensor, factor: Tensor) -> Tensor:
    return tensor.clone()


@_scale_gradient.register_fake
def _(tensor: Tensor, factor: Tensor) -> Tensor:
    return torch.empty_like(tensor)


_scale_gradient.register_autograd(
    lambda ctx, gradient: (gradient * ctx.saved_tensors[0], None),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[1]),
)
