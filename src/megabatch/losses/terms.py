"""Expressions that several losses share, over one side of a split similarity matrix."""

from __future__ import annotations

import math

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


def debiased(
    positive: Tensor, negative: Tensor, scale: Tensor, count: Tensor, tau_plus: float
) -> Tensor:
    """Log-sum-exp over negatives, corrected for false ones (Chuang et al. 2020), (rows,).

    log max((e^negative - N tau_plus e^positive) / (1 - tau_plus), N e^-scale), where N is the
    `count`. N negatives of unit length cannot have a smaller sum than the second term.

    Args:
        positive, negative: (rows,), logits and log-sum-exps.
        scale, count: (), 1 / temperature and the number of negatives.
        tau_plus: from above 0 to below 1.
    """
    floor = count.log() - scale
    share = positive - negative + (count * tau_plus).log()  # log of the part subtracted
    none_left = (share >= 0) | (negative == -torch.inf)
    share = share.masked_fill(none_left, -1.0)  # any number: its result is not used
    # log(1 - e^share) by the expression that does not cancel.
    left = torch.where(share > -0.7, (-share.expm1()).log(), (-share.exp()).log1p())
    rest = (negative + left - math.log1p(-tau_plus)).masked_fill(none_left, -torch.inf)
    return torch.maximum(rest, floor)


@operator("scale_gradient")
def scale_gradient(tensor: Tensor, factor: Tensor) -> Tensor:
    """`tensor` as it is, its gradient multiplied by `factor`, which gets no gradient."""
    return tensor.clone()


@scale_gradient.register_fake
def _(tensor: Tensor, factor: Tensor) -> Tensor:
    return torch.empty_like(tensor)


scale_gradient.register_autograd(
    lambda ctx, gradient: (gradient * ctx.saved_tensors[0], None),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[1]),
)
