"""CLIP's loss (Radford et al. 2021, arXiv 2103.00020) at any batch size, alone and distilled."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from megabatch.losses.arguments import (
    check_choice,
    check_ids,
    check_number,
    check_pairs,
    check_weights,
)
from megabatch.losses.base import ContrastiveLoss, keep_in_graph
from megabatch.losses.terms import cross_entropy, minus_log_probability
from megabatch.similarity import (
    Split,
    backends,
    global_mean,
    mean_row,
    replicated,
    soft_target_stacks,
    split_stacks,
)
from megabatch.similarity.arguments import check_scalar


class ClipLoss(ContrastiveLoss):
    """Symmetric cross-entropy of each image against all texts and each text against all images.

    Called like OpenCLIP's loss. Memory grows with b·d, not with b²; one sweep serves both
    directions.

    Args:
        label_smoothing: from 0 to below 1; this share of each target is spread evenly over all
            columns, as `torch.nn.functional.cross_entropy` does. Not with duplicates="ignored".
        duplicates: how pairs with equal `ids` are treated. "positive": as additional positives,
            with the target spread evenly over them (Khosla et al. 2020, arXiv 2004.11362, L_out).
            "ignored": they are left out of each other's negatives.
        normalize, group: see `ContrastiveLoss`.
    """

    def __init__(
        self,
        *,
        label_smoothing: float = 0.0,
        duplicates: Literal["positive", "ignored"] = "positive",
        normalize: bool = False,
        group: object = None,
    ) -> None:
        super().__init__(normalize=normalize, group=group)
        self.label_smoothing = check_number("label_smoothing", label_smoothing, "0 to below 1")
        self.duplicates = check_choice("duplicates", duplicates, ("positive", "ignored"))
        if self.label_smoothing and duplicates == "ignored":
            raise ValueError(
                f"label_smoothing: expected 0 with duplicates='ignored', got {label_smoothing}"
            )

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
        """The mean loss over the batch; see `ContrastiveLoss`.

        Args:
            image_features, text_features: (b, d).
            logit_scale: 1 / temperature, exponentiated already, as OpenCLIP's models give it.
            logit_bias: accepted for compatibility with OpenCLIP; a bias common to all logits
                cancels in a softmax, so it has no effect and its gradient is 0.
            output_dict: return `{"contrastive_loss": loss}`.
            ids: (b,) integers below 2**62; equal ids mark pairs that share a caption or document. A
                negative id is shared with no other pair.
            weights: (b,) non-negative factors of the pairs' losses, without a gradient; the loss is
                the weighted mean, or 0 if all weights are 0.
        """
        check_pairs(image_features, text_features, ("image_features", "text_features"))
        x, y = self._operand(image_features), self._operand(text_features)
        scale = check_scalar("logit_scale", logit_scale, x)
        if self.label_smoothing:  # `_mean_logit` uses the scale outside the engine
            scale = replicated(scale, self.group)
        bias = None if logit_bias is None else check_scalar("logit_bias", logit_bias, x)
        weights = check_weights(weights, x)
        ids = None if ids is None else check_ids(ids, x, self.group)
        # One positive a row, its own pair, unless ids make positives of others.
        single = ids is None or self.duplicates == "ignored"
        rows, columns, batch = split_stacks(
            x,
            y,
            scale,
            ids="paired" if ids is None else (ids, ids),
            positives="paired" if single else "ids",
            group=self.group,
            terms="no weights" if weights is None else "weights",
        )
        assert columns is not None
        alone = batch is None and weights is None and not self.label_smoothing and len(x) > 0
        if single:
            losses = paired_losses(rows, columns, mean=alone)
        else:
            losses = (cross_entropy(Split.of(rows)) + cross_entropy(Split.of(columns))) / 2
        if self.label_smoothing:
            # This share of the target moves from the positives to all columns equally. The columns'
            # part, `_mean_logit`, is computed outside of the sweep, so this share is rounded once
            # more.
            sides = rows, columns
            of_rows, of_columns = (s[2] if single else s[2] / s[3].detach() for s in sides)
            losses = losses + self.label_smoothing * (of_rows + of_columns) / 2
        loss = losses
        if losses.dim():
            loss = global_mean(losses, self.group, weights, name="image_features", batch=batch)
        if self.label_smoothing:
            loss = loss - self.label_smoothing * self._mean_logit(x, y, scale, weights)
        loss = keep_in_graph(loss, bias)
        return {"contrastive_loss": loss} if output_dict else loss

    def _mean_logit(self, x: Tensor, y: Tensor, scale: Tensor, weights: Tensor | None) -> Tensor:
        """Mean over pairs and directions of each row's mean logit: products of mean features."""
        plain = weighted = mean_row(x, self.group), mean_row(y, self.group)
        if weights is not None:
            weighted = mean_row(x, self.group, weights), mean_row(y, self.group, weights)
        return scale * (torch.dot(weighted[0], plain[1]) + torch.dot(plain[0], weighted[1])) / 2


class DistillClipLoss(ContrastiveLoss):
    """CLIP's loss, and the cross-entropy of its logits against a teacher's, as in TinyCLIP.

    Wu et al. 2023, arXiv 2309.12314. Called like OpenCLIP's. A row's targets are the softmax of the
    teacher's logits; neither matrix is formed, and one sweep serves both losses and both
    directions.

    Args:
        normalize, group: see `ContrastiveLoss`; all four features are normalised.
    """

    #: Arguments of `forward` that `MatryoshkaLoss` leaves whole.
    whole = ("dist_image_features", "dist_text_features")

    def forward(
        self,
        image_features: Tensor,
        text_features: Tensor,
        logit_scale: float | Tensor,
        dist_image_features: Tensor,
        dist_text_features: Tensor,
        dist_logit_scale: float | Tensor,
        output_dict: bool = False,
    ) -> tuple[Tensor, Tensor] | dict[str, Tensor]:
        """Both losses, averaged over the batch; OpenCLIP's trainer adds them up.

        Args:
            image_features, text_features, logit_scale: as for `ClipLoss`.
            dist_image_features, dist_text_features: (b, d'), the teacher's, of any width; in the
                student's dtype. They get no gradient, and neither does their scale.
            dist_logit_scale: the teacher's.
            output_dict: return `{"contrastive_loss": ..., "distill_loss": ...}`.

        Returns:
            `(contrastive_loss, distill_loss)`; see `ContrastiveLoss`.
        """
        check_pairs(image_features, text_features, ("image_features", "text_features"))
        check_pairs(dist_image_features, dist_text_features, self.whole)
        x, y = self._operand(image_features), self._operand(text_features)
        u, v = (self._operand(t.detach()) for t in (dist_image_features, dist_text_features))
        scale = check_scalar("logit_scale", logit_scale, x)
        teacher_scale = check_scalar("dist_logit_scale", dist_logit_scale, x).detach()
        rows, columns, batch = soft_target_stacks(
            x, y, scale, u, v, teacher_scale, names=self.whole, group=self.group
        )
        assert columns is not None
        losses = paired_losses(rows[:4], columns[:4]), (rows[4] + columns[4]) / 2
        contrastive, distill = (
            global_mean(each, self.group, name="image_features", batch=batch) for each in losses
        )
        if output_dict:
            return {"contrastive_loss": contrastive, "distill_loss": distill}
        return contrastive, distill


# --- each pair's loss -----------------------------------------------------------------------------


def paired_losses(rows: Tensor, columns: Tensor, *, mean: bool = False) -> Tensor:
    """Mean of -log p of each pair along its row and along its column, (m,); `mean`: theirs, ().

    Args:
        rows, columns: (4, m), the numbers of a `Split` for either side; each pair has one positive,
            its own.
    """
    # torch.compile makes one kernel of the expression by itself, and cannot trace the other checks.
    traced = torch.compiler.is_compiling() or rows.dtype != torch.float32 or not rows.shape[1]
    if not traced and backends.kernels_available(rows):
        from megabatch.similarity.triton import paired  # Triton, where it is needed

        found: Tensor = paired.paired_losses(rows, columns, mean)
        return found
    of_rows, of_columns = (minus_log_probability(side[2], side[0]) for side in (rows, columns))
    losses = (of_rows + of_columns) / 2
    return losses.mean() if mean else losses
