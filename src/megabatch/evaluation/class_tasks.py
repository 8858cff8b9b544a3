"""Labelled images: zero-shot classification, nearest neighbours, a linear probe."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megabatch.errors import UsageError
from megabatch.evaluation.classification import (
    Ranked,
    chance,
    rank_by_scores,
    rank_by_similarity,
)
from megabatch.evaluation.embed import Embedded, Encoder
from megabatch.evaluation.labels import Labelled
from megabatch.evaluation.neighbours import neighbour_votes
from megabatch.evaluation.probe import choose_and_fit
from megabatch.evaluation.prompts import Prompts
from megabatch.evaluation.tasks import Matched
from megabatch.evaluation.zeroshot import class_features


@dataclass(frozen=True)
class Neighbours:
    """Settings of `neighbour_votes`."""

    k: int = 20
    temperature: float = 0.07


@dataclass(frozen=True)
class ClassTask:
    """Images to be classed.

    prompts: for zero-shot classification; None: without it. train: training images for the other
    two methods; neighbours: None: without them; probe: whether to fit one. key: what the record
    calls it; note: what the images are; baseline: computes accuracies that need no model.
    """

    title: str
    test: Labelled
    prompts: Prompts | None = None
    train: Labelled | None = None
    neighbours: Neighbours | None = None
    probe: bool = False
    key: str = "classes"
    note: str = ""
    baseline: Callable[[], dict[str, float]] | None = None

    def __post_init__(self) -> None:
        if self.train is not None:
            train_labels(self.test, self.train)  # before anything is embedded
            counts = self.train.labels().clamp(min=0).bincount()
            if self.probe and int(counts.max()) < 2:
                raise UsageError(
                    "--methods linear-probe: no class of the training images has two of them"
                )


@dataclass(frozen=True)
class ClassScored:
    """What `evaluation.json` keeps of a task, None where it was not asked for.

    matched: the images and the classes as texts, where there was zero-shot classification.
    """

    zero_shot: dict[str, Any] | None
    classification: dict[str, Any] | None
    matched: Matched | None


def score_classes(encoder: Encoder, task: ClassTask) -> ClassScored:
    """Embed the task's images once and class them by each method asked for."""
    images = encoder.embed(task.test, task.title)
    if not images.targets:
        raise UsageError(
            f"{task.title}: none of {len(task.test)} images is usable: {images.reasons()}"
        )
    zero_shot, matched = None, None
    if task.prompts is not None:
        matched = _match_with_classes(encoder, task, images, task.prompts)
        ranked = rank_by_similarity(
            images.features, matched.image_ids, matched.text_features, encoder.group
        )
        zero_shot = _zero_shot_record(task, images, matched.texts, ranked)
    trained = None
    if task.train is not None and (task.neighbours or task.probe):
        trained = _train_and_score(encoder, task, images, task.train)
    return ClassScored(zero_shot, trained, matched)


def train_labels(test: Labelled, train: Labelled) -> Tensor:
    """The training class of each test class, int64 (test classes,): of the same name, or number.

    Raises:
        UsageError: the training images do not have a class that the test images have.
    """
    if test.classes is None or train.classes is None:
        if train.n_classes < test.n_classes:
            raise UsageError(
                f"the test images have {test.n_classes} classes, the training images only "
                f"{train.n_classes}"
            )
        return torch.arange(test.n_classes)
    place = {name: i for i, name in enumerate(train.classes)}
    missing = [name for name in test.classes if name not in place]
    if missing:
        raise UsageError(
            f"{len(missing)} of {len(test.classes)} classes of the test images are not among the "
            f"training images', such as {missing[0]!r}"
        )
    return torch.tensor([place[name] for name in test.classes])


def _match_with_classes(
    encoder: Encoder, task: ClassTask, images: Embedded, prompts: Prompts
) -> Matched:
    features = class_features(encoder.texts, prompts)
    labels = torch.tensor(images.targets, device=encoder.device)
    names = _distinct(prompts, task.test.classes)
    ids = torch.arange(len(names), device=encoder.device)
    return Matched(task.test, images.indices, images.features, labels, names, features, ids)


def _distinct(prompts: Prompts, classes: list[str] | None) -> list[str]:
    """Each class's first name, with its folder's where two classes share it, as in ImageNet."""
    first = [names[0] for names in prompts.names]
    often = Counter(first)
    own = classes or [str(i) for i in range(len(first))]
    return [
        name if often[name] == 1 else f"{name} ({i if mine == name else mine})"
        for i, (name, mine) in enumerate(zip(first, own, strict=True))
    ]


def _zero_shot_record(
    task: ClassTask, images: Embedded, names: list[str], ranked: Ranked
) -> dict[str, Any]:
    prompts = task.prompts
    assert prompts is not None
    baseline = {} if task.baseline is None else {"baseline": task.baseline()}
    return {
        "title": task.title,
        "note": f"{task.note} Templates: {prompts.shown()}.".lstrip(),
        "prompts": {
            "source": prompts.source,
            "templates": list(prompts.templates),
            "names": [list(of_class) for of_class in prompts.names],
        },
        **_counts(images, task.test),
        "classes": len(names),
        "model": ranked.figures(),
        "chance": chance(len(names)),
        **baseline,
        "recall_by_class": {names[i]: r for i, r in ranked.recall_by_class().items()},
    }


def _train_and_score(
    encoder: Encoder, task: ClassTask, images: Embedded, train: Labelled
) -> dict[str, Any]:
    known = encoder.embed(train, f"{task.title}, training images")
    if not known.targets:
        raise UsageError(
            f"{task.title}: none of {len(train)} training images is usable: {known.reasons()}"
        )
    device, group = encoder.device, encoder.group
    n_classes = train.n_classes
    labels = train_labels(task.test, train)[torch.tensor(images.targets)].to(device)
    known_labels = torch.tensor(known.targets, device=device)
    figures: dict[str, Any] = {}
    notes = [f"{len(known.targets):,} training images."]
    if task.neighbours is not None:
        k, temperature = task.neighbours.k, task.neighbours.temperature
        votes = neighbour_votes(
            known.features, known_labels, n_classes, k=k, temperature=temperature
        )
        ranked = rank_by_scores(votes, images.features, labels, n_classes, group)
        figures["neighbours"] = ranked.figures()
        notes.append(f"The {k} nearest vote, with temperature {temperature:g}.")
    if task.probe:
        probe = choose_and_fit(known.features, known_labels, n_classes, group)
        ranked = rank_by_scores(probe, images.features, labels, n_classes, group)
        figures["probe"] = ranked.figures()
        notes.append(
            f"Linear probe: C = {probe.c:.3g}, chosen on a fifth of the training images, then "
            "fitted to all."
        )
    return {
        "title": task.title,
        "note": " ".join(notes),
        **_counts(images, task.test, train),
        "classes": n_classes,
        "train_images": len(known.targets),
        **known.left_out("train_"),
        **figures,
        "chance": chance(n_classes),
    }


def _counts(images: Embedded, *parts: Labelled) -> dict[str, Any]:
    return {
        "images": len(images.targets),
        **images.left_out(),
        "damage": [line for part in parts for line in getattr(part, "damage", [])],
    }
