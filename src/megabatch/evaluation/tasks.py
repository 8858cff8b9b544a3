"""Retrieval tasks: images to be matched with texts, scored by a model and by a pixel baseline."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megabatch.data.glyphs import GlyphSet
from megabatch.evaluation.captions import CaptionedPairs
from megabatch.evaluation.embed import Encoder
from megabatch.evaluation.retrieval import (
    Answers,
    answers_by_ids,
    answers_by_pairs,
    chance_by_answers,
    expected_recalls,
    metrics_by_answers,
)
from megabatch.evaluation.samples import Captions, Samples, first_of
from megabatch.evaluation.table import WAYS

KS = (1, 5, 10)
_QUERIES_PER_BLOCK = 256  # of the pixel baseline


@dataclass(frozen=True)
class Task:
    """Images to be matched with texts.

    candidates: the texts to choose from, each once; None: the captions of `samples`.
    baseline: computes image→text recalls that need no model; None if there are none.
    """

    key: str
    title: str
    note: str
    samples: Samples[Captions]
    candidates: list[str] | None = None
    baseline: Callable[[], dict[str, float]] | None = None


@dataclass(frozen=True)
class Matched:
    """Images and texts of a task with their features, and which belong together.

    features: (n, d) of the images, which are `samples[i]` for i in `indices`; text_features: (t, d)
    of `texts`; answers: each image's right texts, at least one, and each text's right images.
    """

    title: str
    samples: Samples[Any]
    indices: list[int]
    features: Tensor
    texts: list[str]
    text_features: Tensor
    answers: Answers


def score(encoder: Encoder, task: Task) -> tuple[dict[str, Any], Matched]:
    """Embed the task's images and texts, and rank them against each other.

    Returns:
        The task's entry in `evaluation.json`, with figures such as `image_to_text/recall@1` by
        contender ("model", "chance", "baseline"); and the features.
    """
    images = encoder.embed(task.samples, task.title)
    texts, answers = _match(images.targets, task, encoder.device)
    features = images.features, encoder.texts(texts)
    matched = Matched(
        *(task.title, task.samples, images.indices, features[0], texts, features[1], answers)
    )
    options: dict[str, Any] = {"ks": KS, "ways": WAYS}
    entry = {
        "title": task.title,
        "note": task.note,
        "first": first_of(task.samples),
        "images": len(images.indices),
        "texts": len(texts),
        **images.left_out(),
        "damage": list(getattr(task.samples, "damage", [])),
        "model": metrics_by_answers(*features, answers, group=encoder.group, **options),
        "chance": chance_by_answers(answers, **options),
    }
    if task.baseline is not None:
        entry["baseline"] = {f"{WAYS[0]}/{k}": v for k, v in task.baseline().items()}
    return entry, matched


def _match(captions: list[Captions], task: Task, device: str) -> tuple[list[str], Answers]:
    """The candidate texts, and the right answers of the task's images or first texts.

    Of two texts each second one is a candidate once, and right for all first texts that have it.

    If an image has several captions, each caption belongs to its own image alone, as is standard on
    COCO and Flickr30k. If each image has one, all images with the same caption belong to it.
    """
    counts = torch.tensor([len(of_image) for of_image in captions], device=device)
    rows = torch.repeat_interleave(counts)
    all_texts = [text for of_image in captions for text in of_image]
    of_texts = first_of(task.samples) == "text"
    several = any(len(set(of_image)) > 1 for of_image in captions)
    if several and task.candidates is None and not of_texts:
        return all_texts, answers_by_ids(torch.arange(len(captions), device=device), rows)
    texts = task.candidates or list(dict.fromkeys(all_texts))
    index = {text: i for i, text in enumerate(texts)}
    columns = torch.tensor([index[text] for text in all_texts], device=device)
    if of_texts:
        return texts, answers_by_pairs(rows, columns, len(captions), len(texts))
    first = counts.cumsum(0) - counts
    return texts, answers_by_ids(columns[first], torch.arange(len(texts), device=device))


def pairs_task(title: str, samples: Samples[Captions]) -> Task:
    """Match images with their captions, or first texts with second ones."""
    note = (
        f"The images of {title} among all their captions. Where images have several captions, each "
        "of them is right for its own image; where each has one, all images of one caption are "
        "right for it."
    )
    if first_of(samples) == "text":
        note = (
            f"The first texts of the pairs in {title} among all second ones, and back, each text "
            "once. All second texts that a first text is paired with are right for it."
        )
    return Task("pairs", title, note, samples)


# The built-in tasks.


def glyph_tasks(glyphs: GlyphSet) -> list[Task]:
    """Held-out faces among their own names, and held-out characters among all names."""
    train, faces, characters = (glyphs.split(s) for s in ("train", "faces", "characters"))
    face_names = " and ".join(sorted({glyphs.face_names[f] for f in faces.faces}))

    def face_baseline() -> dict[str, float]:
        of_train, of_faces = (train.images, train.name_ids), (faces.images, faces.name_ids)
        return pixel_neighbour_recalls(*of_train, *of_faces, ks=KS)

    return [
        Task(
            "faces",
            "held-out faces",
            f"Every image of {face_names}, two faces that training never saw, among all names of "
            "these images. The pixel baseline names an image after the training images nearest "
            "to it.",
            CaptionedPairs(faces),
            baseline=face_baseline,
        ),
        Task(
            "characters",
            "held-out characters",
            "Images of characters whose names training never saw, among the names of all "
            "characters. The pixel baseline is 0 by construction: it can give only names that a "
            "training image has.",
            CaptionedPairs(characters),
            candidates=glyphs.names,
            baseline=lambda: {f"recall@{k}": 0.0 for k in KS},
        ),
    ]


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
    Names at the same distance count as in random order, as in `retrieval_metrics`.

    Args:
        train_images, query_images: uint8 (n, ...) and (q, ...), of the same size.
        train_ids, query_ids: int64 (n,) and (q,), the images' names; each query's occurs in
            training.
    """
    order = np.argsort(train_ids, kind="stable")
    names, starts = np.unique(train_ids[order], return_index=True)
    train, query = (
        torch.from_numpy(np.ascontiguousarray(images)).flatten(1).float() / 255
        for images in (train_images[order], query_images)
    )
    # |q - t|² = |q|² - 2 (<q, t> - |t|²/2): the bracket alone decides.
    halves = train.square().sum(1) / 2
    counts = []
    columns = torch.from_numpy(np.searchsorted(names, query_ids))
    for block, own in zip(
        query.split(_QUERIES_PER_BLOCK), columns.split(_QUERIES_PER_BLOCK), strict=True
    ):
        products = (block @ train.T - halves).numpy()
        closeness = torch.from_numpy(np.maximum.reduceat(products, starts, axis=1))
        target = closeness.gather(1, own[:, None])
        counts.append(((closeness > target).sum(1), (closeness == target).sum(1) - 1))
    above, equal = (torch.cat(of_blocks) for of_blocks in zip(*counts, strict=True))
    recalls = expected_recalls(above, equal, torch.ones_like(above), ks)
    return {f"recall@{k}": recall for k, recall in recalls.items()}
