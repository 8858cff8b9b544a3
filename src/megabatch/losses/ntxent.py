"""NT-Xent, SimCLR's loss (Chen et al. 2020, arXiv 2002.05709), at any batch size."""

from __future__ import annotations

import torch
from torch import Tensor

from megabatch.losses.arguments import check_share, check_views, stack_views
from megabatch.losses.base import ContrastiveLoss, TemperatureLoss
from megabatch.losses.terms import cross_entropy, debiased, minus_log_probability
from megabatch.similarity import Split, split_stacks
from megabatch.similarity.distributed.means import global_mean


class NTXentLoss(TemperatureLoss):
    """Cross-entropy of each view against all other views of all instances.

    With more than two views, the mean over all ordered pairs of views of one instance, each against
    a softmax over everything but the anchor itself. The matrix is symmetric, so only half of it is
    computed.

    Args:
        temperature: see `TemperatureLoss`.
        tau_plus: the probability that a negative is a false one, which belongs to the anchor's own
            class; from 0 to below 1. The sum over the N negatives is corrected for it (Chuang et
            al. 2020, arXiv 2007.00224): max((Σ e^negative - N tau_plus e^positive) / (1 -
            tau_plus), N e^(-1 / temperature)). For two views of unit length; 0: no correction.
        normalize: scale each row of the features to unit length first, as `F.normalize` does. None:
            take them as they are, and warn at the first eager call if their lengths are far from 1
            (on a GPU at the second, to avoid a synchronisation). False: do not warn.
        group: processes that share one batch: None, "local", a process group or a DeviceMesh.

    Raises:
        TypeError, ValueError: the message names the argument, its value and what was expected.
    """

    settings = ("temperature", "tau_plus", *ContrastiveLoss.settings)

    def __init__(
        self,
        temperature: float | Tensor,
        *,
        tau_plus: float = 0.0,
        normalize: bool | None = None,
        group: object = None,
    ) -> None:
        super().__init__(temperature, normalize=normalize, group=group)
        self.tau_plus = check_share("tau_plus", tau_plus)

    def forward(self, *views: Tensor, temperature: float | Tensor | None = None) -> Tensor:
        """The mean loss over all views of all instances.

        Args:
            views: two or more of shape (b, d), row i of each belongs to instance i.
            temperature: for this call, instead of the constructor's.

        Returns:
            A scalar in float32 (float64 for float64 features); 0 for one instance of two views.

        Raises:
            TypeError, ValueError: the message names the argument, its value and what was expected.
        """
        check_views(views)
        if self.tau_plus and len(views) > 2:
            raise ValueError(f"views: expected two with tau_plus={self.tau_plus}, got {len(views)}")
        self._look_at_lengths(views[0])
        x, instances = stack_views(self._operands(*views), self.group)
        scale = self._scale(temperature, x)
        stacks = split_stacks(x, None, scale, ids=instances, sides="rows", group=self.group)
        rows, batch = Split.of(stacks.rows), stacks.batch
        losses = self._debiased(rows, scale, batch) if self.tau_plus else cross_entropy(rows)
        return global_mean(losses, self.group, name="views", batch=batch)

    def _debiased(self, rows: Split, scale: Tensor, batch: Tensor | None) -> Tensor:
        """Losses of two views; `batch`: number of rows of all processes, None: as many as here."""
        positive = rows.positive_sum
        size = torch.full_like(scale, len(positive)) if batch is None else batch.to(scale.dtype)
        negative = debiased(positive, rows.negative, scale, size - 2, self.tau_plus)
        return minus_log_probability(positive, negative)
