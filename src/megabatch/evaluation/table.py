"""The figures of an evaluation as rows, for the terminal and for the report."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from megabatch.terminal import plain_console

CONTENDERS = ("model", "chance")
# Figures by their headings.
RETRIEVAL = {
    "R@1": "recall@1",
    "R@5": "recall@5",
    "R@10": "recall@10",
    "median rank": "median_rank",
}
ACCURACY = {"top-1": "top1", "top-5": "top5", "mean per class": "mean_per_class_recall"}
WAYS = ("image_to_text", "text_to_image")
KINDS = ("retrieval", "zero_shot")


@dataclass(frozen=True)
class Group:
    """All contenders of one task and direction, with the figures of `columns`.

    heading: one line about the task: equal headings mean equal data.
    """

    heading: str
    columns: Mapping[str, str]
    rows: dict[str, list[float]]


def groups(evaluation: dict[str, Any]) -> list[Group]:
    """The figures of each contender by task and direction, first of retrieval."""
    found = []

    def add(heading: str, task: dict[str, Any], columns: Mapping[str, str], way: str = "") -> None:
        names = [way + name for name in columns.values()]
        rows = {who: [task[who][name] for name in names] for who in CONTENDERS if who in task}
        found.append(Group(heading, columns, rows))

    for task in evaluation["retrieval"].values():
        for way in WAYS:
            among = task["texts"] if way == WAYS[0] else task["images"]
            counts = f"{int(task['model'][f'{way}/queries']):,} among {among:,}"
            add(f"{task['title']}, {direction(task, way)}: {counts}", task, RETRIEVAL, f"{way}/")
    for task in evaluation["zero_shot"].values():
        counts = f"{task['images']:,} in {task['classes']:,} classes"
        add(f"{task['title']}, zero-shot: {counts}", task, ACCURACY)
    return found


def direction(task: dict[str, Any], way: str) -> str:
    """The name of a direction of retrieval; for pairs of texts, between first and second ones."""
    names = ("first", "second") if task["first"] == "text" else ("image", "text")
    return " → ".join(names if way == WAYS[0] else reversed(names))


def cell(column: str, value: float) -> str:
    """A figure in words."""
    if column == "median rank":
        return f"{value:,.1f}".removesuffix(".0")
    return f"{100 * value:.2f}%"


def left_out(task: dict[str, Any]) -> list[str]:
    """A description of the parts of a task's data that could not be used."""
    counts = [
        f"{count:,} × {reason} (first: {task['skipped_first'][reason]})"
        for reason, count in task.get("skipped", {}).items()
    ]
    return counts + list(task.get("damage", []))


def entries_of(evaluation: dict[str, Any]) -> list[dict[str, Any]]:
    """The entries of all tasks."""
    return [task for kind in KINDS for task in evaluation.get(kind, {}).values()]


def print_evaluation(evaluation: dict[str, Any], console: Console | None = None) -> None:
    """Print every figure, with chance below it, within 80 columns."""
    console = console or plain_console()
    for group in groups(evaluation):
        console.print(group.heading, style="bold")
        table = Table(box=None, padding=(0, 2), header_style="")
        table.add_column("", no_wrap=True, min_width=max(map(len, CONTENDERS)))
        for column in group.columns:
            table.add_column(column, justify="right", no_wrap=True, min_width=8)
        for name, values in group.rows.items():
            cells = map(cell, group.columns, values)
            table.add_row(name, *cells, style="dim" if name == "chance" else None)
        console.print(table)
    for line in dict.fromkeys(task.get("protocol", "") for task in entries_of(evaluation)):
        console.print(line, style="dim")  # "" of an older version
    for line in dict.fromkeys(x for task in entries_of(evaluation) for x in left_out(task)):
        console.print(f"left out: {line}", style="yellow")
