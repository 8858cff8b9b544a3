"""CLIP's loss with distillation from a teacher (Wu et al. 2023, TinyCLIP, arXiv 2309.12314)."""

from __future__ import annotations

from torch import Tensor

from megabatch.losses.arguments import check_pairs
from megabatch.losses.base import ContrastiveLoss
from megabatch.losses.paired import paired_losses
from megabatch.similarity import soft_target_stacks
from megabatch.similarity.arguments import check_scalar
from megabatch.similarity.distributed.means import global_mean


class DistillClipLoss(ContrastiveLoss):
    """CLIP's loss, and the cross-entropy of its logits against a teacher's. Called like OpenCLIP's.

    A row's targets are the softmax of the teacher's logits; neither matrix is formed, and one sweep
    serves both losses and both directions.

    Args:
        normalize: scale each row of all four features to unit length first, as `F.normalize` does.
        group: processes that share one batch: None, "local", a process group or a DeviceMesh.
    """

    #: Arguments of `forward` that `MatryoshkaLoss` leaves whole.
    whole = ("dist_image_features", "dist_text_features")

    def __init__(self, *, normalize: bool = False, group: object = None) -> None:
        super().__init__(normalize=normalize, group=group)

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
            image_features, text_features: (b, d), row i of one belongs to row i of the other; under
                autocast in any dtypes that autocast casts.
            logit_scale: 1 / temperature, exponentiated already, as OpenCLIP's models give it.
            dist_image_features, dist_text_features: (b, d'), the teacher's, of any width; in the
                student's dtype. They get no gradient, and neither does their scale.
            dist_logit_scale: the teacher's.
            output_dict: return `{"contrastive_loss": ..., "distill_loss": ...}`.

        Returns:
            `(contrastive_loss, distill_loss)`, scalars in float32 (float64 for float64 features).

        Raises:
            TypeError, ValueError: the message names the argument, its value and what was expected.
        """
        names = ("image_features", "text_features")
        teacher_names = ("dist_image_features", "dist_text_features")
        check_pairs(image_features, text_features, names)
        check_pairs(dist_image_features, dist_text_features, teacher_names)
        x, y = self._operands(image_features, text_features)
        u, v = self._operands(dist_image_features.detach(), dist_text_features.detach())
        scale = check_scalar("logit_scale", logit_scale, x)
        teacher_scale = check_scalar("dist_logit_scale", dist_logit_scale, x).detach()
        rows, columns, batch = soft_target_stacks(
            x, y, scale, u, v, teacher_scale, names=teacher_names, group=self.group
        )
        assert columns is not None
        pairs = paired_losses(rows[:4], columns[:4]), (rows[4] + columns[4]) / 2
        contrastive, distill = (
            global_mean(losses, self.group, name="image_features", batch=batch) for losses in pairs
        )
        if output_dict:
            return {"contrastive_loss": contrastive, "distill_loss": distill}
        return contrastive, distill
