"""Losses of class labels at any batch size.

Supervised contrastive learning (Khosla et al. 2020, arXiv 2004.11362), and SINCERE (Feeney and
Hughes 2023, arXiv 2309.14277).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from megabatch.losses.arguments import check_choice
from megabatch.losses.base import TemperatureLoss
from megabatch.losses.terms import cross_entropy, minus_log_probability, zero_without_positive
from megabatch.similarity import global_mean, split_logsumexp
from megabatch.similarity.arguments import (
    accumulator_dtype,
    check_features,
    check_integers,
    check_two,
)
from megabatch.similarity.positives import positive_softplus

Ids: TypeAlias = "Tensor | tuple[Tensor, Tensor]"


class LabelsLoss(TemperatureLoss):
    """A loss of anchors against all other rows; rows with an anchor's label are its positives."""

    #: The anchors' losses and weights, (n,) each, of `(x, y, scale, ids)`.
    _losses: Callable[..., tuple[Tensor, Tensor]]

    def forward(
        self,
        embeddings: Tensor,
        labels: Tensor,
        references: Tensor | None = None,
        reference_labels: Tensor | None = None,
        *,
        temperature: float | Tensor | None = None,
    ) -> Tensor:
        """The mean over the anchors that have a positive, or over positive pairs; 0 without any.

        See `ContrastiveLoss` for dtypes and errors.

        Args:
            embeddings: (n, d) anchors.
            labels: (n,) integers. A row with a negative label has no positive and serves as a
                negative only.
            references: (m, d); anchors are compared with these instead of with each other.
            reference_labels: (m,) integers.
            temperature: for this call, instead of the constructor's.
        """
        check_features("embeddings", embeddings)
        labels = check_integers("labels", labels, embeddings.shape[0], embeddings)
        if (references is None) != (reference_labels is None):
            absent = "references" if references is None else "reference_labels"
            raise ValueError(f"{absent}: expected with the other of the two, got None")
        ids: Ids = labels
        y = None
        if references is not None:
            check_two(embeddings, references, ("embeddings", "references"))
            size = references.shape[0]
            ids = labels, check_integers("reference_labels", reference_labels, size, references)
            y = self._operand(references)
        self._check_lengths(embeddings)
        x = self._operand(embeddings)
        losses, weights = self._losses(x, y, self._scale(temperature, x), ids)
        if len(x) == 1 or (y is not None and len(y) == 0):
            # No anchor is part of a pair, so a NaN among them appears in no logit.
            losses = losses + 0.0 * x.detach().sum(1, dtype=losses.dtype)
        return global_mean(losses, self.group, weights, name="embeddings")


class SupConLoss(LabelsLoss):
    """Each anchor against all other rows; rows with its label are its positives.

    The loss is the mean over the anchors that have a positive; if none has, it is 0 with zero
    gradients. The paper's sum over anchors, and the factor temperature / base_temperature of its
    released code, differ from this by constant factors.

    Args:
        temperature, normalize, group: see `TemperatureLoss`.
        form: "out", the paper's L_out: the mean over positives of -log p; or "in", its L_in: -log
            of the mean over positives of p, for which one close positive is enough. The paper finds
            "out" better.
    """

    def __init__(
        self,
        temperature: float | Tensor,
        *,
        form: Literal["out", "in"] = "out",
        normalize: bool | None = None,
        group: object = None,
    ) -> None:
        super().__init__(temperature, normalize=normalize, group=group)
        self.form = check_choice("form", form, ("out", "in"))

    def _losses(
        self, x: Tensor, y: Tensor | None, scale: Tensor, ids: Ids
    ) -> tuple[Tensor, Tensor]:
        rows, _ = split_logsumexp(x, y, scale, ids=ids, sides="rows", group=self.group)
        count = rows.positive_count
        if self.form == "out":
            losses = cross_entropy(rows)
        else:
            # The log-sum-exp of one positive is its logit; see `cross_entropy`.
            positive = torch.where(count == 1, rows.positive_sum, rows.positive)
            losses = minus_log_probability(positive, rows.negative) + count.clamp(min=1).log()
            losses = zero_without_positive(losses, rows)
        return losses, (count > 0).to(losses.dtype)


class SincereLoss(LabelsLoss):
    """NT-Xent with labels: each positive against all negatives, but against no other positive.

    In `SupConLoss` the positives of an anchor share one softmax, where they compete: one that is
    learnt pushes the others away. Here each has a softmax of its own. In a group, each process
    holds the features of all processes while the positives' products are computed.

    Args:
        temperature, normalize, group: see `TemperatureLoss`.
        average: "anchors", as in the paper: the mean over anchors of the mean over their positives;
            or "pairs", as in pytorch-metric-learning's NTXentLoss: the mean over all positive
            pairs, in which large classes count more.
    """

    def __init__(
        self,
        temperature: float | Tensor,
        *,
        average: Literal["anchors", "pairs"] = "anchors",
        normalize: bool | None = None,
        group: object = None,
    ) -> None:
        super().__init__(temperature, normalize=normalize, group=group)
        self.average = check_choice("average", average, ("anchors", "pairs"))

    def _losses(
        self, x: Tensor, y: Tensor | None, scale: Tensor, ids: Ids
    ) -> tuple[Tensor, Tensor]:
        # The gradients of both sweeps are added in the accumulator's dtype. In half precision each
        # would be rounded, and their sum, in which they partly cancel, once more.
        dtype, wide = x.dtype, accumulator_dtype(x.dtype)
        x, y = x.to(wide), None if y is None else y.to(wide)
        narrow = x.to(dtype), None if y is None else y.to(dtype)
        rows, _ = split_logsumexp(*narrow, scale, ids=ids, sides="rows", group=self.group)
        sums = positive_softplus(x, y, scale, rows.negative, ids, self.group)
        count = rows.positive_count
        losses = zero_without_positive(sums / count.clamp(min=1), rows)
        return losses, count if self.average == "pairs" else (count > 0).to(count.dtype)
