"""Classification of labelled images: zero-shot, by nearest neighbours, by a linear probe.

Accuracy follows from how many classes score higher than the right one, and how many the same. Ties
count as a random choice, as in `megabatch.evaluation.retrieval`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megabatch.errors import UsageError, plural
from megabatch.evaluation.answers import Answers
from megabatch.evaluation.embed import Embedded, Encoder
from megabatch.evaluation.probe import choose_and_fit, neighbour_votes
from megabatch.evaluation.report.content import Confused, Confusion
from megabatch.evaluation.retrieval import answered_within
from megabatch.evaluation.samples import Labelled
from megabatch.evaluation.tasks import Matched
from megabatch.evaluation.zeroshot import Prompts, class_features
from megabatch.ranks import all_gather_rows, local_range
from megabatch.similarity import ranks, topk
from megabatch.similarity.eager import block_shape

KS = (1, 5)
_ROWS = 4096  # images per block of scores
_MATRIX_CLASSES = 20  # with more classes, the report has a list of confusions alone
_CONFUSIONS = 12  # of that list


@dataclass(frozen=True)
class Ranked:
    """Per image, int64 (n,): its class, and how many wrong classes score higher or the same.

    predicted: the class that scores highest, of several one.
    """

    labels: Tensor
    above: Tensor
    equal: Tensor
    predicted: Tensor

    def figures(self, ks: Sequence[int] = KS) -> dict[str, float]:
        """`top1`, `top5` and `mean_per_class_recall` (of top1, over the classes that occur)."""
        within = answered_within(self.above, self.equal, torch.ones_like(self.above), ks)
        return {
            **{f"top{k}": float(right.mean()) for k, right in within.items()},
            "mean_per_class_recall": float(_by_class(within[ks[0]], self.labels)[1].mean()),
        }

    def recall_by_class(self) -> dict[int, float]:
        """Fraction of a class's images that are classified right, for each class that occurs."""
        ones = torch.ones_like(self.above)
        right = answered_within(self.above, self.equal, ones, [1])[1]
        classes, recalls = _by_class(right, self.labels)
        return dict(zip(classes.tolist(), recalls.tolist(), strict=True))

    def confusion(self, method: str, names: Sequence[str]) -> Confusion:
        """The most frequent confusions of the classes with these names; of few, all counts."""
        n = len(names)
        pairs, counts = (self.labels * n + self.predicted).unique(return_counts=True)
        of_class = self.labels.bincount(minlength=n).tolist()
        matrix = {
            (pair // n, pair % n): count
            for pair, count in zip(pairs.tolist(), counts.tolist(), strict=True)
        }
        wrong = sorted(
            ((count, pair) for pair, count in matrix.items() if pair[0] != pair[1]),
            key=lambda item: (-item[0], item[1]),
        )
        few = n <= _MATRIX_CLASSES
        return Confusion(
            method,
            [
                Confused(names[right], names[taken], count, of_class[right])
                for count, (right, taken) in wrong[:_CONFUSIONS]
            ],
            list(names) if few else [],
            [[matrix.get((i, j), 0) for j in range(n)] for i in range(n)] if few else [],
        )


def rank_by_similarity(
    images: Tensor, labels: Tensor, classes: Tensor, group: object = "local"
) -> Ranked:
    """Rank classes by their inner product with an image.

    Args:
        images: (n, d); labels: int64 (n,), indices into `classes`; classes: (c, d).
        group: ranks that share the work; each holds all of these tensors.

    Raises:
        ValueError: a label is not the index of a class.
    """
    _check_labels(labels, len(classes))
    mine = _local_rows(len(images), group, block_shape(images)[0])
    above, equal = ranks(images[mine], classes, labels[mine], group="local")
    predicted = topk(images[mine], classes, 1, group="local")[1].squeeze(1)
    return _gathered(labels, above, equal, predicted, group)


def rank_by_scores(
    scores: Callable[[Tensor], Tensor],
    images: Tensor,
    labels: Tensor,
    n_classes: int,
    group: object = "local",
) -> Ranked:
    """Rank classes by `scores(images (m, d)) -> (m, n_classes)`; else as `rank_by_similarity`."""
    _check_labels(labels, n_classes)
    mine = _local_rows(len(images), group, _ROWS)
    own = labels[mine]
    above, equal, predicted = (torch.zeros_like(own) for _ in range(3))
    for rows in _row_blocks(len(own)):
        score = scores(images[mine][rows])
        target = score.gather(1, own[rows, None])
        above[rows] = (score > target).sum(1)
        equal[rows] = (score == target).sum(1) - 1
        predicted[rows] = score.argmax(1)
    return _gathered(labels, above, equal, predicted, group)


def chance(n_classes: int, ks: Sequence[int] = KS) -> dict[str, float]:
    """The figures of guessing."""
    return {
        **{f"top{k}": min(1.0, k / n_classes) for k in ks},
        "mean_per_class_recall": 1 / n_classes,
    }


def _local_rows(n: int, group: object, block: int) -> slice:
    part = local_range(n, group, block=block)
    return slice(part.start, part.stop)


def _row_blocks(n: int) -> Iterator[slice]:
    for start in range(0, n, _ROWS):
        yield slice(start, min(n, start + _ROWS))


def _gathered(
    labels: Tensor, above: Tensor, equal: Tensor, predicted: Tensor, group: object
) -> Ranked:
    all_ranks = all_gather_rows(torch.stack([above, equal, predicted], dim=1), group)
    return Ranked(labels, *all_ranks.unbind(1))


def _by_class(right: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """The classes that occur, and the mean of `right` (n,) over each."""
    classes, inverse, counts = labels.unique(return_inverse=True, return_counts=True)
    sums = torch.zeros(len(classes), dtype=torch.float64, device=right.device)
    return classes, sums.scatter_add_(0, inverse, right.double()) / counts


def _check_labels(labels: Tensor, n_classes: int) -> None:
    if len(labels) and not 0 <= int(labels.min()) <= int(labels.max()) < n_classes:
        raise ValueError(
            f"labels must lie in 0..{n_classes - 1}, got {int(labels.min())}..{int(labels.max())}"
        )


@dataclass(frozen=True)
class Neighbours:
    """Arguments of `neighbour_votes`."""

    k: int = 20
    temperature: float = 0.07


@dataclass(frozen=True)
class ClassTask:
    """Images to be classified.

    prompts: for zero-shot classification, None to leave it out. train: training images for the
    other two methods; neighbours: None to leave them out; probe: whether to fit one. key: the
    task's key in `evaluation.json`; note: a description of the images; baseline: computes
    accuracies that need no model.
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
    """A task's entries in `evaluation.json`; None for methods that were not requested.

    matched: the images and the classes as texts, after zero-shot classification; confusions: by
    each method.
    """

    zero_shot: dict[str, Any] | None
    classification: dict[str, Any] | None
    matched: Matched | None
    confusions: list[Confusion]


def score_classes(encoder: Encoder, task: ClassTask) -> ClassScored:
    """Embed the task's images once and classify them by each requested method."""
    images = encoder.embed(task.test, task.title)
    if not images.targets:
        raise UsageError(
            f"{task.title}: none of {plural(len(task.test), 'image')} is usable: {images.reasons()}"
        )
    zero_shot, matched = None, None
    confusions: list[Confusion] = []
    if task.prompts is not None:
        labels = torch.tensor(images.targets, device=encoder.device)
        matched = _match_with_classes(encoder, task, images, labels, task.prompts)
        ranked = rank_by_similarity(images.features, labels, matched.text_features, encoder.group)
        zero_shot = _zero_shot_record(task, images, matched.texts, ranked)
        confusions.append(ranked.confusion("zero-shot", matched.texts))
    trained = None
    if task.train is not None and (task.neighbours or task.probe):
        trained, by_method = _train_and_score(encoder, task, images, task.train)
        names = task.train.classes or [str(i) for i in range(task.train.n_classes)]
        confusions += [ranked.confusion(method, names) for method, ranked in by_method.items()]
    return ClassScored(zero_shot, trained, matched, confusions)


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
    index = {name: i for i, name in enumerate(train.classes)}
    missing = [name for name in test.classes if name not in index]
    if missing:
        raise UsageError(
            f"{len(missing)} of {len(test.classes)} classes of the test images are not among the "
            f"training images', such as {missing[0]!r}"
        )
    return torch.tensor([index[name] for name in test.classes])


def _match_with_classes(
    encoder: Encoder, task: ClassTask, images: Embedded, labels: Tensor, prompts: Prompts
) -> Matched:
    features = class_features(encoder.texts, prompts)
    names = _distinct(prompts, task.test.classes)
    answers = Answers.by_ids(labels, torch.arange(len(names), device=encoder.device))
    return Matched(task.test, images.indices, images.features, names, features, answers)


def _distinct(prompts: Prompts, classes: list[str] | None) -> list[str]:
    """Each class's first name, with its folder's if two classes share it, as in ImageNet."""
    first = [names[0] for names in prompts.names]
    count = Counter(first)
    folders = classes or [str(i) for i in range(len(first))]
    return [
        name if count[name] == 1 else f"{name} ({i if folder == name else folder})"
        for i, (name, folder) in enumerate(zip(first, folders, strict=True))
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
) -> tuple[dict[str, Any], dict[str, Ranked]]:
    """The entry in `evaluation.json`, and the classes' ranks by method."""
    known = encoder.embed(train, f"{task.title}, training images")
    if not known.targets:
        raise UsageError(
            f"{task.title}: none of {len(train)} training images is usable: {known.reasons()}"
        )
    device, group = encoder.device, encoder.group
    n_classes = train.n_classes
    labels = train_labels(task.test, train)[torch.tensor(images.targets)].to(device)
    known_labels = torch.tensor(known.targets, device=device)
    by_method: dict[str, Ranked] = {}
    notes = [f"{len(known.targets):,} training images."]
    if task.neighbours is not None:
        k, temperature = task.neighbours.k, task.neighbours.temperature
        votes = neighbour_votes(
            known.features, known_labels, n_classes, k=k, temperature=temperature
        )
        ranked = rank_by_scores(votes, images.features, labels, n_classes, group)
        by_method["neighbours"] = ranked
        notes.append(f"The {k} nearest vote, with temperature {temperature:g}.")
    if task.probe:
        probe = choose_and_fit(known.features, known_labels, n_classes, group)
        ranked = rank_by_scores(probe, images.features, labels, n_classes, group)
        by_method["probe"] = ranked
        notes.append(
            f"Linear probe: C = {probe.c:.3g}, chosen on a fifth of the training images, then "
            "fitted to all."
        )
    record = {
        "title": task.title,
        "note": " ".join(notes),
        **_counts(images, task.test, train),
        "classes": n_classes,
        "train_images": len(known.targets),
        **known.left_out("train_"),
        **{method: ranked.figures() for method, ranked in by_method.items()},
        "chance": chance(n_classes),
    }
    return record, by_method


def _counts(images: Embedded, *parts: Labelled) -> dict[str, Any]:
    return {
        "images": len(images.targets),
        **images.left_out(),
        "damage": [line for part in parts for line in getattr(part, "damage", [])],
    }
