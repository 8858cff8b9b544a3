"""Tasks: images to be matched with texts, or to be classified.

Each has a `key`, its data, and a method `score(encoder)` that embeds these once. It returns the
kind and the content of the task's entry in `evaluation.json`, figures of the model next to
guessing's, and the features.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megabatch.data.glyphs import GlyphSet
from megabatch.evaluation.captions import CaptionedPairs
from megabatch.evaluation.embed import Embedded, Encoder
from megabatch.evaluation.retrieval import (
    Answers,
    answered_within,
    answers_by_ids,
    answers_by_pairs,
    figures_and_chance,
    place,
)
from megabatch.evaluation.samples import Labelled, Samples
from megabatch.evaluation.table import ACCURACY, WAYS
from megabatch.evaluation.tokens import Features
from megabatch.evaluation.zeroshot import Prompts, class_features

KS, TOPS = (1, 5, 10), (1, 5)


@dataclass(frozen=True)
class Matched:
    """Images and texts of a task with their features, and which belong together.

    features: of the images, which are `samples[i]` for i in `indices`; text_features: of `texts`;
    answers: each image's right texts, at least one, and each text's right images.
    """

    title: str
    samples: Samples
    indices: list[int]
    features: Features
    texts: list[str]
    text_features: Features
    answers: Answers


def _about(title: str, samples: Samples, images: Embedded) -> dict[str, Any]:
    """The part of an entry that all kinds have."""
    return {
        "title": title,
        "first": samples.first,
        "images": len(images.indices),
        **images.left_out(),
        "damage": list(samples.damage),
    }


# Retrieval.


@dataclass(frozen=True)
class RetrievalTask:
    """Images to be matched with texts.

    candidates: the texts to choose from, each once; None: the captions of `samples`.
    """

    key: str
    title: str
    samples: Samples
    candidates: list[str] | None = None

    def score(self, encoder: Encoder) -> tuple[str, dict[str, Any], Matched]:
        """Rank images and texts against each other: figures such as `image_to_text/recall@1`."""
        images = encoder.embed(self.samples, self.title)
        texts, answers, among = self._match(images.targets, encoder.device)
        features = images.features, encoder.texts(texts)
        model, chance = figures_and_chance(
            *features, answers, ks=KS, group=encoder.group, ways=WAYS
        )
        entry = {
            **_about(self.title, self.samples, images),
            "protocol": f"recall@k of the best-ranked right answer over all {among}",
            "texts": len(texts),
            "model": model,
            "chance": chance,
        }
        matched = images.indices, features[0], texts, features[1], answers
        return "retrieval", entry, Matched(self.title, self.samples, *matched)

    def _match(self, captions: list[list[str]], device: str) -> tuple[list[str], Answers, str]:
        """The candidate texts, the right answers of images or first texts, and what is a candidate.

        Of two texts each second one is a candidate once, and right for all first ones that have it.

        If an image has several captions, each caption belongs to its own image alone, as is
        standard on COCO and Flickr30k. If each image has one, all images with the same caption
        belong to it.
        """
        counts = torch.tensor([len(of_image) for of_image in captions], device=device)
        rows = torch.repeat_interleave(counts)
        all_texts = [text for of_image in captions for text in of_image]
        of_texts = self.samples.first == "text"
        several = any(len(set(of_image)) > 1 for of_image in captions)
        if several and self.candidates is None and not of_texts:
            answers = answers_by_ids(torch.arange(len(captions), device=device), rows)
            return all_texts, answers, "captions, each of one image"
        texts = self.candidates or list(dict.fromkeys(all_texts))
        index = {text: i for i, text in enumerate(texts)}
        columns = torch.tensor([index[text] for text in all_texts], device=device)
        if of_texts:
            answers = answers_by_pairs(rows, columns, len(captions), len(texts))
            return texts, answers, "second texts, equal ones as one"
        first = counts.cumsum(0) - counts
        answers = answers_by_ids(columns[first], torch.arange(len(texts), device=device))
        of = "captions" if self.candidates is None else "names"
        return texts, answers, f"{of}, equal ones as one"


def glyph_tasks(glyphs: GlyphSet) -> list[RetrievalTask]:
    """Two faces that training never saw among their own names, held-out characters among all."""
    faces, characters = (CaptionedPairs(glyphs.split(s)) for s in ("faces", "characters"))
    return [
        RetrievalTask("faces", "held-out faces", faces),
        RetrievalTask("characters", "held-out characters", characters, glyphs.names),
    ]


# Classification.


@dataclass(frozen=True)
class ClassTask:
    """Images to be classified by the texts of their classes."""

    key: str
    title: str
    samples: Labelled
    prompts: Prompts

    def score(self, encoder: Encoder) -> tuple[str, dict[str, Any], Matched]:
        """Zero-shot classification: figures such as `top1`."""
        images = encoder.embed(self.samples, self.title)
        labels = torch.tensor(images.targets, device=encoder.device)
        classes = class_features(encoder.texts, self.prompts)
        n_classes = len(classes)
        chances = [min(1.0, k / n_classes) for k in TOPS] + [1 / n_classes]
        entry = {
            **_about(self.title, self.samples, images),
            "protocol": "zero-shot by the mean text feature of each class's prompts",
            "classes": n_classes,
            "prompts": str(self.prompts),
            "model": accuracy(images.features, classes, labels, encoder.group),
            "chance": dict(zip(ACCURACY.values(), chances, strict=True)),
        }
        answers = answers_by_ids(labels, torch.arange(n_classes, device=encoder.device))
        matched = images.indices, images.features, list(self.prompts.names), classes, answers
        return "zero_shot", entry, Matched(self.title, self.samples, *matched)


def accuracy(
    images: Features, classes: Tensor, labels: Tensor, group: object = "local"
) -> dict[str, float]:
    """`top1`, `top5` and `mean_per_class_recall` (of top1, over the classes that occur).

    Classes that score the same count as in random order, as in `megabatch.evaluation.retrieval`.

    Args:
        images: (n, d); classes: (c, d); labels: int64 (n,).
        group: ranks that share the work; each holds all of these tensors.
    """
    answers = answers_by_ids(labels, torch.arange(len(classes), device=labels.device))
    placed, _ = place(images, classes, answers, group)
    within = [answered_within(placed, k) for k in TOPS]
    counts, right = labels.bincount(), labels.bincount(within[0])
    shares = (*within, (right / counts)[counts > 0])
    return {name: float(s.mean()) for name, s in zip(ACCURACY.values(), shares, strict=True)}
