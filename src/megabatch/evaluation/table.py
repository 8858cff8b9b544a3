"""The figures of an evaluation as rows, for the terminal and for the report."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from megabatch.terminal import plain_console

CONTENDERS = {
    "model": "model",
    "neighbours": "nearest neighbours",
    "probe": "linear probe",
    "baseline": "pixel nearest neighbour",
    "chance": "chance",
}
OF_MODEL = ("model", "neighbours", "probe")  # contenders that use the model's features
RETRIEVAL = ("R@1", "R@5", "R@10", "median rank")
ACCURACY = ("top-1", "top-5", "mean per class")
WAYS = ("image_to_text", "text_to_image")


@dataclass(frozen=True)
class Row:
    """One contender's figures, formatted and as numbers (None if there is none)."""

    contender: str
    is_model: bool
    cells: tuple[str, ...]
    values: tuple[float | None, ...]


@dataclass(frozen=True)
class Group:
    """All contenders of one task and direction."""

    heading: str
    rows: list[Row]


def retrieval_groups(evaluation: dict[str, Any]) -> list[Group]:
    """Recall@1, @5, @10 and median rank of each contender, by task and direction."""
    return [
        _retrieval_group(task, way) for task in evaluation["retrieval"].values() for way in WAYS
    ]


def zero_shot_groups(evaluation: dict[str, Any]) -> list[Group]:
    """Top-1, top-5 and mean per-class recall of each contender, by task."""
    return [_accuracy_group(task) for task in evaluation["zero_shot"].values()]


def classification_groups(evaluation: dict[str, Any]) -> list[Group]:
    """The same for methods that learn from labelled images."""
    return [
        _accuracy_group(task, ", with training images")
        for task in evaluation.get("classification", {}).values()
    ]


def left_out(task: dict[str, Any]) -> list[str]:
    """A description of the parts of a task's data that could not be used."""
    counts = []
    for key, where in (("skipped", ""), ("train_skipped", " in training")):
        first = task.get(f"{key}_first", {})
        for reason, count in task.get(key, {}).items():
            example = f" (first: {first[reason]})" if reason in first else ""
            counts.append(f"{count:,} × {reason}{where}{example}")
    return counts + list(task.get("damage", []))


def _retrieval_group(task: dict[str, Any], way: str) -> Group:
    queries = int(task["model"][f"{way}/queries"])
    among = task["texts"] if way == "image_to_text" else task["images"]
    rows = []
    for name, label in CONTENDERS.items():
        figures = task.get(name, {})
        if f"{way}/recall@1" in figures:
            recalls = [figures[f"{way}/recall@{k}"] for k in (1, 5, 10)]
            rank = figures.get(f"{way}/median_rank")
            cells = (*map(_percent, recalls), _rank(rank))
            rows.append(Row(label, name == "model", cells, (*recalls, rank)))
    return Group(f"{task['title']}, {direction(task, way, '→')}: {queries:,} among {among:,}", rows)


def direction(task: dict[str, Any], way: str, to: str) -> str:
    """The name of a direction of retrieval; for pairs of texts, between first and second ones."""
    image, text = ("first", "second") if task.get("first") == "text" else ("image", "text")
    return f"{image} {to} {text}" if way == "image_to_text" else f"{text} {to} {image}"


def _accuracy_group(task: dict[str, Any], more: str = "") -> Group:
    keys = ("top1", "top5", "mean_per_class_recall")
    rows = []
    for name, label in CONTENDERS.items():
        if name in task:
            values = tuple(task[name].get(key) for key in keys)
            rows.append(Row(label, name in OF_MODEL, tuple(map(_percent, values)), values))
    heading = f"{task['title']}{more}: {task['images']:,} in {task['classes']:,} classes"
    return Group(heading, rows)


def print_evaluation(evaluation: dict[str, Any], console: Console | None = None) -> None:
    """Print every figure with its baseline and chance below it, within 80 columns."""
    console = console or plain_console()
    for columns, groups in (
        (RETRIEVAL, retrieval_groups(evaluation)),
        (ACCURACY, zero_shot_groups(evaluation) + classification_groups(evaluation)),
    ):
        for group in groups:
            console.print(group.heading, style="bold")
            console.print(_table(columns, group))
    kinds = ("retrieval", "zero_shot", "classification")
    tasks = [task for kind in kinds for task in evaluation.get(kind, {}).values()]
    for line in dict.fromkeys(line for task in tasks for line in left_out(task)):
        console.print(f"left out: {line}", style="yellow")


def _table(columns: tuple[str, ...], group: Group) -> Table:
    table = Table(box=None, padding=(0, 2), header_style="")
    table.add_column("", no_wrap=True, min_width=max(map(len, CONTENDERS.values())))
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True, min_width=8)
    for row in group.rows:
        table.add_row(row.contender, *row.cells, style=None if row.is_model else "dim")
    return table


def _percent(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{100 * value:.3f}%" if 0 < value < 0.001 else f"{100 * value:.2f}%"


def _rank(value: float | None) -> str:
    return "–" if value is None else f"{value:,.1f}".removesuffix(".0")
