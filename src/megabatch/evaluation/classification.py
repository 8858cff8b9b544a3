"""Accuracy of classing images, from how many classes score above and as high as the right one.

Ties count as a random choice, as in `megabatch.evaluation.retrieval`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megabatch.evaluation.processes import gather_rows, share
from megabatch.evaluation.retrieval import answered_within
from megabatch.similarity import ranks
from megabatch.similarity.sweep import block_shape

KS = (1, 5)
_ROWS = 4096  # at a time, where there is a score for each image and class


@dataclass(frozen=True)
class Ranked:
    """Per image, int64 (n,): its class, and how many wrong classes score above it or the same."""

    labels: Tensor
    above: Tensor
    equal: Tensor

    def figures(self, ks: Sequence[int] = KS) -> dict[str, float]:
        """`top1`, `top5` and `mean_per_class_recall` (of top1, over the classes that occur)."""
        within = answered_within(self.above, self.equal, torch.ones_like(self.above), ks)
        return {
            **{f"top{k}": float(right.mean()) for k, right in within.items()},
            "mean_per_class_recall": float(_by_class(within[ks[0]], self.labels)[1].mean()),
        }

    def recall_by_class(self) -> dict[int, float]:
        """Share of a class's images that are classed right, for each class that occurs."""
        ones = torch.ones_like(self.above)
        right = answered_within(self.above, self.equal, ones, [1])[1]
        classes, recalls = _by_class(right, self.labels)
        return dict(zip(classes.tolist(), recalls.tolist(), strict=True))


def rank_by_similarity(
    images: Tensor, labels: Tensor, classes: Tensor, group: object = "local"
) -> Ranked:
    """Class by the largest inner product.

    Args:
        images: (n, d); labels: int64 (n,), index into `classes`; classes: (c, d).
        group: processes that all hold all of these and share the work.

    Raises:
        ValueError: a label that is no class.
    """
    _check_labels(labels, len(classes))
    mine = _part(len(images), group, block_shape(images)[0])
    above, equal = ranks(images[mine], classes, labels[mine], group="local")
    return _together(labels, above, equal, group)


def rank_by_scores(
    scores: Callable[[Tensor], Tensor],
    images: Tensor,
    labels: Tensor,
    n_classes: int,
    group: object = "local",
) -> Ranked:
    """Class by the largest of `scores(images (m, d)) -> (m, n_classes)`; else as above."""
    _check_labels(labels, n_classes)
    mine = _part(len(images), group, _ROWS)
    own = labels[mine]
    above, equal = torch.zeros_like(own), torch.zeros_like(own)
    for rows in _strips(len(own)):
        found = scores(images[mine][rows])
        right = found.gather(1, own[rows, None])
        above[rows] = (found > right).sum(1)
        equal[rows] = (found == right).sum(1) - 1
    return _together(labels, above, equal, group)


def chance(n_classes: int, ks: Sequence[int] = KS) -> dict[str, float]:
    """What classing at random scores."""
    return {
        **{f"top{k}": min(1.0, k / n_classes) for k in ks},
        "mean_per_class_recall": 1 / n_classes,
    }


def _part(n: int, group: object, block: int) -> slice:
    # Whole blocks: then each product has the shape that it has in one process.
    part = share(n, group, block=block)
    return slice(part.start, part.stop)


def _strips(n: int) -> Iterator[slice]:
    for start in range(0, n, _ROWS):
        yield slice(start, min(n, start + _ROWS))


def _together(labels: Tensor, above: Tensor, equal: Tensor, group: object) -> Ranked:
    counts = gather_rows(torch.stack([above, equal], dim=1), group)
    return Ranked(labels, counts[:, 0], counts[:, 1])


def _by_class(right: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """The classes that occur, and the mean of `right` (n,) in each."""
    classes, place, counts = labels.unique(return_inverse=True, return_counts=True)
    sums = torch.zeros(len(classes), dtype=torch.float64, device=right.device)
    return classes, sums.scatter_add_(0, place, right.double()) / counts


def _check_labels(labels: Tensor, n_classes: int) -> None:
    if len(labels) and not 0 <= int(labels.min()) <= int(labels.max()) < n_classes:
        raise ValueError(
            f"labels must lie in 0..{n_classes - 1}, got {int(labels.min())}..{int(labels.max())}"
        )
