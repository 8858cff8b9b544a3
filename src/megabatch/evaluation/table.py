"""The figures of an evaluation as rows, for the terminal and for the report."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

CONTENDERS = {"model": "model", "baseline": "pixel nearest neighbour", "chance": "chance"}
_WAYS = {"image_to_text": "image → text", "text_to_image": "text → image"}


@dataclass(frozen=True)
class Row:
    """One contender's figures, ready to print."""

    contender: str
    is_model: bool
    cells: tuple[str, ...]


@dataclass(frozen=True)
class Group:
    """All contenders of one task and direction."""

    heading: str
    rows: list[Row]


def retrieval_groups(evaluation: dict[str, Any]) -> list[Group]:
    """Recall@1, @5, @10 and median rank of each contender, by task and direction."""
    return [
        _retrieval_group(task, way) for task in evaluation["retrieval"].values() for way in _WAYS
    ]


def zero_shot_groups(evaluation: dict[str, Any]) -> list[Group]:
    """Top-1 and top-5 accuracy of each contender, by task."""
    return [_zero_shot_group(task) for task in evaluation["zero_shot"].values()]


def _retrieval_group(task: dict[str, Any], way: str) -> Group:
    queries = int(task["model"][f"{way}/queries"])
    among = task["texts"] if way == "image_to_text" else task["images"]
    rows = []
    for name, label in CONTENDERS.items():
        figures = task.get(name, {})
        if f"{way}/recall@1" in figures:
            recalls = (_percent(figures[f"{way}/recall@{k}"]) for k in (1, 5, 10))
            rank = _rank(figures.get(f"{way}/median_rank"))
            rows.append(Row(label, name == "model", (*recalls, rank)))
    return Group(f"{task['title']}, {_WAYS[way]}: {queries:,} among {among:,}", rows)


def _zero_shot_group(task: dict[str, Any]) -> Group:
    rows = [
        Row(label, name == "model", (_percent(task[name]["top1"]), _percent(task[name]["top5"])))
        for name, label in CONTENDERS.items()
        if name in task
    ]
    return Group(f"{task['title']}: {task['images']:,} in {task['classes']} classes", rows)


def print_evaluation(evaluation: dict[str, Any], console: Console | None = None) -> None:
    """Print every figure with its baseline and chance below it; fits 80 columns."""
    console = console or Console()
    for columns, groups in (
        (("R@1", "R@5", "R@10", "median rank"), retrieval_groups(evaluation)),
        (("top-1", "top-5"), zero_shot_groups(evaluation)),
    ):
        for group in groups:
            console.print(group.heading, style="bold", highlight=False, markup=False)
            console.print(_table(columns, group))


def _table(columns: tuple[str, ...], group: Group) -> Table:
    table = Table(box=None, padding=(0, 2), header_style="")
    table.add_column("", no_wrap=True, min_width=max(map(len, CONTENDERS.values())))
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True, min_width=8)
    for row in group.rows:
        table.add_row(row.contender, *row.cells, style=None if row.is_model else "dim")
    return table


def _percent(value: float) -> str:
    return f"{100 * value:.3f}%" if 0 < value < 0.001 else f"{100 * value:.2f}%"


def _rank(value: float | None) -> str:
    return "–" if value is None else f"{value:,.1f}".removesuffix(".0")
