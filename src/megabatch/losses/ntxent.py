"""NT-Xent, SimCLR's loss (Chen et al. 2020, arXiv 2002.05709), at any batch size."""

from __future__ import annotations

from torch import Tensor

from megabatch.losses.arguments import check_views, stack_views
from megabatch.losses.base import TemperatureLoss
from megabatch.losses.terms import cross_entropy
from megabatch.similarity.distributed.means import global_mean
from megabatch.similarity.functions import split_and_count


class NTXentLoss(TemperatureLoss):
    """Cross-entropy of each view against all other views of all instances.

    With more than two views the mean over all ordered pairs of views of one instance, each against
    a softmax over everything but the anchor itself. The matrix is symmetric, so half of it is
    computed.

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
            views: two or more of shape (b, d), row i of each belongs to instance i.
            temperature: this call's, instead of the constructor's.

        Returns:
            A scalar in float32 (float64 for float64 features); 0 for one instance of two views.

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
        return global_mean(cross_entropy(rows), self.group, name="views", batch=batch)
