"""Classification of labelled images: zero-shot, by nearest neighbours, by a linear probe.

Accuracy follows from how many classes score higher than the right one, and how many the same. Ties
count as a random choice, as in `megabatch.evaluation.retrieval`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megabatch.errors import UsageError
from megabatch.evaluation.embed import Embedded, Encoder
from megabatch.evaluation.probe import choose_and_fit, neighbour_votes
from megabatch.evaluation.retrieval import answered_within, answers_by_ids
from megabatch.evaluation.samples import Labelled
from megabatch.evaluation.tasks import Matched
from megabatch.evaluation.zeroshot import Prompts, class_features
from megabatch.ranks import all_gather_rows, local_range

KS = (1, 5)
_ROWS = 4096  # images per block of scores


@dataclass(frozen=True)
class Ranked:
    """Per image, int64 (n,): its class, and how many wrong classes score higher or the same."""

    labels: Tensor
    above: Tensor
    equal: Tensor

    def figures(self) -> dict[str, float]:
        """`top1`, `top5` and `mean_per_class_recall` (of top1, over the classes that occur)."""
        within = answered_within(self.above, self.equal, torch.ones_like(self.above), KS)
        recalls = self.recall_by_class().values()
        return {
            **{f"top{k}": float(right.mean()) for k, right in within.items()},
            "mean_per_class_recall": sum(recalls) / len(recalls),
        }

    def recall_by_class(self) -> dict[int, float]:
        """Fraction of a class's images that are classified right, for each class that occurs."""
        right = answered_within(self.above, self.equal, torch.ones_like(self.above), [1])[1]
        n, sums = self.labels.bincount(), self.labels.bincount(right)
        return {i: float(sums[i] / n[i]) for i in n.nonzero().squeeze(1).tolist()}


def rank_classes(
    scores: Callable[[Tensor], Tensor], images: Tensor, labels: Tensor, group: object = "local"
) -> Ranked:
    """Rank the right class of each image among all.

    Args:
        scores: returns the classes' scores (m, classes) of images (m, d).
        images: (n, d); labels: int64 (n,).
        group: ranks that share the work; each holds all of these tensors.
    """
    found = [labels.new_zeros(0, 2)]
    mine = local_range(len(images), group, block=_ROWS)
    for start in range(mine.start, mine.stop, _ROWS):
        rows = slice(start, min(mine.stop, start + _ROWS))
        score = scores(images[rows])
        target = score.gather(1, labels[rows, None])
        above, equal = (score > target).sum(1), (score == target).sum(1) - 1
        found.append(torch.stack([above, equal], dim=1))
    return Ranked(labels, *all_gather_rows(torch.cat(found), group).unbind(1))


def chance(n_classes: int) -> dict[str, float]:
    """The figures of guessing."""
    return {
        **{f"top{k}": min(1.0, k / n_classes) for k in KS},
        "mean_per_class_recall": 1 / n_classes,
    }


@dataclass(frozen=True)
class ClassTask:
    """Images to be classified.

    prompts: for zero-shot classification, None to leave it out. train: training images for the
    other two methods; neighbours: their number and the temperature of votes, None to leave votes
    out; probe: whether to fit one. key: the task's key in `evaluation.json`; note: a description of
    the images.
    """

    title: str
    test: Labelled
    prompts: Prompts | None = None
    train: Labelled | None = None
    neighbours: tuple[int, float] | None = None
    probe: bool = False
    key: str = "classes"
    note: str = ""

    def __post_init__(self) -> None:
        if self.train is not None:
            train_labels(self.test, self.train)  # before anything is embedded


@dataclass(frozen=True)
class ClassScored:
    """A task's entries in `evaluation.json`; None for methods that were not requested.

    matched: the images and the classes as texts, after zero-shot classification.
    """

    zero_shot: dict[str, Any] | None = None
    classification: dict[str, Any] | None = None
    matched: Matched | None = None


def score_classes(encoder: Encoder, task: ClassTask) -> ClassScored:
    """Embed the task's images once and classify them by each requested method."""
    images = encoder.embed(task.test, task.title)
    zero_shot, matched, trained = None, None, None
    if task.prompts is not None:
        zero_shot, matched = _zero_shot(encoder, task, images, task.prompts)
    if task.train is not None and (task.neighbours or task.probe):
        trained = _train_and_score(encoder, task, images, task.train)
    return ClassScored(zero_shot, trained, matched)


def _zero_shot(
    encoder: Encoder, task: ClassTask, images: Embedded, prompts: Prompts
) -> tuple[dict[str, Any], Matched]:
    names = prompts.distinct_names(task.test.classes)
    labels = torch.tensor(images.targets, device=encoder.device)
    classes = class_features(encoder.texts, prompts)
    answers = answers_by_ids(labels, torch.arange(len(names), device=encoder.device))
    matched = Matched(
        *(task.title, task.test, images.indices, images.features, names, classes, answers)
    )
    ranked = rank_classes(lambda x: x @ classes.T, images.features, labels, encoder.group)
    entry = {
        **_entry(task, images, len(names), f"{task.note} Templates: {prompts.shown()}."),
        "prompts": {
            "source": prompts.source,
            "templates": list(prompts.templates),
            "names": list(prompts.names),
        },
        "model": ranked.figures(),
        "recall_by_class": {names[i]: r for i, r in ranked.recall_by_class().items()},
    }
    return entry, matched


def _train_and_score(
    encoder: Encoder, task: ClassTask, images: Embedded, train: Labelled
) -> dict[str, Any]:
    known = encoder.embed(train, f"{task.title}, training images")
    device, group, n_classes = encoder.device, encoder.group, train.n_classes
    labels = train_labels(task.test, train)[torch.tensor(images.targets)].to(device)
    data = known.features, torch.tensor(known.targets, device=device), n_classes
    by_method: dict[str, Callable[[Tensor], Tensor]] = {}
    note = f"{len(known.targets):,} training images."
    if task.neighbours is not None:
        k, temperature = task.neighbours
        by_method["neighbours"] = neighbour_votes(*data, k=k, temperature=temperature)
        note += f" The {k} nearest vote, with temperature {temperature:g}."
    if task.probe:
        by_method["probe"] = probe = choose_and_fit(*data, group)
        note += f" Linear probe: C = {probe.c:.3g}, chosen on a fifth of the training images, then "
        note += "fitted to all."
    entry = {
        **_entry(task, images, n_classes, note),
        "train_images": len(known.targets),
        **known.left_out("train_"),
    }
    for method, scores in by_method.items():
        entry[method] = rank_classes(scores, images.features, labels, group).figures()
    entry["damage"] += getattr(train, "damage", [])
    return entry


def _entry(task: ClassTask, images: Embedded, n_classes: int, note: str) -> dict[str, Any]:
    return {
        "title": task.title,
        "note": note.lstrip(),
        "images": len(images.targets),
        **images.left_out(),
        "damage": list(getattr(task.test, "damage", [])),
        "classes": n_classes,
        "chance": chance(n_classes),
    }


def train_labels(test: Labelled, train: Labelled) -> Tensor:
    """Match test classes with training classes, by name or else by number; int64 (test classes,).

    Raises:
        UsageError: a class of the test images is missing from the training images.
    """
    if test.classes is None or train.classes is None:
        if train.n_classes < test.n_classes:
            raise UsageError(
                f"the test images have {test.n_classes} classes, the training images only "
                f"{train.n_classes}"
            )
        return torch.arange(test.n_classes)
    missing = [name for name in test.classes if name not in train.classes]
    if missing:
        raise UsageError(
            f"{len(missing)} of {len(test.classes)} classes of the test images are not among the "
            f"training images', such as {missing[0]!r}"
        )
    return torch.tensor([train.classes.index(name) for name in test.classes])
