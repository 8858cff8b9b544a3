"""`report.json`: examples and distributions that an evaluation keeps for its report.

A page can be made from it at any time, without the model or the data.
"""

from __future__ import annotations

import json
import os
import types
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

from megabatch.errors import UsageError, one_line
from megabatch.evaluation.run_folder import write_atomically
from megabatch.hints import is_union

NAME = "report.json"


@dataclass(frozen=True)
class Picture:
    """A reduced image: `data` is base64; `small` ones are enlarged without smoothing."""

    kind: str
    data: str
    small: bool

    @property
    def uri(self) -> str:
        """A data URI, whatever `data` holds: a page loads nothing from elsewhere."""
        kind = "png" if self.kind == "png" else "jpeg"
        return f"data:image/{kind};base64,{self.data}"


@dataclass(frozen=True)
class Answer:
    """A retrieved image or text at its rank, 1 for the best.

    known: whether the training set has the text, None if that is unknown.
    """

    text: str
    picture: Picture | None
    rank: int
    right: bool
    cosine: float
    known: bool | None = None


@dataclass(frozen=True)
class Query:
    """A query with the answers that score highest.

    rank: of its best right answer. missed: that answer, if it is not among `answers`.
    """

    text: str
    picture: Picture | None
    rank: int
    answers: list[Answer]
    missed: Answer | None


@dataclass(frozen=True)
class Gallery:
    """Queries of one direction, `image_to_text` or `text_to_image`, and further ones that fail."""

    way: str
    examples: list[Query]
    failures: list[Query]


@dataclass(frozen=True)
class Histogram:
    """Cosines of a sample of positives and negatives, counted in equal bins from low to high.

    separated: the probability that a positive scores higher than a negative (the ROC's area).
    """

    low: float
    high: float
    positives: list[int]
    negatives: list[int]
    mean_positive: float
    mean_negative: float
    separated: float


@dataclass(frozen=True)
class HeatMap:
    """Cosines of some images (rows) with their texts (columns), both in the order of `texts`."""

    texts: list[str]
    cosines: list[list[float]]


@dataclass(frozen=True)
class Point:
    """An embedding's place in the map, x and y from 0 to 1; second: a text that belongs to images.

    group: the index of its class; None for tasks without classes.
    """

    x: float
    y: float
    text: str
    second: bool
    group: int | None


@dataclass(frozen=True)
class Confused:
    """How many of the `of` images of class `right` were assigned to class `taken_for`."""

    right: str
    taken_for: str
    count: int
    of: int


@dataclass(frozen=True)
class Confusion:
    """Confusions of one method, the most frequent first.

    classes, counts: the matrix of all counts, right classes in rows; empty if there are many.
    """

    method: str
    most: list[Confused]
    classes: list[str]
    counts: list[list[int]]


@dataclass(frozen=True)
class TaskContent:
    """The report's part about one task; `pictures_are` as in `Task`.

    first: the kind of its first elements, "image" or "text".
    """

    title: str
    first: str
    pictures_are: str
    histogram: Histogram
    heat_map: HeatMap
    map: list[Point]
    galleries: list[Gallery]


@dataclass(frozen=True)
class Content:
    """Everything in `report.json`.

    run: the path of the run's folder, relative to the file's; None if there is no run.
    confusions: by the title of the task.
    """

    run: str | None
    tasks: list[TaskContent]
    confusions: dict[str, list[Confusion]] = field(default_factory=dict)


def save(folder: Path, content: Content) -> None:
    """Write `folder/report.json`; UsageError if that is impossible."""
    text = json.dumps(asdict(content), ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    write_atomically(folder / NAME, text + "\n")


def load(folder: Path) -> Content | None:
    """Read `folder/report.json`; None if there is no such file.

    Raises:
        UsageError: it is damaged, or was written by another version.
    """
    path = folder / NAME
    if not path.is_file():
        return None
    try:
        content: Content = _build(Content, json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(
            f"{path} is not as this version of megabatch eval writes it ({one_line(error, 200)}): "
            "evaluate again, or remove it"
        ) from error
    return content


def relative(run: Path | None, folder: Path) -> str | None:
    """The run's folder as seen from `folder`, so that both can be moved together."""
    return None if run is None else os.path.relpath(run.resolve(), folder.resolve())


def _build(hint: Any, value: Any) -> Any:
    """An instance of a type from what JSON made of it; TypeError or KeyError if it is none."""
    if is_union(hint):
        some = next(part for part in get_args(hint) if part is not types.NoneType)
        return None if value is None else _build(some, value)
    if is_dataclass(hint) and isinstance(hint, type):
        hints, given = get_type_hints(hint), _of_type(dict, value)
        return hint(**{one.name: _build(hints[one.name], given[one.name]) for one in fields(hint)})
    if get_origin(hint) is list:
        return [_build(get_args(hint)[0], item) for item in _of_type(list, value)]
    if get_origin(hint) is dict:
        return {k: _build(get_args(hint)[1], item) for k, item in _of_type(dict, value).items()}
    if hint is float:
        return float(value) if type(value) is int else _of_type(float, value)
    return _of_type(hint, value)


def _of_type(kind: Callable[..., Any], value: Any) -> Any:
    if type(value) is not kind:  # a bool is no int
        raise TypeError(f"expected {getattr(kind, '__name__', kind)}, got {str(value)[:40]!r}")
    return value
