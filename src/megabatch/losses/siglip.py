"""SigLIP's loss (Zhai et al. 2023, arXiv 2303.15343) at any batch size."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from megabatch.losses.arguments import check_ids, check_pairs, check_weights
from megabatch.losses.base import ContrastiveLoss, unit_rows
from megabatch.similarity import share_of_mean, softplus_sum
from megabatch.similarity.arguments import check_guide, check_scalar


class SigLipLoss(ContrastiveLoss):
    """A binary decision for each image and text: do they belong together? Called like OpenCLIP's.

    The sum over all b² pairs of -log sigmoid(z * logit), where z = +1 for matching pairs and -1 for
    all others, divided by b as in the paper. One sweep gives the loss and its gradients. With a
    teacher's features the labels are soft: its probabilities sigmoid(logit) instead of 1 and 0.

    Args:
        normalize, group: see `ContrastiveLoss`.
    """

    #: Arguments of `forward` that `MatryoshkaLoss` leaves whole.
    whole = ("dist_image_features", "dist_text_features")

    def forward(
        self,
        image_features: Tensor,
        text_features: Tensor,
        logit_scale: float | Tensor,
        logit_bias: float | Tensor | None,
        output_dict: bool = False,
        *,
        ids: Tensor | None = None,
        weights: Tensor | None = None,
        dist_image_features: Tensor | None = None,
        dist_text_features: Tensor | None = None,
        dist_logit_scale: float | Tensor | None = None,
        dist_logit_bias: float | Tensor | None = None,
    ) -> Tensor | dict[str, Tensor]:
        """The mean over images of their summed losses with all texts; see `ContrastiveLoss`.

        Args:
            image_features, text_features: (b, d).
            logit_scale: exponentiated already, as OpenCLIP's models give it.
            logit_bias: added to all logits; the paper starts at -10. None: no bias, the same as 0.
            output_dict: return `{"contrastive_loss": loss}`.
            ids, weights: as for `ClipLoss`; a weight multiplies an image's sum over texts.
            dist_image_features, dist_text_features: (b, d'), a teacher's features of any width, for
                soft labels; they exclude `ids`. Any floating-point dtype, but float64 if and only
                if the student's features are; autocast does not cast them. They get no gradient,
                and neither do the teacher's scale and bias.
            dist_logit_scale, dist_logit_bias: the teacher's scale and bias; None: no bias, the same
                as 0.
        """
        check_pairs(image_features, text_features, ("image_features", "text_features"))
        x, y = self._operand(image_features), self._operand(text_features)
        scale = check_scalar("logit_scale", logit_scale, x)
        bias = check_scalar("logit_bias", 0.0 if logit_bias is None else logit_bias, x)
        weights = check_weights(weights, x)
        ids = check_ids(ids, x, self.group)
        given = dist_image_features, dist_text_features, dist_logit_scale, dist_logit_bias
        teacher = None
        if any(value is not None for value in given):
            teacher = self._teacher(x, y, *given)
            if ids is not None:
                raise ValueError("ids: expected None with a teacher's labels, got a tensor")
        total = softplus_sum(
            x,
            y,
            scale,
            bias,
            ids="paired" if ids is None else (ids, ids),
            weight=weights,
            teacher=teacher,
            group=self.group,
        )
        loss = share_of_mean(total, x.shape[0], self.group, weights, name="image_features")
        return {"contrastive_loss": loss} if output_dict else loss

    def _teacher(
        self, x: Tensor, y: Tensor, u: Any, v: Any, scale: Any, bias: Any
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The teacher's features and numbers for `softplus_sum`."""
        for name, value in zip((*self.whole, "dist_logit_scale"), (u, v, scale), strict=True):
            if value is None:
                raise ValueError(f"{name}: expected the teacher's as well, got None")
        u, v = check_guide((u, v), x, y, self.whole, ("image_features", "text_features"))
        if self.normalize:
            u, v = (unit_rows(features, features.dtype) for features in (u, v))
        scale = check_scalar("dist_logit_scale", scale, x)
        return u, v, scale, check_scalar("dist_logit_bias", 0.0 if bias is None else bias, x)
