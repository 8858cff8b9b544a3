"""Classifiers on frozen features: weighted nearest neighbours, and a linear probe."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from megabatch.errors import UsageError
from megabatch.similarity import topk

_ROWS = 1 << 16  # per block: bounds the matrix of an image's and a class's logits
_ITERATIONS = 1000
#: Inverse strengths of regularisation, as scikit-learn's C.
_CS = [10.0**e for e in range(-6, 7)]


def neighbour_votes(
    train: Tensor, labels: Tensor, n_classes: int, *, k: int = 20, temperature: float = 0.07
) -> Callable[[Tensor], Tensor]:
    """Return a function that scores classes by the votes of an image's nearest training images.

    Each of the k nearest by inner product votes for its class with weight `exp(product /
    temperature)` (Wu et al. 2018, 1805.01978; DINO, Caron et al. 2021). The matrix of all products
    is never formed.

    Args:
        train: (n, d), normalised; labels: int64 (n,), in 0..n_classes - 1.
        k: number of neighbours; all training images, if there are fewer.
        temperature: above 0.

    Returns:
        `images (m, d) -> votes (m, n_classes)`, relative to the nearest neighbour's.
    """

    def score(images: Tensor) -> Tensor:
        products, neighbours = topk(images, train, min(k, len(train)), group="local")
        weights = ((products - products[:, :1]) / temperature).exp()
        votes = weights.new_zeros(len(images), n_classes)
        return votes.scatter_add_(1, labels[neighbours], weights)

    return score


def fit(features: Tensor, labels: Tensor, n_classes: int, c: float) -> torch.nn.Linear:
    """Multinomial logistic regression with an L2 penalty, as scikit-learn's, by L-BFGS.

    Minimises the mean cross-entropy plus `|weight|² / (2 c n)`. Unlike scikit-learn's it runs on
    the features' device, and never has the logits of all images at once.

    Args:
        features: (n, d); labels: int64 (n,), in 0..n_classes - 1.
        n_classes: the number of classes.
        c: the inverse strength of the regularisation.
    """
    n, d = features.shape
    probe = torch.nn.Linear(d, n_classes, device=features.device, dtype=features.dtype)
    for parameter in probe.parameters():
        torch.nn.init.zeros_(parameter)
    optimizer = torch.optim.LBFGS(
        probe.parameters(),
        max_iter=_ITERATIONS,
        max_eval=2 * _ITERATIONS,
        tolerance_grad=1e-6,
        tolerance_change=1e-9,
        history_size=10,
        line_search_fn="strong_wolfe",
    )

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = probe.weight.square().sum(dtype=torch.float64) / (2 * c * n)
        loss.backward()
        for x, y in zip(features.split(_ROWS), labels.split(_ROWS), strict=True):
            part = F.cross_entropy(probe(x), y, reduction="none").sum(dtype=torch.float64) / n
            part.backward()
            loss = loss.detach() + part.detach()
        return loss

    optimizer.step(closure)
    return probe.requires_grad_(False)


def choose_and_fit(
    features: Tensor, labels: Tensor, n_classes: int
) -> tuple[torch.nn.Linear, float]:
    """Choose c among the powers of ten from 1e-6 to 1e6, then fit; returns the probe and c.

    Each is fitted to four fifths of the images, drawn at random, and tried on the others; of
    equally good ones the stronger regularisation wins.

    Args:
        features, labels, n_classes: as for `fit`.

    Raises:
        UsageError: there are not two images.
    """
    if len(labels) < 2:
        raise UsageError("--class-train-data: expected at least two images")
    drawn = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    held_out, rest = drawn.to(labels.device).tensor_split([-(-len(labels) // 5)])

    def right(c: float) -> int:
        probe = fit(features[rest], labels[rest], n_classes, c)
        return int((probe(features[held_out]).argmax(1) == labels[held_out]).sum())

    best = max(_CS, key=right)
    return fit(features, labels, n_classes, best), best
