"""Retrieval tasks: images to be matched with texts, scored by a model and by a pixel baseline."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from megabatch.data.glyphs import GlyphSet
from megabatch.errors import UsageError, plural
from megabatch.evaluation.answers import Answers
from megabatch.evaluation.captions import CaptionedPairs
from megabatch.evaluation.embed import Encoder
from megabatch.evaluation.retrieval import chance_by_answers, expected_recalls, metrics_by_answers
from megabatch.evaluation.samples import Captions, Samples, first_of
from megabatch.similarity import topk

KS = (1, 5, 10)
_QUERIES_PER_BLOCK = 2048  # of the pixel baseline


@dataclass(frozen=True)
class Task:
    """Images to be matched with texts.

    candidates: the texts to choose from, each once; None: the captions of `samples`.
    baseline: computes image→text recalls that need no model; None if there are none.
    picture_of: returns a picture to show next to a text, and whether the training set has that
        text; None: one of its evaluated images. pictures_are: the same, in the report's words.
    """

    key: str
    title: str
    note: str
    samples: Samples[Captions]
    candidates: list[str] | None = None
    baseline: Callable[[], dict[str, float]] | None = None
    picture_of: Callable[[str], tuple[Image.Image, bool] | None] | None = None
    pictures_are: str = "one of its evaluated images"


@dataclass(frozen=True)
class Matched:
    """Images and texts with their features, and which belong together.

    features: (n, d) of the images, which are `samples[i]` for i in `indices`; text_features: (t, d)
    of `texts`; answers: each image's right texts, at least one, and each text's right images.
    """

    samples: Samples[Any]
    indices: list[int]
    features: Tensor
    texts: list[str]
    text_features: Tensor
    answers: Answers


@dataclass(frozen=True)
class Scored:
    """A task with a model's features and figures.

    left_out: the samples that could not be used, as `Embedded.left_out` returns them.
    figures: by contender ("model", "chance", "baseline"), keys such as `image_to_text/recall@1`.
    """

    task: Task
    matched: Matched
    left_out: dict[str, Any]
    figures: dict[str, dict[str, float]]


def score(encoder: Encoder, task: Task) -> Scored:
    """Embed the task's images and texts, and rank them against each other."""
    images = encoder.embed(task.samples, task.title)
    if not images.targets:
        raise UsageError(
            f"{task.title}: none of {plural(len(task.samples), 'sample')} is usable: "
            f"{images.reasons()}"
        )
    texts, answers = _match(images.targets, task)
    answers = answers.to(encoder.device)
    text_features = encoder.texts(texts)
    found = metrics_by_answers(images.features, text_features, answers, ks=KS, group=encoder.group)
    figures = {"model": _named(found), "chance": _named(chance_by_answers(answers, ks=KS))}
    if task.baseline is not None:
        figures["baseline"] = {f"image_to_text/{k}": v for k, v in task.baseline().items()}
    matched = Matched(task.samples, images.indices, images.features, texts, text_features, answers)
    return Scored(task, matched, images.left_out(), figures)


def _match(captions: list[Captions], task: Task) -> tuple[list[str], Answers]:
    """The candidate texts, and the right answers of the task's images or first texts.

    Of two texts each second one is a candidate once, and right for all first texts that have it.

    If an image has several captions, each caption belongs to its own image alone, as is standard on
    COCO and Flickr30k. If each image has one, all images with the same caption belong to it.
    """
    if first_of(task.samples) == "text":
        return _match_texts(captions)
    candidates = task.candidates
    if candidates is None and any(len(set(of_image)) > 1 for of_image in captions):
        counts = torch.tensor([len(of_image) for of_image in captions])
        texts = [caption for of_image in captions for caption in of_image]
        return texts, Answers.by_ids(torch.arange(len(captions)), torch.repeat_interleave(counts))
    first = [of_image[0] for of_image in captions]
    if candidates is None:
        candidates = list(dict.fromkeys(first))
    index = {text: i for i, text in enumerate(candidates)}
    image_ids = torch.tensor([index[caption] for caption in first], dtype=torch.int64)
    return candidates, Answers.by_ids(image_ids, torch.arange(len(candidates)))


def _match_texts(seconds: list[Captions]) -> tuple[list[str], Answers]:
    texts = list(dict.fromkeys(text for of_first in seconds for text in of_first))
    index = {text: i for i, text in enumerate(texts)}
    columns = torch.tensor([index[text] for of_first in seconds for text in of_first])
    rows = torch.repeat_interleave(torch.tensor([len(of_first) for of_first in seconds]))
    return texts, Answers.by_pairs(rows, columns, len(seconds), len(texts))


def glyph_tasks(glyphs: GlyphSet) -> list[Task]:
    """Held-out faces among their own names, and held-out characters among all names."""
    train, faces, characters = (glyphs.split(s) for s in ("train", "faces", "characters"))
    face_names = " and ".join(sorted({glyphs.face_names[f] for f in faces.faces}))

    def face_baseline() -> dict[str, float]:
        return pixel_neighbour_recalls(
            train.images, train.name_ids, faces.images, faces.name_ids, ks=KS
        )

    def no_baseline() -> dict[str, float]:
        return {f"recall@{k}": 0.0 for k in KS}

    return [
        Task(
            "faces",
            "held-out faces",
            f"Every image of {face_names}, two faces that training never saw, among all names of "
            "these images. The pixel baseline names an image after the training images nearest "
            "to it.",
            CaptionedPairs(faces),
            baseline=face_baseline,
            picture_of=_pictures(glyphs, train.indices),
            pictures_are="an image of it from the training set",
        ),
        Task(
            "characters",
            "held-out characters",
            "Images of characters whose names training never saw, among the names of all "
            "characters. The pixel baseline is 0 by construction: it can give only names that a "
            "training image has.",
            CaptionedPairs(characters),
            candidates=glyphs.names,
            baseline=no_baseline,
            picture_of=_pictures(glyphs, train.indices, characters.indices),
            pictures_are="an image of it from the training set (from the held-out images where "
            "training has none)",
        ),
    ]


def pairs_task(title: str, samples: Samples[Captions]) -> Task:
    """Match images with their captions, or first texts with second ones."""
    if first_of(samples) == "text":
        note = (
            f"The first texts of the pairs in {title} among all second ones, and back, each text "
            "once. All second texts that a first text is paired with are right for it."
        )
        return Task("pairs", title, note, samples)
    note = (
        f"The images of {title} among all their captions. Where images have several captions, each "
        "of them is right for its own image; where each has one, all images of one caption are "
        "right for it."
    )
    return Task("pairs", title, note, samples)


def digit_baseline(
    glyphs: GlyphSet, names: Sequence[Sequence[str]], images: Sequence[Image.Image], labels: Tensor
) -> dict[str, float]:
    """Top-1 and top-5 of classifying an image as the nearest printed digit of the training set."""
    train = glyphs.split("train")
    class_of = {f"digit {name}": i for i, (name,) in enumerate(names)}
    printed = np.array([class_of.get(name, -1) for name in glyphs.names])[train.name_ids]
    recalls = pixel_neighbour_recalls(
        train.images[printed >= 0],
        printed[printed >= 0],
        np.stack([np.asarray(image) for image in images]),
        labels.numpy(),
        ks=(1, 5),
    )
    return {f"top{k}": recalls[f"recall@{k}"] for k in (1, 5)}


def _named(metrics: dict[str, float]) -> dict[str, float]:
    return {
        key.replace("x_to_y", "image_to_text").replace("y_to_x", "text_to_image"): value
        for key, value in metrics.items()
    }


def _pictures(
    glyphs: GlyphSet, train: np.ndarray, others: np.ndarray | None = None
) -> Callable[[str], tuple[Image.Image, bool] | None]:
    """Return a function to each name's first training image, else its first one among `others`."""
    sources: list[tuple[np.ndarray, bool]] = [(train, True)]
    if others is not None:
        sources.append((others, False))
    first: dict[str, tuple[int, bool]] = {}
    for indices, known in sources:
        for index in indices:
            first.setdefault(glyphs.names[glyphs.name_ids[index]], (int(index), known))

    def picture_of(name: str) -> tuple[Image.Image, bool] | None:
        if name not in first:
            return None
        index, known = first[name]
        return Image.fromarray(glyphs.images[index]), known

    return picture_of


def record(scored: Scored) -> dict[str, Any]:
    """The task's entry in `evaluation.json`."""
    task = scored.task
    return {
        "title": task.title,
        "note": task.note,
        "first": first_of(task.samples),
        "images": len(scored.matched.indices),
        "texts": len(scored.matched.texts),
        **scored.left_out,
        "damage": list(getattr(task.samples, "damage", [])),
        **scored.figures,
    }


def pixel_neighbour_recalls(
    train_images: np.ndarray,
    train_ids: np.ndarray,
    query_images: np.ndarray,
    query_ids: np.ndarray,
    *,
    ks: Sequence[int] = (1, 5, 10),
) -> dict[str, float]:
    """Recall@k of naming each query after its nearest training images, by Euclidean distance.

    A name's distance is that of its nearest training image, and names, not images, are ranked.
    Names at the same distance count as in random order, as in `retrieval_metrics`. A name that no
    training image has is never found: on held-out names the baseline scores 0 by construction.

    Args:
        train_images, query_images: uint8 or floating (n, ...) and (q, ...), of the same size.
        train_ids, query_ids: int64 (n,) and (q,), the images' names.

    Raises:
        ValueError: there are no images, or sizes do not match.
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
    targets = torch.from_numpy(np.ascontiguousarray(query_ids, dtype=np.int64))
    counts = [
        _rank_names(train, names, part, target, max(ks))
        for part, target in zip(
            query.split(_QUERIES_PER_BLOCK), targets.split(_QUERIES_PER_BLOCK), strict=True
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
    train: Tensor, names: Tensor, query: Tensor, target: Tensor, max_rank: int
) -> tuple[Tensor, Tensor]:
    """Per query, the wrong names nearer than the target and as near, exact up to `max_rank`."""
    few = min(len(train), 2 * max_rank)
    above, equal, decided = _count_names(*_nearest(train, query, few), names, target, max_rank)
    rest = (~decided).nonzero().squeeze(1)
    if len(rest):
        # That many neighbours certainly have more than `max_rank` names.
        many = min(len(train), (max_rank + 1) * int(names.unique(return_counts=True)[1].max()))
        again = _count_names(*_nearest(train, query[rest], many), names, target[rest], max_rank)
        above[rest], equal[rest] = again[:2]
    return above, equal


def _nearest(train: Tensor, query: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k nearest training images of each query in order: (closeness, indices), (q, k) each.

    |q - t|² = |q|² - 2 (<q, t> - |t|²/2): the bracket alone decides, and it is an inner product of
    vectors with one more element.
    """
    query = torch.cat([query, query.new_ones(len(query), 1)], 1)
    train = torch.cat([train, -train.square().sum(1, keepdim=True) / 2], 1)
    return topk(query, train, k, group="local")  # every rank has all images


def _count_names(
    closeness: Tensor, indices: Tensor, names: Tensor, target: Tensor, max_rank: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Count, among the neighbours, the wrong names nearer than the target, and those as near.

    The third result says whether the first `max_rank` names are decided, so that more neighbours
    could not change them: the target and all names as near are among the neighbours, or `max_rank`
    other names are strictly nearer than the last neighbour.
    """
    found = names[indices]
    is_target = found == target[:, None]
    nearest_target = closeness.masked_fill(~is_target, -torch.inf).amax(1, keepdim=True)
    # A name's nearest image is the first one in its run, after a stable sort by name.
    order = found.argsort(dim=1, stable=True)
    by_name = found.gather(1, order)
    leads = torch.ones_like(by_name, dtype=torch.bool)
    leads[:, 1:] = by_name[:, 1:] != by_name[:, :-1]
    first = torch.zeros_like(leads).scatter(1, order, leads) & ~is_target
    above = (first & (closeness > nearest_target)).sum(1)
    equal = (first & (closeness == nearest_target)).sum(1)
    # A target that is absent is farther than all neighbours: it ranks below the first `max_rank`.
    above = torch.where(is_target.any(1), above, above.clamp(min=max_rank))
    last = closeness[:, -1:]
    others_fill_ranks = (first & (closeness > last)).sum(1) >= max_rank
    decided = (nearest_target > last).squeeze(1) | others_fill_ranks
    return above, equal, decided
