"""The figures of an evaluation as rows, for the terminal and for the report."""

from __future__ import annotations

from collections.abc import Mapping
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
# Figures by their headings.
RETRIEVAL = {
    "R@1": "recall@1",
    "R@5": "recall@5",
    "R@10": "recall@10",
    "median rank": "median_rank",
}
ACCURACY = {"top-1": "top1", "top-5": "top5", "mean per class": "mean_per_class_recall"}
WAYS = ("image_to_text", "text_to_image")


@dataclass(frozen=True)
class Group:
    """All contenders of one task and direction, with the figures of `columns`, None if absent."""

    title: str
    what: str
    counts: str
    columns: Mapping[str, str]
    rows: dict[str, list[float | None]]

    @property
    def heading(self) -> str:
        """One line about the task: equal headings mean equal data."""
        return f"{self.title}, {self.what}: {self.counts}"


def groups(evaluation: dict[str, Any]) -> list[Group]:
    """The figures of each contender by task and direction, first of retrieval."""
    found = []
    for task in evaluation.get("retrieval", {}).values():
        for way in WAYS:
            among = task["texts"] if way == WAYS[0] else task["images"]
            counts = f"{int(task['model'][f'{way}/queries']):,} among {among:,}"
            found.append(_group(task, direction(task, way), counts, RETRIEVAL, f"{way}/"))
    for kind, what in (("zero_shot", "zero-shot"), ("classification", "with training images")):
        for task in evaluation.get(kind, {}).values():
            counts = f"{task['images']:,} in {task['classes']:,} classes"
            found.append(_group(task, what, counts, ACCURACY))
    return found


def _group(
    task: dict[str, Any], what: str, counts: str, columns: Mapping[str, str], prefix: str = ""
) -> Group:
    keys = [prefix + name for name in columns.values()]
    contenders = [name for name in CONTENDERS if keys[0] in task.get(name, {})]
    rows = {name: [task[name].get(key) for key in keys] for name in contenders}
    return Group(task["title"], what, counts, columns, rows)


def direction(task: dict[str, Any], way: str) -> str:
    """The name of a direction of retrieval; for pairs of texts, between first and second ones."""
    names = ("first", "second") if task.get("first") == "text" else ("image", "text")
    return " → ".join(names if way == WAYS[0] else reversed(names))


def cell(column: str, value: float | None) -> str:
    """A figure in words."""
    if value is None:
        return "–"
    if column == "median rank":
        return f"{value:,.1f}".removesuffix(".0")
    return f"{100 * value:.3f}%" if 0 < value < 0.001 else f"{100 * value:.2f}%"


def left_out(task: dict[str, Any]) -> list[str]:
    """A description of the parts of a task's data that could not be used."""
    counts = []
    for key, where in (("skipped", ""), ("train_skipped", " in training")):
        first = task.get(f"{key}_first", {})
        for reason, count in task.get(key, {}).items():
            example = f" (first: {first[reason]})" if reason in first else ""
            counts.append(f"{count:,} × {reason}{where}{example}")
    return counts + list(task.get("damage", []))


def tasks_of(evaluation: dict[str, Any]) -> list[dict[str, Any]]:
    """The entries of all tasks."""
    kinds = ("retrieval", "zero_shot", "classification")
    return [task for kind in kinds for task in evaluation.get(kind, {}).values()]


def print_evaluation(evaluation: dict[str, Any], console: Console | None = None) -> None:
    """Print every figure with its baseline and chance below it, within 80 columns."""
    console = console or plain_console()
    for group in groups(evaluation):
        console.print(group.heading, style="bold")
        table = Table(box=None, padding=(0, 2), header_style="")
        table.add_column("", no_wrap=True, min_width=max(map(len, CONTENDERS.values())))
        for column in group.columns:
            table.add_column(column, justify="right", no_wrap=True, min_width=8)
        for name, values in group.rows.items():
            cells = map(cell, group.columns, values)
            table.add_row(CONTENDERS[name], *cells, style=None if name in OF_MODEL else "dim")
        console.print(table)
    for line in dict.fromkeys(line for task in tasks_of(evaluation) for line in left_out(task)):
        console.print(f"left out: {line}", style="yellow")
