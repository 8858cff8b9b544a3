"""What pixels alone achieve: name an image as the training images that look most like it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from megabatch.evaluation.retrieval import expected_recalls
from megabatch.similarity import topk

_QUERIES_AT_A_TIME = 2048


def pixel_neighbour_recalls(
    train_images: np.ndarray,
    train_ids: np.ndarray,
    query_images: np.ndarray,
    query_ids: np.ndarray,
    *,
    ks: Sequence[int] = (1, 5, 10),
) -> dict[str, float]:
    """Recall@k of naming each query after its nearest training images, by Euclidean distance.

    A name is as near as its nearest training image, and names, not images, fill the k places. Names
    at the same distance count as in random order, as in `retrieval_metrics`. A name that no
    training image has is never found: on held-out names the baseline scores 0 by construction.

    Args:
        train_images, query_images: uint8 or floating (n, ...) and (q, ...), the same size.
        train_ids, query_ids: int64 (n,) and (q,), the images' names.

    Raises:
        ValueError: no images, or sizes that do not match.
    """
    train, query = _flat("train_images", train_images), _flat("query_images", query_images)
    if train.shape[1] != query.shape[1]:
        raise ValueError(
            f"train_images and query_images must be of one size, got {train_images.shape[1:]} and "
            f"{query_images.shape[1:]}"
        )
    for name, ids, images in (
        ("train_ids", train_ids, train_images),
        ("query_ids", query_ids, query_images),
    ):
        if np.shape(ids) != (len(images),):
            raise ValueError(f"{name} must have shape ({len(images)},), got {np.shape(ids)}")
    names = torch.from_numpy(np.ascontiguousarray(train_ids, dtype=np.int64))
    wanted = torch.from_numpy(np.ascontiguousarray(query_ids, dtype=np.int64))
    counts = [
        _rank_names(train, names, part, right, max(ks))
        for part, right in zip(
            query.split(_QUERIES_AT_A_TIME), wanted.split(_QUERIES_AT_A_TIME), strict=True
        )
    ]
    above, equal = (torch.cat(c) for c in zip(*counts, strict=True))
    recalls = expected_recalls(above, equal, torch.ones_like(above), ks)
    return {f"recall@{k}": recall for k, recall in recalls.items()}


def _flat(name: str, images: np.ndarray) -> Tensor:
    if not len(images):
        raise ValueError(f"{name} is empty")
    pixels = torch.from_numpy(np.ascontiguousarray(images, dtype=np.float32)).flatten(1)
    return pixels / 255 if images.dtype == np.uint8 else pixels


def _rank_names(
    train: Tensor, names: Tensor, query: Tensor, right: Tensor, most: int
) -> tuple[Tensor, Tensor]:
    """Per query the wrong names nearer than the right one, and as near, exact up to rank `most`."""
    few = min(len(train), 2 * most)
    above, equal, settled = _count_names(*_nearest(train, query, few), names, right, most)
    rest = (~settled).nonzero().squeeze(1)
    if len(rest):
        # So many neighbours have more than `most` names among them for certain.
        many = min(len(train), (most + 1) * int(names.unique(return_counts=True)[1].max()))
        again = _count_names(*_nearest(train, query[rest], many), names, right[rest], most)
        above[rest], equal[rest] = again[:2]
    return above, equal


def _nearest(train: Tensor, query: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k training images nearest each query, nearest first: (closeness, indices), (q, k) each.

    |q - t|² = |q|² - 2 (<q, t> - |t|²/2): the bracket alone decides, and it is one inner product of
    vectors with one more element.
    """
    query = torch.cat([query, query.new_ones(len(query), 1)], 1)
    train = torch.cat([train, -train.square().sum(1, keepdim=True) / 2], 1)
    return topk(query, train, k)


def _count_names(
    closeness: Tensor, indices: Tensor, names: Tensor, right: Tensor, most: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Among the neighbours given: wrong names nearer than the right one, wrong names as near.

    Third, whether more neighbours could not change who the first `most` names are: the right one
    and all as near are there, or `most` others are strictly nearer than the last neighbour.
    """
    found = names[indices]
    is_right = found == right[:, None]
    nearest_right = closeness.masked_fill(~is_right, -torch.inf).amax(1, keepdim=True)
    # The first neighbour of a name is its nearest. Sorted by name (stably), firsts lead their run.
    order = found.argsort(dim=1, stable=True)
    by_name = found.gather(1, order)
    leads = torch.ones_like(by_name, dtype=torch.bool)
    leads[:, 1:] = by_name[:, 1:] != by_name[:, :-1]
    first = torch.zeros_like(leads).scatter(1, order, leads) & ~is_right
    above = (first & (closeness > nearest_right)).sum(1)
    equal = (first & (closeness == nearest_right)).sum(1)
    # One that is absent lies beyond all of them, and no place among the first `most` is left to it.
    above = torch.where(is_right.any(1), above, above.clamp(min=most))
    last = closeness[:, -1:]
    settled = (nearest_right > last).squeeze(1) | ((first & (closeness > last)).sum(1) >= most)
    return above, equal, settled
