"""Decoupled contrastive learning (Yeh et al. 2021, arXiv 2110.06848) at any batch size."""

from __future__ import annotations

import torch
from torch import Tensor

from megabatch.losses.arguments import check_views, stack_views
from megabatch.losses.base import TemperatureLoss
from megabatch.similarity import Split
from megabatch.similarity.distributed.means import global_mean
from megabatch.similarity.functions import split_and_count


class DCLLoss(TemperatureLoss):
    """NT-Xent without the positive in the softmax: `log sum e^negatives - positive`.

    Without that coupling the gradient does not vanish as a pair is learnt, which helps small
    batches. With more than two views the positive's logit is the mean over the others' of the same
    instance.

    Args:
        temperature: see `TemperatureLoss`.
        normalize: scale each row of the features to unit length first, as `F.normalize` does. None:
            take them as they are, and warn at the first eager call if their lengths are far from 1
            (on a GPU at the second, since nothing waits for a look at them); False: do not warn.
        group: processes that share one batch: None, "local" or a process group.
    """

    def __init__(
        self,
        temperature: float | Tensor,
        *,
        normalize: bool | None = None,
        group: object = None,
    ) -> None:
        super().__init__(temperature, normalize=normalize, group=group)

    def forward(self, *views: Tensor, temperature: float | Tensor | None = None) -> Tensor:
        """The mean loss over all views of all instances.

        Args:
            views: two or more of shape (b, d), row i of each belongs to instance i. All views of
                all other instances are negatives, as published.
            temperature: this call's, instead of the constructor's.

        Returns:
            A scalar in float32 (float64 for float64 features), negative for learnt pairs; 0 for
            a single instance, which has no negatives.

        Raises:
            TypeError, ValueError: the message names the argument, what came, what was expected.
        """
        check_views(views)
        self._look_at_lengths(views[0])
        x, instances = stack_views(self._operands(*views), self.group)
        scale = self._scale(temperature, x)
        rows, _, batch = split_and_count(
            x, None, scale, ids=instances, sides="rows", group=self.group
        )
        return global_mean(decoupled(rows), self.group, name="views", batch=batch)


def decoupled(side: Split) -> Tensor:
    """Each row's log-sum-exp over negatives less its mean positive logit; 0 without negatives."""
    losses = side.negative - side.positive_sum / side.positive_count
    # Not a constant 0, which would hide a NaN.
    return torch.where(side.negative == -torch.inf, 0.0 * side.positive_sum, losses)
