"""Losses of several views of each instance, of which all are compared with all, at any batch size.

NT-Xent, SimCLR's loss (Chen et al. 2020, arXiv 2002.05709), and decoupled contrastive learning (Yeh
et al. 2021, arXiv 2110.06848).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

import torch
from torch import Tensor

from megabatch.losses.arguments import check_number, check_pairs
from megabatch.losses.base import TemperatureLoss
from megabatch.losses.terms import cross_entropy, debiased, minus_log_probability
from megabatch.similarity import Split, global_mean, log_mean_exp, pair_ids, paired, split_stacks


class ViewsLoss(TemperatureLoss):
    """A loss of each view against all views of all instances; views of its instance are positives.

    The matrix is symmetric, so only half of it is computed.
    """

    #: The option that is for two views only.
    _for_two_views: ClassVar[str]
    #: The loss of each view, of `(rows, views, scale, batch)`; `batch`: the number of views of all
    #: processes, None if there is one process.
    _losses: Callable[..., Tensor]

    def forward(self, *views: Tensor, temperature: float | Tensor | None = None) -> Tensor:
        """The mean loss over all views of all instances; see `ContrastiveLoss`.

        Args:
            views: two or more of shape (b, d), row i of each belongs to instance i.
            temperature: for this call, instead of the constructor's.
        """
        if len(views) < 2:
            raise TypeError(f"views: expected two or more, got {len(views)}")
        for i, view in enumerate(views[1:], start=1):
            check_pairs(views[0], view, ("views[0]", f"views[{i}]"))
        option = getattr(self, self._for_two_views)
        if option and len(views) > 2:
            raise ValueError(
                f"views: expected two with {self._for_two_views}={option}, got {len(views)}"
            )
        self._check_lengths(views[0])
        views = tuple(self._operand(view) for view in views)
        x, instances = stack_views(views, self.group)
        scale = self._scale(temperature, x)
        stacks = split_stacks(x, None, scale, ids=instances, sides="rows", group=self.group)
        losses = self._losses(Split.of(stacks.rows), views, scale, stacks.batch)
        return global_mean(losses, self.group, name="views", batch=stacks.batch)


class NTXentLoss(ViewsLoss):
    """Cross-entropy of each view against all other views of all instances.

    With more than two views, the mean over all ordered pairs of views of one instance, each against
    a softmax over everything but the anchor itself. For one instance of two views it is 0.

    Args:
        temperature, normalize, group: see `TemperatureLoss`.
        tau_plus: the probability that a negative is a false one, which belongs to the anchor's own
            class; from 0 to below 1. The sum over the N negatives is corrected for it (Chuang et
            al. 2020, arXiv 2007.00224): max((Σ e^negative - N tau_plus e^positive) / (1 -
            tau_plus), N e^(-1 / temperature)). For two views of unit length; 0: no correction.
    """

    _for_two_views = "tau_plus"

    def __init__(
        self,
        temperature: float | Tensor,
        *,
        tau_plus: float = 0.0,
        normalize: bool | None = None,
        group: object = None,
    ) -> None:
        super().__init__(temperature, normalize=normalize, group=group)
        self.tau_plus = check_number("tau_plus", tau_plus, "0 to below 1")

    def _losses(
        self, rows: Split, views: tuple[Tensor, ...], scale: Tensor, batch: Tensor | None
    ) -> Tensor:
        if not self.tau_plus:
            return cross_entropy(rows)
        positive = rows.positive_sum
        size = torch.full_like(scale, len(positive)) if batch is None else batch.to(scale.dtype)
        negative = debiased(positive, rows.negative, scale, size - 2, self.tau_plus)
        return minus_log_probability(positive, negative)


class DCLLoss(ViewsLoss):
    """NT-Xent without the positive in the softmax: `log sum e^negatives - positive`.

    Without the positive there, the gradient does not vanish as a pair is learnt, which helps with
    small batches. With more than two views, the positive logit is the mean over the other views of
    the same instance. All views of all other instances are negatives, as in the paper. The loss is
    negative for learnt pairs, and 0 for a single instance, which has no negatives.

    Args:
        temperature, normalize, group: see `TemperatureLoss`.
        sigma: weight each positive logit by 2 - e^(c / sigma) / mean of e^(c / sigma), the paper's
            negative von Mises-Fisher weights (DCLW), so that pairs of low similarity c count more.
            The mean is over all pairs of all processes; no gradient flows into the weights. A
            positive number (0.5 in the paper), for two views only; None: all weights are 1.
    """

    _for_two_views = "sigma"

    def __init__(
        self,
        temperature: float | Tensor,
        *,
        sigma: float | None = None,
        normalize: bool | None = None,
        group: object = None,
    ) -> None:
        super().__init__(temperature, normalize=normalize, group=group)
        positive = "a positive, finite number"
        self.sigma = None if sigma is None else check_number("sigma", sigma, positive)

    def _losses(
        self, rows: Split, views: tuple[Tensor, ...], scale: Tensor, batch: Tensor | None
    ) -> Tensor:
        positive = rows.positive_sum / rows.positive_count
        if self.sigma is not None:
            exponents = paired(views[0].detach(), views[1].detach(), 1 / self.sigma)
            weights = 2 - (exponents - log_mean_exp(exponents, self.group)).exp()
            positive = weights.repeat(2) * positive
        # Without negatives not a constant 0, which would hide a NaN.
        nothing = 0.0 * rows.positive_sum
        return torch.where(rows.negative == -torch.inf, nothing, rows.negative - positive)


def stack_views(views: tuple[Tensor, ...], group: object) -> tuple[Tensor, Tensor]:
    """Views (b, d) of the same b instances as one matrix, and each row's instance."""
    ids = pair_ids(views[0].shape[0], group, device=views[0].device)
    return torch.cat(views), ids.repeat(len(views))
