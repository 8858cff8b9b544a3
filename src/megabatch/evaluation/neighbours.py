"""Classification by weighted nearest neighbours (Wu et al. 2018, 1805.01978; Caron et al. 2021)."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from megabatch.similarity import topk


def neighbour_votes(
    train: Tensor, labels: Tensor, n_classes: int, *, k: int = 20, temperature: float = 0.07
) -> Callable[[Tensor], Tensor]:
    """What scores classes by the votes of an image's nearest training images.

    Each of the k nearest by inner product votes for its class with `exp(product / temperature)`, as
    in DINO's evaluation. The matrix of all products is never formed.

    Args:
        train: (n, d), normalised; labels: int64 (n,), in 0..n_classes - 1.
        k: neighbours; all there are, if there are fewer.

    Returns:
        `images (m, d) -> votes (m, n_classes)`, relative to the nearest neighbour's.

    Raises:
        ValueError: k below 1, a temperature that is not above 0, no training image.
    """
    if k < 1:
        raise ValueError(f"k must be at least 1, got {k}")
    if not temperature > 0:
        raise ValueError(f"temperature must be above 0, got {temperature}")
    if not len(train):
        raise ValueError("train has no rows")

    def votes(images: Tensor) -> Tensor:
        products, found = topk(images, train, min(k, len(train)), group="local")
        weights = ((products - products[:, :1]) / temperature).exp()
        cast = weights.new_zeros(len(images), n_classes)
        return cast.scatter_add_(1, labels[found], weights)

    return votes
