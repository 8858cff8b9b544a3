"""CLIP's loss (Radford et al. 2021, arXiv 2103.00020) at any batch size."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from megabatch.losses.arguments import (
    check_choice,
    check_pairs,
    check_share,
    check_weights,
    own_ids,
)
from megabatch.losses.base import ContrastiveLoss, keep_in_graph
from megabatch.losses.paired import paired_losses
from megabatch.losses.terms import cross_entropy
from megabatch.similarity import Split, split_stacks
from megabatch.similarity.arguments import check_scalar
from megabatch.similarity.distributed.means import global_mean, mean_row, replicated


class ClipLoss(ContrastiveLoss):
    """Symmetric cross-entropy of each image against all texts and each text against all images.

    Called like OpenCLIP's loss. Memory grows with b·d, not with b²; one sweep serves both
    directions.

    Args:
        label_smoothing: from 0 to below 1; this share of each target is spread evenly over all
            columns, as `torch.nn.functional.cross_entropy` does.
        duplicates: how pairs with equal `ids` are treated. "positive": as additional positives,
            with the target spread evenly over them (Khosla et al. 2020, arXiv 2004.11362, L_out).
            "ignored": they are left out of each other's negatives.
        normalize: scale each row of the features to unit length first, as `F.normalize` does.
        group: processes that share one batch: None, "local", a process group or a DeviceMesh.

    Raises:
        TypeError, ValueError: the message names the argument. Label smoothing cannot be combined
            with duplicates="ignored".
    """

    settings = ("label_smoothing", "duplicates", *ContrastiveLoss.settings)

    def __init__(
        self,
        *,
        label_smoothing: float = 0.0,
        duplicates: Literal["positive", "ignored"] = "positive",
        normalize: bool = False,
        group: object = None,
    ) -> None:
        super().__init__(normalize=normalize, group=group)
        label_smoothing = check_share("label_smoothing", label_smoothing)
        check_choice("duplicates", duplicates, ("positive", "ignored"))
        if label_smoothing and duplicates == "ignored":
            raise ValueError(
                f"label_smoothing: expected 0 with duplicates='ignored', got {label_smoothing}"
            )
        self.label_smoothing, self.duplicates = label_smoothing, duplicates

    def forward(
        self,
        image_features: Tensor,
        text_features: Tensor,
        logit_scale: float | Tensor,
        logit_bias: float | Tensor | None = None,
        output_dict: bool = False,
        *,
        ids: Tensor | None = None,
        weights: Tensor | None = None,
    ) -> Tensor | dict[str, Tensor]:
        """The mean loss over the batch.

        Args:
            image_features, text_features: (b, d), row i of one belongs to row i of the other; under
                autocast in any dtypes that autocast casts.
            logit_scale: 1 / temperature, exponentiated already, as OpenCLIP's models give it.
            logit_bias: accepted for compatibility with OpenCLIP; a bias common to all logits
                cancels in a softmax, so it has no effect and its gradient is 0.
            output_dict: return `{"contrastive_loss": loss}`.
            ids: (b,) integers below 2**62; equal ids mark pairs that share a caption or document. A
                negative id is shared with no other pair.
            weights: (b,) non-negative factors of the pairs' losses, without a gradient; the loss is
                the weighted mean, or 0 if all weights are 0.

        Returns:
            A scalar in float32 (float64 for float64 features).

        Raises:
            TypeError, ValueError: the message names the argument, its value and what was expected.
        """
        check_pairs(image_features, text_features, ("image_features", "text_features"))
        x, y = self._operands(image_features, text_features)
        scale = check_scalar("logit_scale", logit_scale, x)
        if self.label_smoothing:  # `_mean_logit` uses the scale outside the engine
            scale = replicated(scale, self.group)
        bias = None if logit_bias is None else check_scalar("logit_bias", logit_bias, x)
        weights = check_weights(weights, x)
        if ids is not None:
            ids = own_ids(ids, x, self.group)
        # One positive a row, its own pair, unless ids make positives of others.
        paired = ids is None or self.duplicates == "ignored"
        rows, columns, batch = split_stacks(
            x,
            y,
            scale,
            ids="paired" if ids is None else (ids, ids),
            positives="paired" if paired else "ids",
            group=self.group,
            terms="no weights" if weights is None else "weights",
        )
        assert columns is not None
        if paired:
            losses = paired_losses(rows, columns)
            if self.label_smoothing:  # as in `_losses`, of one positive
                losses = losses + self.label_smoothing * (rows[2] + columns[2]) / 2
        else:
            losses = (self._losses(Split.of(rows)) + self._losses(Split.of(columns))) / 2
        loss = global_mean(losses, self.group, weights, name="image_features", batch=batch)
        if self.label_smoothing:
            loss = loss - self.label_smoothing * self._mean_logit(x, y, scale, weights)
        loss = keep_in_graph(loss, bias)
        return {"contrastive_loss": loss} if output_dict else loss

    def _losses(self, side: Split) -> Tensor:
        """One direction's loss of each pair, without the smoothed target's part on all columns."""
        losses = cross_entropy(side)
        if self.label_smoothing:
            # This share of the target moves from the positives to all columns equally. The columns'
            # part, `_mean_logit`, is computed outside of the sweep, so this share is rounded once
            # more.
            losses = losses + self.label_smoothing * side.positive_sum / side.positive_count
        return losses

    def _mean_logit(self, x: Tensor, y: Tensor, scale: Tensor, weights: Tensor | None) -> Tensor:
        """Mean over pairs and directions of each row's mean logit: products of mean features."""
        plain = mean_row(x, self.group), mean_row(y, self.group)
        if weights is None:
            return scale * torch.dot(*plain)
        weighted = mean_row(x, self.group, weights), mean_row(y, self.group, weights)
        return scale * (torch.dot(weighted[0], plain[1]) + torch.dot(plain[0], weighted[1])) / 2
