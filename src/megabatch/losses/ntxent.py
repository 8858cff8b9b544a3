"""NT-Xent, SimCLR's loss (Chen et al. 2020, arXiv 2002.05709), at any batch size."""

from __future__ import annotations

from torch import Tensor

from megabatch.losses.arguments import TemperatureLoss, stack_views
from megabatch.losses.terms import cross_entropy
from megabatch.similarity.parallel import global_mean
from megabatch.similarity.statistics import split_and_count


class NTXentLoss(TemperatureLoss):
    """Cross-entropy of each view against all other views of all instances.

    With more than two views the mean over all ordered pairs of views of one instance, each against
    a softmax over everything but the anchor itself. The matrix is symmetric, so half of it is
    computed. Arguments of the constructor: see `TemperatureLoss`.
    """

    def forward(self, *views: Tensor, temperature: float | Tensor | None = None) -> Tensor:
        """The mean loss over all views of all instances.

        Args:
            views: two or more of shape (b, d), row i of each belongs to instance i; as the model
                gives them (this loss does not normalise).
            temperature: this call's, instead of the constructor's.

        Returns:
            A scalar in float32 (float64 for float64 features); 0 for one instance of two views.

        Raises:
            TypeError, ValueError: the message names the argument, what came, what was expected.
        """
        x, instances = stack_views(views, self.group)
        scale = self._scale(temperature, x)
        rows, _, batch = split_and_count(
            x, None, scale, ids=instances, sides="rows", group=self.group
        )
        return global_mean(cross_entropy(rows), self.group, name="views", batch=batch)
