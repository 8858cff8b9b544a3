"""The page of several runs: curves on each other, the figures, the settings that differ."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megabatch.evaluation.report.charts import (
    RUN_COLOURS,
    Chart,
    Series,
    curves_chart,
    is_number,
    series,
)
from megabatch.evaluation.report.page import CURVES, templates, validation_figures
from megabatch.evaluation.report.sources import Source, distinct_names, read_source
from megabatch.evaluation.table import (
    ACCURACY,
    CONTENDERS,
    OF_MODEL,
    RETRIEVAL,
    Group,
    Row,
    classification_groups,
    retrieval_groups,
    zero_shot_groups,
)

_NOT_COMPARED = {"output"}
_FACTS = {
    "step": ("steps", "{:,}"),
    "samples": ("pairs seen", "{:,}"),
    "loss": ("final loss", "{:.4f}"),
    "seconds": ("time, s", "{:,.0f}"),
    "pairs_per_second": ("pairs/s", "{:,.0f}"),
}


@dataclass(frozen=True)
class _Row:
    """A run's figures on one task; best: for each whether no other run's is better."""

    run: int
    cells: Sequence[str]
    best: Sequence[bool]


@dataclass(frozen=True)
class _Group:
    heading: str
    rows: list[_Row]


def make_comparison(folders: Sequence[Path]) -> str:
    """The page that compares the runs or evaluations in these folders, as HTML.

    Raises:
        UsageError: a folder has neither, or a file in it is damaged.
    """
    sources = [read_source(folder) for folder in folders]
    return render(sources, distinct_names(sources, folders))


def render(sources: Sequence[Source], names: Sequence[str]) -> str:
    """Render the page; all text that is inserted into it is escaped."""
    curves, missing = _curves(sources, names)
    evaluations = [source.evaluation for source in sources]
    groups = [
        (RETRIEVAL, _groups([retrieval_groups(e) if e else [] for e in evaluations])),
        (
            ACCURACY,
            _groups(
                [zero_shot_groups(e) + classification_groups(e) if e else [] for e in evaluations]
            ),
        ),
    ]
    return (
        templates()
        .get_template("comparison.html")
        .render(
            name=f"{len(sources)} runs compared",
            names=names,
            colours=[RUN_COLOURS[i % len(RUN_COLOURS)] for i in range(len(sources))],
            curves=curves,
            missing_curves=missing,
            facts_columns=[term for term, _ in _FACTS.values()],
            facts=[_facts(source) for source in sources],
            groups=[(columns, some) for columns, some in groups if some],
            not_evaluated=[
                f"{name} has not been evaluated (megabatch eval)."
                for name, evaluation in zip(names, evaluations, strict=True)
                if not evaluation
            ],
            outdated=[source.outdated for source in sources],
            settings=_differing(sources),
        )
    )


def _curves(
    sources: Sequence[Source], names: Sequence[str]
) -> tuple[list[tuple[str, Chart]], list[str]]:
    """A chart for each quantity that any run logged, and lines about what is missing.

    Runs of different batch sizes are compared by the pairs that they have seen.
    """
    batches = {source.settings.get("global_batch_size") for source in sources}
    by_pairs = len(batches) > 1 and all(
        "samples" in record for source in sources for record in source.records[-1:]
    )
    x, label = ("samples", "pairs seen") if by_pairs else ("step", "step")
    charts, missing = [], []
    for key, title in CURVES.items():
        drawn = _present([series(source.records, key, x) for source in sources])
        if drawn:
            charts.append((title, curves_chart(title, drawn, label)))
        absent = [
            name
            for i, (name, source) in enumerate(zip(names, sources, strict=True))
            if i not in drawn and source.records
        ]
        if absent:
            missing.append(f"Without {title} in the log: {', '.join(absent)}.")
    for figure in validation_figures(sources):
        if drawn := _present([figure.series(source) for source in sources]):
            charts.append((figure.title, curves_chart(figure.title, drawn)))
    silent = [name for name, source in zip(names, sources, strict=True) if not source.records]
    if silent:
        missing.append(f"Without a log of training (metrics.jsonl): {', '.join(silent)}.")
    return charts, missing


def _present(curves: Sequence[Series | None]) -> dict[int, Series]:
    """The curves of the runs that logged a quantity, by the number of the run."""
    return {i: curve for i, curve in enumerate(curves) if curve is not None}


def _facts(source: Source) -> list[str]:
    last = dict(source.records[-1]) if source.records else {}
    if is_number(last.get("samples")) and is_number(last.get("seconds")) and last["seconds"] > 0:
        last["pairs_per_second"] = last["samples"] / last["seconds"]  # of all steps
    return [
        form.format(last[key]) if is_number(last.get(key)) else "–"
        for key, (_, form) in _FACTS.items()
    ]


def _groups(by_run: Sequence[Sequence[Group]]) -> list[_Group]:
    """The rows of all runs' models under each heading."""
    own = {CONTENDERS[name]: name for name in OF_MODEL}
    found: dict[str, list[tuple[int, Row]]] = {}
    for run, groups in enumerate(by_run):
        for group in groups:
            for row in group.rows:
                if row.contender in own:
                    method = "" if row.contender == CONTENDERS["model"] else f", {row.contender}"
                    found.setdefault(group.heading + method, []).append((run, row))
    return [_Group(heading, _marked(rows)) for heading, rows in found.items()]


def _marked(rows: Sequence[tuple[int, Row]]) -> list[_Row]:
    """The runs' rows of one task, with the best figure of each column marked."""
    columns = list(zip(*(row.values for _, row in rows), strict=True))
    best = [_best(values, lowest=RETRIEVAL[i] == "median rank") for i, values in enumerate(columns)]
    return [
        _Row(run, row.cells, [value == b for value, b in zip(row.values, best, strict=True)])
        for run, row in rows
    ]


def _best(values: Sequence[float | None], *, lowest: bool) -> float:
    """The best of several values; NaN, which equals nothing, if they do not differ."""
    known = [value for value in values if value is not None]
    if len(set(known)) < 2:
        return math.nan
    return min(known) if lowest else max(known)


def _differing(sources: Sequence[Source]) -> list[tuple[str, list[str]]]:
    """The settings in which runs differ, with the value of each run."""
    keys = dict.fromkeys(key for source in sources for key in source.settings)
    rows = []
    for key in keys:
        values = [source.settings.get(key) for source in sources]
        if key not in _NOT_COMPARED and any(value != values[0] for value in values):
            rows.append((key, ["not set" if value is None else _shown(value) for value in values]))
    return rows


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return " ".join(map(str, value))
    return f"{value:,}" if isinstance(value, int) else str(value)
