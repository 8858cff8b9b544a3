"""Supervised contrastive loss (Khosla et al. 2020, arXiv 2004.11362) at any batch size."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from megabatch.losses.arguments import check_choice, check_labelled
from megabatch.losses.base import ContrastiveLoss, TemperatureLoss
from megabatch.losses.terms import (
    cross_entropy,
    minus_log_probability,
    with_nan_of_unpaired,
    zero_without_positive,
)
from megabatch.similarity import Split, split_logsumexp
from megabatch.similarity.distributed.means import global_mean


class SupConLoss(TemperatureLoss):
    """Each anchor against all other rows, of which those of its label are its positives.

    The loss is the mean over the anchors that have a positive; if none has, it is 0 with zero
    gradients. The paper's sum over anchors, and the factor temperature / base_temperature of its
    released code, differ from this by constant factors.

    Args:
        temperature: see `TemperatureLoss`.
        form: "out", the paper's L_out: the mean over positives of -log p; or "in", its L_in: -log
            of the mean over positives of p, for which one close positive is enough. The paper finds
            "out" better.
        normalize: scale each row of the features to unit length first, as `F.normalize` does. None:
            take them as they are, and warn at the first eager call if their lengths are far from 1
            (on a GPU at the second, to avoid a synchronisation). False: do not warn.
        group: processes that share one batch: None, "local", a process group or a DeviceMesh.
    """

    settings = ("temperature", "form", *ContrastiveLoss.settings)

    def __init__(
        self,
        temperature: float | Tensor,
        *,
        form: Literal["out", "in"] = "out",
        normalize: bool | None = None,
        group: object = None,
    ) -> None:
        super().__init__(temperature, normalize=normalize, group=group)
        check_choice("form", form, ("out", "in"))
        self.form = form

    def forward(
        self,
        embeddings: Tensor,
        labels: Tensor,
        references: Tensor | None = None,
        reference_labels: Tensor | None = None,
        *,
        temperature: float | Tensor | None = None,
    ) -> Tensor:
        """The mean loss over the anchors that have a positive.

        Args:
            embeddings: (n, d) anchors.
            labels: (n,) integers. A row with a negative label has no positive and serves as a
                negative only.
            references: (m, d); anchors are compared with these instead of with each other.
            reference_labels: (m,) integers.
            temperature: for this call, instead of the constructor's.

        Returns:
            A scalar in float32 (float64 for float64 features).

        Raises:
            TypeError, ValueError: the message names the argument, its value and what was expected.
        """
        ids = check_labelled(embeddings, labels, references, reference_labels)
        self._look_at_lengths(embeddings)
        x, y = self._operands(embeddings, references)
        scale = self._scale(temperature, x)
        rows, _ = split_logsumexp(x, y, scale, ids=ids, sides="rows", group=self.group)
        losses = cross_entropy(rows) if self.form == "out" else _minus_log_mean(rows)
        some = (rows.positive_count > 0).to(losses.dtype)
        losses = with_nan_of_unpaired(losses, x, y)
        return global_mean(losses, self.group, some, name="embeddings")


def _minus_log_mean(side: Split) -> Tensor:
    """Each row's -log of the mean probability of its positives; 0 without positives."""
    # The log-sum-exp of one positive is its logit; see `cross_entropy`.
    positive = torch.where(side.positive_count == 1, side.positive_sum, side.positive)
    count = side.positive_count.clamp(min=1)
    losses = minus_log_probability(positive, side.negative) + count.log()
    return zero_without_positive(losses, side)
