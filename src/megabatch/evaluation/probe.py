"""Classifiers on frozen features: weighted nearest neighbours, and a linear probe."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

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

    Returns:
        `images (m, d) -> votes (m, n_classes)`, relative to the nearest neighbour's.

    Raises:
        ValueError: k is below 1, temperature not above 0, or there is no training image.
    """
    if k < 1:
        raise ValueError(f"k must be at least 1, got {k}")
    if not temperature > 0:
        raise ValueError(f"temperature must be above 0, got {temperature}")
    if not len(train):
        raise ValueError("train has no rows")

    def score(images: Tensor) -> Tensor:
        products, neighbours = topk(images, train, min(k, len(train)), group="local")
        weights = ((products - products[:, :1]) / temperature).exp()
        votes = weights.new_zeros(len(images), n_classes)
        return votes.scatter_add_(1, labels[neighbours], weights)

    return score


@dataclass(frozen=True)
class Probe:
    """A fitted classifier; `c`: the inverse strength of regularisation that was chosen."""

    weight: Tensor
    bias: Tensor
    c: float

    def __call__(self, images: Tensor) -> Tensor:
        """Logits (m, classes) of features (m, d)."""
        return images @ self.weight.T + self.bias


@torch.no_grad()
def fit(
    features: Tensor, labels: Tensor, n_classes: int, c: float, *, iterations: int = _ITERATIONS
) -> Probe:
    """Minimise `mean cross-entropy + |W|^2 / (2 c n)`; no penalty on the bias, as in scikit-learn.

    Args:
        features: (n, d), float32 or float64; labels: int64 (n,), in 0..n_classes - 1.
        c: inverse strength of regularisation; iterations: L-BFGS's maximum.
    """
    n, d = features.shape
    both = torch.zeros(n_classes, d + 1, dtype=features.dtype, device=features.device)
    gradient = torch.empty_like(both)
    both.grad = gradient
    optimizer = torch.optim.LBFGS(
        [both],
        max_iter=iterations,
        max_eval=2 * iterations,
        tolerance_grad=1e-6,
        tolerance_change=1e-9,
        history_size=10,
        line_search_fn="strong_wolfe",
    )

    def closure() -> Tensor:
        weight, bias = both[:, :d], both[:, d]
        gradient.zero_()
        loss = weight.square().sum(dtype=torch.float64) / (2 * c * n)
        gradient[:, :d] = weight / (c * n)
        for x, y in zip(features.split(_ROWS), labels.split(_ROWS), strict=True):
            logs = (x @ weight.T + bias).log_softmax(1)
            loss = loss - logs.gather(1, y[:, None]).sum(dtype=torch.float64) / n
            slope = logs.exp_()
            slope[torch.arange(len(y), device=y.device), y] -= 1
            gradient[:, :d] += slope.T @ x / n
            gradient[:, d] += slope.sum(0) / n
        return loss

    optimizer.step(closure)
    return Probe(both[:, :d].clone(), both[:, d].clone(), c)


def choose_and_fit(
    features: Tensor, labels: Tensor, n_classes: int, group: object = "local"
) -> Probe:
    """Choose the regularisation on a fifth of each class, then fit to all of it.

    As in CLIP (Radford et al. 2021, appendix A.3): C runs from 1e-6 to 1e6 in steps of two decades,
    then in half the step around the best so far, down to an eighth of a decade. Of equally good
    values the stronger regularisation wins.

    Args:
        features, labels, n_classes: as for `fit`, the same on all ranks.
        group: ranks that share the fits; the result is the same on all of them.

    Raises:
        ValueError: no class has two images.
    """
    held_out = held_out_rows(labels)
    if not bool(held_out.any()):
        raise ValueError("labels: no class has two images, so there are none to choose C on")
    rest = (features[~held_out], labels[~held_out], n_classes)
    test, test_labels = features[held_out], labels[held_out]
    accuracy: dict[float, float] = {}

    def best_with(values: list[float]) -> float:
        """Try these as well, the ranks sharing the fits; return the best value of all so far."""
        rank, size = rank_and_size(group)
        new = [c for c in values if c not in accuracy]
        mine = {c: _accuracy(fit(*rest, c), test, test_labels) for c in new[rank::size]}
        for found in all_gather_values(list(mine.items()), group):
            accuracy.update(dict(found))
        return min(accuracy, key=lambda c: (-accuracy[c], c))

    best, step = best_with(_COARSE), 1.0
    while step >= _FINEST:
        around = [_decimal(math.log10(best) + sign * step) for sign in (-1, 1)]
        best = best_with([c for c in around if _COARSE[0] <= c <= _COARSE[-1]])
        step /= 2
    return fit(features, labels, n_classes, best)


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


def _accuracy(probe: Probe, features: Tensor, labels: Tensor) -> float:
    correct = [
        (probe(x).argmax(1) == y).double().sum()
        for x, y in zip(features.split(_ROWS), labels.split(_ROWS), strict=True)
    ]
    return float(sum(correct)) / len(labels)


def _decimal(exponent: float) -> float:
    return float(10.0 ** round(exponent, 3))
