"""Decoupled contrastive learning (Yeh et al. 2021, arXiv 2110.06848) at any batch size."""

from __future__ import annotations

import torch
from torch import Tensor

from megabatch.losses.arguments import check_number, check_views, stack_views
from megabatch.losses.base import ContrastiveLoss, TemperatureLoss
from megabatch.similarity import Split, paired, split_stacks
from megabatch.similarity.distributed.means import global_mean, log_mean_exp


class DCLLoss(TemperatureLoss):
    """NT-Xent without the positive in the softmax: `log sum e^negatives - positive`.

    Without the positive there, the gradient does not vanish as a pair is learnt, which helps with
    small batches. With more than two views, the positive logit is the mean over the other views of
    the same instance.

    Args:
        temperature: see `TemperatureLoss`.
        sigma: weight each positive logit by 2 - e^(c / sigma) / mean of e^(c / sigma), the paper's
            negative von Mises-Fisher weights (DCLW), so that pairs of low similarity c count more.
            The mean is over all pairs of all processes; no gradient flows into the weights. A
            positive number (0.5 in the paper), for two views only; None: all weights are 1.
        normalize: scale each row of the features to unit length first, as `F.normalize` does. None:
            take them as they are, and warn at the first eager call if their lengths are far from 1
            (on a GPU at the second, to avoid a synchronisation). False: do not warn.
        group: processes that share one batch: None, "local", a process group or a DeviceMesh.

    Raises:
        TypeError, ValueError: the message names the argument, its value and what was expected.
    """

    settings = ("temperature", "sigma", *ContrastiveLoss.settings)

    def __init__(
        self,
        temperature: float | Tensor,
        *,
        sigma: float | None = None,
        normalize: bool | None = None,
        group: object = None,
    ) -> None:
        super().__init__(temperature, normalize=normalize, group=group)
        self.sigma = None if sigma is None else check_number("sigma", sigma)
        if self.sigma is not None and self.sigma <= 0:
            raise ValueError(f"sigma: expected a positive number, got {sigma}")

    def forward(self, *views: Tensor, temperature: float | Tensor | None = None) -> Tensor:
        """The mean loss over all views of all instances.

        Args:
            views: two or more of shape (b, d), row i of each belongs to instance i. All views of
                all other instances are negatives, as in the paper.
            temperature: for this call, instead of the constructor's.

        Returns:
            A scalar in float32 (float64 for float64 features), negative for learnt pairs; 0 for
            a single instance, which has no negatives.

        Raises:
            TypeError, ValueError: the message names the argument, its value and what was expected.
        """
        check_views(views)
        if self.sigma is not None and len(views) > 2:
            raise ValueError(f"views: expected two with sigma={self.sigma}, got {len(views)}")
        self._look_at_lengths(views[0])
        views = self._operands(*views)
        x, instances = stack_views(views, self.group)
        scale = self._scale(temperature, x)
        stacks = split_stacks(x, None, scale, ids=instances, sides="rows", group=self.group)
        rows, batch = Split.of(stacks.rows), stacks.batch
        weights: float | Tensor = 1.0
        if self.sigma is not None:
            weights = mises_fisher_weights(views[0], views[1], self.sigma, self.group).repeat(2)
        return global_mean(decoupled(rows, weights), self.group, name="views", batch=batch)


def mises_fisher_weights(first: Tensor, second: Tensor, sigma: float, group: object) -> Tensor:
    """2 - e^(c_i / sigma) / mean of e^(c / sigma) for c_i = <first_i, second_i>, (b,)."""
    exponents = paired(first.detach(), second.detach(), 1 / sigma)
    return 2 - (exponents - log_mean_exp(exponents, group)).exp()


def decoupled(side: Split, weights: float | Tensor = 1.0) -> Tensor:
    """Log-sum-exp over negatives less the weighted mean positive logit; 0 without negatives."""
    losses = side.negative - weights * (side.positive_sum / side.positive_count)
    # Not a constant 0, which would hide a NaN.
    return torch.where(side.negative == -torch.inf, 0.0 * side.positive_sum, losses)
