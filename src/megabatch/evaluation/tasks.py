"""Retrieval tasks: which images are asked for which names, and how a model does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from megabatch.data.glyphs import GlyphSet
from megabatch.errors import UsageError
from megabatch.evaluation.baseline import pixel_neighbour_recalls
from megabatch.evaluation.embed import Encoder, distinct_with_ids
from megabatch.evaluation.retrieval import chance_metrics, metrics_of_all
from megabatch.evaluation.samples import CaptionedPairs, Captions, Samples

KS = (1, 5, 10)


@dataclass(frozen=True)
class Task:
    """Images to be matched with texts.

    candidates: the texts to choose from, each once; None: the captions of `samples`.
    baseline: computes recalls of image→text that need no model; None: there are none.
    picture_of: a picture to show beside a text, with whether the training set has that text;
        None: an evaluated image of it. pictures_are: the same in the report's words.
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
    """Images, texts, and which belong together: those of equal ids, int64.

    features: (n, d) of the images, which are `samples[i]` for i in `indices`; text_features: (t, d)
    of `texts`; image_ids: (n,); text_ids: (t,), each at least once.
    """

    samples: Samples[Any]
    indices: list[int]
    features: Tensor
    image_ids: Tensor
    texts: list[str]
    text_features: Tensor
    text_ids: Tensor


@dataclass(frozen=True)
class Scored:
    """A task with a model's features for it and its figures.

    left_out: the samples that could not be used, as `Embedded.left_out` has them.
    figures: by contender ("model", "chance", "baseline"), keys such as `image_to_text/recall@1`.
    """

    task: Task
    matched: Matched
    left_out: dict[str, Any]
    figures: dict[str, dict[str, float]]


def score(encoder: Encoder, task: Task) -> Scored:
    """Embed the task's images and texts and rank them against each other."""
    images = encoder.embed(task.samples, task.title)
    if not images.targets:
        raise UsageError(
            f"{task.title}: none of {len(task.samples)} samples is usable: {images.reasons()}"
        )
    texts, image_ids, text_ids = _relate(images.targets, task.candidates)
    image_ids, text_ids = image_ids.to(encoder.device), text_ids.to(encoder.device)
    text_features = encoder.texts(texts)
    ids = {"x_ids": image_ids, "y_ids": text_ids}
    figures = {
        "model": _named(
            metrics_of_all(images.features, text_features, ks=KS, group=encoder.group, **ids)
        ),
        "chance": _named(chance_metrics(ks=KS, **ids)),
    }
    if task.baseline is not None:
        figures["baseline"] = {f"image_to_text/{k}": v for k, v in task.baseline().items()}
    matched = Matched(
        task.samples, images.indices, images.features, image_ids, texts, text_features, text_ids
    )
    return Scored(task, matched, images.left_out(), figures)


def _relate(
    captions: list[Captions], candidates: list[str] | None
) -> tuple[list[str], Tensor, Tensor]:
    """The texts to choose from, and the ids of images and of texts that say what is right.

    Where an image has several captions, each caption belongs to its own image alone, as COCO's and
    Flickr30k's figures are made. Where each has one, all images of one caption belong to it.
    """
    if candidates is None and any(len(of_image) > 1 for of_image in captions):
        counts = torch.tensor([len(of_image) for of_image in captions])
        texts = [caption for of_image in captions for caption in of_image]
        return texts, torch.arange(len(captions)), torch.repeat_interleave(counts)
    first = [of_image[0] for of_image in captions]
    if candidates is None:
        candidates, image_ids = distinct_with_ids(first)
    else:
        place = {text: i for i, text in enumerate(candidates)}
        image_ids = torch.tensor([place[caption] for caption in first], dtype=torch.int64)
    return candidates, image_ids, torch.arange(len(candidates))


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


def first_of(samples: Samples[Any]) -> str:
    """What is matched with texts: "image" or "text"."""
    return str(getattr(samples, "first", "image"))


def pairs_task(title: str, samples: Samples[Captions]) -> Task:
    """Images among their own captions, or first texts among the second ones."""
    if first_of(samples) == "text":
        note = f"The first texts of the pairs in {title} among all second ones, and back."
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
    """Top-1 and top-5 of classing an image with the nearest printed digit in the training set."""
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
    """Each name's first training image, else its first of the others."""
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
    """What `evaluation.json` keeps of a task."""
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
