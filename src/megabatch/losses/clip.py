"""CLIP's loss (Radford et al. 2021, arXiv 2103.00020) at any batch size."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from megabatch.similarity import split_logsumexp
from megabatch.similarity.arguments import check_same_rows, check_scalar, check_two


class ClipLoss(nn.Module):
    """Symmetric cross-entropy of each image against all texts and each text against all images.

    Called as OpenCLIP's loss. Memory grows with b·d, not with b²; one sweep serves both directions.

    Args:
        group: processes that share one batch; None or "local" (one process) for now.
    """

    def __init__(self, *, group: object = None) -> None:
        super().__init__()
        self.group = group

    def forward(
        self,
        image_features: Tensor,
        text_features: Tensor,
        logit_scale: float | Tensor,
        logit_bias: float | Tensor | None = None,
        output_dict: bool = False,
    ) -> Tensor | dict[str, Tensor]:
        """The mean loss over the batch.

        Args:
            image_features, text_features: (b, d), row i of one belongs to row i of the other;
                as the model gives them (this loss does not normalise).
            logit_scale: 1 / temperature, exponentiated already, as OpenCLIP's models give it.
            logit_bias: accepted as OpenCLIP does; a bias common to all logits cancels in a
                softmax, so it has no influence and no gradient.
            output_dict: return `{"contrastive_loss": loss}`.

        Returns:
            A scalar in float32 (float64 for float64 features).

        Raises:
            TypeError, ValueError: the message names the argument, what came, what was expected.
        """
        names = ("image_features", "text_features")
        check_two(image_features, text_features, names)
        check_same_rows(image_features, text_features, names)
        if image_features.shape[0] == 0:
            raise ValueError("image_features: expected at least one row, got 0")
        scale = check_scalar("logit_scale", logit_scale, image_features)
        if logit_bias is not None:
            check_scalar("logit_bias", logit_bias, image_features)
        rows, columns = split_logsumexp(image_features, text_features, scale, group=self.group)
        assert columns is not None
        # The positive's logit comes from the sweep too (a sum over one pair): its gradient then
        # joins the negatives' before anything is rounded. Through `paired` the two would meet as
        # rounded bf16 rows; on near-collapsed features, where they cancel, that error was 40 times
        # the dense expression's.
        positive = rows.positive_sum
        # -log p = log(1 + e^(negative - positive)): no difference of two rounded terms where a
        # pair is learnt. logsigmoid and not softplus, which cuts to its argument above 20.
        losses = F.logsigmoid(positive - rows.negative) + F.logsigmoid(positive - columns.negative)
        loss = -losses.mean() / 2
        return {"contrastive_loss": loss} if output_dict else loss
