"""Classifiers on frozen features: weighted nearest neighbours, and a linear probe."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from megabatch.errors import UsageError
from megabatch.ranks import all_gather_values
from megabatch.similarity import topk
from megabatch.similarity.distributed.comm import rank_and_size

_ROWS = 1 << 16  # per block: bounds the matrix of an image's and a class's logits
_ITERATIONS = 1000
_HELD_OUT = 0.2
# C, as scikit-learn calls the inverse strength of regularisation: the coarse grid, and the finest
# step in decades.
_COARSE = [10.0**e for e in range(-6, 7, 2)]
_FINEST = 1 / 8


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
    features: Tensor, labels: Tensor, n_classes: int, group: object = "local"
) -> tuple[torch.nn.Linear, float]:
    """Choose the regularisation c on a fifth of each class, then fit to all; returns both.

    As in CLIP (Radford et al. 2021, appendix A.3): C runs from 1e-6 to 1e6 in steps of two decades,
    then in half the step around the best so far, down to an eighth of a decade. Of equally good
    values the stronger regularisation wins.

    Args:
        features, labels, n_classes: as for `fit`, the same on all ranks.
        group: ranks that share the fits; the result is the same on all of them.

    Raises:
        UsageError: no class has two images.
    """
    held_out = held_out_rows(labels)
    if not bool(held_out.any()):
        raise UsageError("--methods linear-probe: no class of the training images has two of them")
    rest, test = ((features[rows], labels[rows]) for rows in (~held_out, held_out))
    accuracy: dict[float, float] = {}

    def accuracy_with(c: float) -> float:
        probe = fit(*rest, n_classes, c)
        return float((probe(test[0]).argmax(1) == test[1]).double().mean())

    def best_with(values: list[float]) -> float:
        """Try these as well, the ranks sharing the fits; return the best value of all so far."""
        rank, size = rank_and_size(group)
        new = [c for c in values if c not in accuracy]
        mine = [(c, accuracy_with(c)) for c in new[rank::size]]
        for found in all_gather_values(mine, group):
            accuracy.update(map(tuple, found))
        return min(accuracy, key=lambda c: (-accuracy[c], c))

    best, step = best_with(_COARSE), 1.0
    while step >= _FINEST:
        around = [10.0 ** round(math.log10(best) + sign * step, 3) for sign in (-1, 1)]
        best = best_with([c for c in around if _COARSE[0] <= c <= _COARSE[-1]])
        step /= 2
    return fit(features, labels, n_classes, best), best


def held_out_rows(labels: Tensor, seed: int = 0) -> Tensor:
    """A random fifth of each class, at least one image of a class of two; bool (n,)."""
    generator = torch.Generator().manual_seed(seed)
    shuffled = torch.randperm(len(labels), generator=generator).to(labels.device)
    order = shuffled[labels[shuffled].sort(stable=True).indices]  # class by class
    counts = labels.bincount()
    first = counts.cumsum(0) - counts
    within = torch.arange(len(labels), device=labels.device) - first[labels[order]]
    n_held = (counts * _HELD_OUT).round().long().clamp(min=1).where(counts > 1, 0)
    held = torch.zeros(len(labels), dtype=torch.bool, device=labels.device)
    held[order] = within < n_held[labels[order]]
    return held
