"""Expressions that several losses share, over one side of a split similarity matrix."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from megabatch.similarity import Split


def cross_entropy(side: Split) -> Tensor:
    """Each row's -log softmax probability of a positive, the mean over its positives; (rows,).

    The softmax runs over positives and negatives:
    `log(e^negative + e^positive) - positive_sum / positive_count`. 0 where there is no positive.
    """
    mean = side.positive_sum / side.positive_count.clamp(min=1)
    # One positive's log-sum-exp is its logit. Taken from the sum, it leaves one upstream gradient
    # 1 - p in each tile instead of p and -1, whose difference is lost as p nears 1.
    single = side.positive_count == 1
    positive = torch.where(single, mean, side.positive)
    spread = torch.where(single, 0.0, side.positive - mean)
    losses = spread + minus_log_probability(positive, side.negative)
    return zero_without_positive(losses, side)


def zero_without_positive(losses: Tensor, side: Split) -> Tensor:
    """A row's loss, or 0 if it has no positive; not 0 but NaN if a logit of it is not finite."""
    known = side.negative < torch.inf  # -inf: there is no negative either
    nothing = torch.zeros_like(losses).masked_fill(~known, torch.nan)
    return torch.where(side.positive_count == 0, nothing, losses)


def minus_log_probability(positive: Tensor, negative: Tensor) -> Tensor:
    """-log(e^positive / (e^positive + e^negative)), exact also where it is nearly 0.

    softplus cuts to its argument above the threshold: at torch's own, 20, that is 2e-9 off, at 50
    below float64's rounding.
    """
    return F.softplus(negative - positive, threshold=50)
