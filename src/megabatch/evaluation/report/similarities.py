"""Similarities of a task's features: a histogram, a heat map, and a map of the embeddings."""

from __future__ import annotations

import torch
from torch import Tensor

from megabatch.evaluation.answers import Right
from megabatch.evaluation.report.content import HeatMap, Histogram, Point
from megabatch.evaluation.report.examples import cut, first_text
from megabatch.evaluation.tasks import Matched

_SAMPLED = 2000  # images and texts whose cosines are counted
_BINS = 60
_LARGEST_MATRIX = 40  # rows of a heat map
_MAPPED = 150  # images in a map, with as many texts
_ALL_CLASSES = 20  # of more classes, the map has those of its images
_FEWEST = 5  # images that make a map


def histogram(matched: Matched) -> Histogram:
    """Cosines of sampled images with a right text each (positives) and with others (negatives)."""
    images, rights = _sample(matched, _SAMPLED)
    texts = _drawn(len(matched.texts), _SAMPLED, seed=1).to(images.device)
    features = matched.features[images]
    positives = (features * matched.text_features[rights]).sum(1)
    scores = features @ matched.text_features[texts].T
    wrong = _wrong(matched.answers.there.of(images), texts, len(matched.texts))
    negatives = scores[wrong].sort().values.cpu()
    positives = positives.cpu()
    both = torch.cat([positives, negatives])
    low, high = float(both.min()), float(both.max())
    if high - low < 1e-3:  # a collapsed model
        low, high = low - 0.01, high + 0.01
    return Histogram(
        low=low,
        high=high,
        positives=_counts(positives, low, high),
        negatives=_counts(negatives, low, high),
        mean_positive=float(positives.double().mean()),
        mean_negative=float(negatives.double().mean()) if len(negatives) else 0.0,
        separated=_separated(positives, negatives),
    )


def heat_map(matched: Matched) -> HeatMap:
    """Cosines of up to 40 images with texts of theirs, no text twice, in alphabetical order."""
    images, rights = _sample(matched, 4 * _LARGEST_MATRIX)
    image_of = dict(zip(reversed(rights.tolist()), reversed(images.tolist()), strict=True))
    chosen = list(dict.fromkeys(rights.tolist()))[:_LARGEST_MATRIX]
    columns = sorted(chosen, key=lambda column: matched.texts[column])
    rows = [image_of[column] for column in columns]
    cosines = matched.features[rows] @ matched.text_features[columns].T
    return HeatMap(
        [cut(matched.texts[column]) for column in columns],
        [[round(value, 3) for value in row] for row in cosines.tolist()],
    )


def embedding_map(matched: Matched, *, of_classes: bool = False) -> list[Point]:
    """A t-SNE map of up to 150 images and their texts; of classes all, if they are few.

    Images and texts are centred on the mean of their kind: without that, the distance between the
    two means separates them in most models. Empty if there are too few images, or if the features
    hardly differ.
    """
    images, rights = _sample(matched, _MAPPED)
    if len(images) < _FEWEST:
        return []
    texts = rights.unique()
    if of_classes and len(matched.texts) <= _ALL_CLASSES:
        texts = torch.arange(len(matched.texts), device=texts.device)
    parts = [matched.features[images], matched.text_features[texts]]
    centred = torch.cat([part - part.mean(0) for part in parts]).float().cpu()
    if float(centred.std()) < 1e-4:
        return []
    places = _tsne(centred)
    points = []
    for i, image in enumerate(images.tolist()):
        group = int(matched.answers.there.of_row(image)[0]) if of_classes else None
        points.append(_point(places[i], first_text(matched, image), False, group))
    for i, text in enumerate(texts.tolist(), start=len(images)):
        group = text if of_classes else None
        points.append(_point(places[i], cut(matched.texts[text]), True, group))
    return points


def _point(place: Tensor, text: str, second: bool, group: int | None) -> Point:
    x, y = place.tolist()
    return Point(round(x, 3), round(y, 3), text, second, group)


def _tsne(features: Tensor) -> Tensor:
    """Places (n, 2) in the unit square."""
    from sklearn.manifold import TSNE

    perplexity = min(30.0, (len(features) - 1) / 3)
    fitted = TSNE(init="pca", perplexity=perplexity, random_state=0).fit_transform(features.numpy())
    places = torch.from_numpy(fitted).double()
    low, high = places.min(0).values, places.max(0).values
    return (places - low) / (high - low).clamp(min=1e-12)


def _sample(matched: Matched, n: int) -> tuple[Tensor, Tensor]:
    """Up to n random images, and for each a random one of its right texts."""
    images = _drawn(len(matched.indices), n, seed=0).to(matched.features.device)
    right = matched.answers.there.of(images)
    chance = torch.rand(len(images), generator=torch.Generator().manual_seed(2))
    within = (chance.to(right.counts.device) * right.counts).long().clamp(max=right.counts - 1)
    return images, right.columns[right.start + within]


def _wrong(right: Right, texts: Tensor, n: int) -> Tensor:
    """A mask (rows, texts) of the pairs that are no right ones; `texts`: some of n columns."""
    rows, columns = right.pairs()
    place = torch.full((n,), -1, device=columns.device)
    place[texts] = torch.arange(len(texts), device=columns.device)
    at = place[columns]
    wrong = torch.ones(len(right.counts), len(texts), dtype=torch.bool, device=columns.device)
    wrong[rows[at >= 0], at[at >= 0]] = False
    return wrong


def _drawn(among: int, n: int, seed: int) -> Tensor:
    return torch.randperm(among, generator=torch.Generator().manual_seed(seed))[:n]


def _counts(values: Tensor, low: float, high: float) -> list[int]:
    return [int(count) for count in torch.histc(values.float(), _BINS, low, high).tolist()]


def _separated(positives: Tensor, negatives: Tensor) -> float:
    """The probability that a positive exceeds a negative, half for ties; negatives are sorted."""
    if not len(negatives):
        return 1.0
    below = torch.searchsorted(negatives, positives)
    not_above = torch.searchsorted(negatives, positives, right=True)
    return float((below + not_above).double().mean() / (2 * len(negatives)))
