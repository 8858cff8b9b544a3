"""SINCERE (Feeney and Hughes 2023, arXiv 2309.14277): each positive against negatives alone."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from megabatch.losses.arguments import check_choice, check_labelled
from megabatch.losses.base import ContrastiveLoss, TemperatureLoss
from megabatch.losses.terms import with_nan_of_unpaired, zero_without_positive
from megabatch.similarity import split_logsumexp
from megabatch.similarity.arguments import accumulator_dtype
from megabatch.similarity.distributed.means import global_mean
from megabatch.similarity.positives import positive_softplus


class SincereLoss(TemperatureLoss):
    """NT-Xent with labels: each positive against all negatives, but against no other positive.

    In `SupConLoss` the positives of an anchor share one softmax, where they compete: one that is
    learnt pushes the others away. Here each has a softmax of its own.

    Args:
        temperature: see `TemperatureLoss`.
        average: "anchors", as in the paper: the mean over anchors of the mean over their positives;
            or "pairs", as in pytorch-metric-learning's NTXentLoss: the mean over all positive
            pairs, in which large classes count more.
        normalize: scale each row of the features to unit length first, as `F.normalize` does. None:
            take them as they are, and warn at the first eager call if their lengths are far from 1
            (on a GPU at the second, to avoid a synchronisation). False: do not warn.
        group: processes that share one batch: None, "local", a process group or a DeviceMesh. In a
            group, each process holds the features of all processes while the positives' products
            are computed.
    """

    settings = ("temperature", "average", *ContrastiveLoss.settings)

    def __init__(
        self,
        temperature: float | Tensor,
        *,
        average: Literal["anchors", "pairs"] = "anchors",
        normalize: bool | None = None,
        group: object = None,
    ) -> None:
        super().__init__(temperature, normalize=normalize, group=group)
        check_choice("average", average, ("anchors", "pairs"))
        self.average = average

    def forward(
        self,
        embeddings: Tensor,
        labels: Tensor,
        references: Tensor | None = None,
        reference_labels: Tensor | None = None,
        *,
        temperature: float | Tensor | None = None,
    ) -> Tensor:
        """The mean loss over anchors that have a positive, or over positive pairs.

        Args:
            embeddings: (n, d) anchors.
            labels: (n,) integers. A row with a negative label has no positive and serves as a
                negative only.
            references: (m, d); anchors are compared with these instead of with each other.
            reference_labels: (m,) integers.
            temperature: for this call, instead of the constructor's.

        Returns:
            A scalar in float32 (float64 for float64 features); 0 if no anchor has a positive.

        Raises:
            TypeError, ValueError: the message names the argument, its value and what was expected.
        """
        ids = check_labelled(embeddings, labels, references, reference_labels)
        self._look_at_lengths(embeddings)
        x, y = self._operands(embeddings, references)
        scale = self._scale(temperature, x)
        # The gradients of both sweeps are added in the accumulator's dtype. In half precision each
        # would be rounded, and their sum, in which they partly cancel, once more.
        wide = accumulator_dtype(x.dtype)
        x_wide, y_wide = x.to(wide), None if y is None else y.to(wide)
        y = None if y_wide is None else y_wide.to(x.dtype)
        x = x_wide.to(x.dtype)
        rows, _ = split_logsumexp(x, y, scale, ids=ids, sides="rows", group=self.group)
        sums = positive_softplus(x_wide, y_wide, scale, rows.negative, ids, self.group)
        losses = zero_without_positive(sums / rows.positive_count.clamp(min=1), rows)
        count = rows.positive_count
        weights = count if self.average == "pairs" else (count > 0).to(count.dtype)
        losses = with_nan_of_unpaired(losses, x, y)
        return global_mean(losses, self.group, weights, name="embeddings")
