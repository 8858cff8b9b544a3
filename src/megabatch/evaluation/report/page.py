"""The page of one run or evaluated model, or of several that it compares."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined, UndefinedError
from markupsafe import Markup

from megabatch.errors import UsageError, one_line
from megabatch.evaluation.config import read_config
from megabatch.evaluation.report.charts import colour, curves_chart, series
from megabatch.evaluation.report.content import NAME
from megabatch.evaluation.run_folder import read_metrics, validated_on
from megabatch.evaluation.table import CONTENDERS, cell, direction, entries_of, groups, left_out

CURVES = {
    "loss": "loss",
    "lr": "learning rate",
    "grad_norm": "gradient norm",
    "logit_scale": "logit scale (1 / temperature)",
    "pairs_per_second": "pairs per second",
}
_VALIDATION = ("recall@1", "top1")  # figures of evaluations during the training that are drawn


@dataclass
class Source:
    """A run or an evaluated model, as far as it has files.

    evaluation, content: of evaluation.json and report.json. settings: of config.toml. records: the
    logged steps; validation: figures of evaluations during the training.
    """

    name: str
    evaluation: dict[str, Any]
    content: dict[str, Any]
    settings: dict[str, Any]
    records: list[dict[str, Any]]
    validation: list[dict[str, Any]]

    @property
    def facts(self) -> dict[str, Any]:
        """The evaluated model, and the last logged step."""
        run = self.evaluation.get("run", {})
        facts = {**run, "evaluated_step": run.get("step"), "date": self.evaluation.get("date")}
        return {**facts, "step": None, **(self.records[-1] if self.records else {})}


def read_source(folder: Path) -> Source:
    """Read a run's folder, or the folder that an evaluation was written to.

    Raises:
        UsageError: it is neither, or a file in it is damaged.
    """
    evaluation, content = _read(folder / "evaluation.json"), _read(folder / NAME)
    is_run = (folder / "config.toml").is_file()
    if not is_run and not evaluation:
        raise UsageError(f"{folder} is not a run: it has neither config.toml nor evaluation.json")
    settings = read_config(folder) if is_run else {}
    settings.pop("output", None)  # its own folder
    logs = [read_metrics(folder / f"{name}.jsonl") for name in ("metrics", "validation")]
    return Source(folder.resolve().name, evaluation, {"tasks": [], **content}, settings, *logs)


def _read(path: Path) -> dict[str, Any]:
    """The content of a JSON file; {} if there is no such file."""
    return dict(json.loads(path.read_text(encoding="utf-8"))) if path.is_file() else {}


def make_page(folders: Sequence[Path]) -> str:
    """The page of the run or evaluation in a folder, or of several, as HTML.

    All text that is inserted into it is escaped.

    Raises:
        UsageError: a folder has neither, or a file in it is damaged.
    """
    environment = Environment(
        loader=PackageLoader("megabatch.evaluation.report", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    several = len(folders) > 1
    try:
        sources = [read_source(folder) for folder in folders]
        names = [source.name for source in sources]
        if len(set(names)) < len(names):
            names = [str(folder) for folder in folders]
        return environment.get_template("page.html").render(
            name=f"{len(sources)} runs compared" if several else names[0],
            names=names,
            sources=sources,
            facts=_by_run([source.facts for source in sources]),
            settings=_by_run([source.settings for source in sources], differ=several),
            curves=_curves(sources),
            tables=_tables(sources),
            **{f.__name__: f for f in (cell, colour, direction, entries_of, left_out)},
        )
    except (UndefinedError, LookupError, TypeError, ValueError, AttributeError) as error:
        where = ", ".join(map(str, folders))
        raise UsageError(
            f"{where}: evaluation.json or report.json is not as this version of megabatch eval "
            f"writes it ({one_line(error, 200)}): evaluate again, or remove it"
        ) from error


def _by_run(values: list[dict[str, Any]], *, differ: bool = False) -> list[tuple[str, list[str]]]:
    """The runs' values under each name in words, all that any run has or those that differ."""
    names = dict.fromkeys(name for of_run in values for name in of_run)
    rows = [(name, [_words(of_run.get(name)) for of_run in values]) for name in names]
    return [row for row in rows if set(row[1]) != {"–"} and (len(set(row[1])) > 1 or not differ)]


def _words(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return "–" if value is None else str(value).lower()
    if isinstance(value, float):
        return f"{value:,.6g}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def _curves(sources: Sequence[Source]) -> list[tuple[str, Markup]]:
    """A chart with a title for each quantity that any run logged several times.

    Runs are compared by the pairs that they have seen, since their batch sizes may differ.
    Evaluations during the training on different data have curves of their own.
    """
    x, label = ("samples", "pairs seen") if len(sources) > 1 else ("step", "step")
    found = [
        (title, label, [series(source.records, key, x) for source in sources])
        for key, title in CURVES.items()
    ]
    validation = [record for source in sources for record in source.validation]
    keys = {(k, validated_on(r)): None for r in validation for k in r if k.endswith(_VALIDATION)}
    for key, data in keys:
        title = "validation: " + key.replace("/", ", ").replace("_", " ")
        title += f", on {data}" if data else ""
        on_data = [[r for r in s.validation if validated_on(r) == data] for s in sources]
        found.append((title, "step", [series(records, key) for records in on_data]))
    charts = []
    for title, label, curves in found:
        if logged := {run: curve for run, curve in enumerate(curves) if len(curve) > 1}:
            charts.append((title, curves_chart(title, logged, label)))
    return charts


def _tables(sources: Sequence[Source]) -> list[dict[str, Any]]:
    """A table for each task: all contenders of one run, or the models of several, the best marked.

    Runs are compared on equal data alone, which have equal headings.
    """
    several = len(sources) > 1
    tables: dict[str, dict[str, Any]] = {}
    for run, source in enumerate(sources):
        for group in groups(source.evaluation) if source.evaluation else ():
            new = {"heading": group.heading, "columns": list(group.columns), "rows": []}
            tables.setdefault(group.heading, new)["rows"] += [
                {"run": run, "contender": name, "label": CONTENDERS[name], "figures": figures}
                for name, figures in group.rows.items()
                if not (several and name == "chance")
            ]
    for table in tables.values():
        by_column = zip(*(row["figures"] for row in table["rows"]), strict=True)
        best = list(map(_best, table["columns"], by_column))
        table["best"] = best if several else [None] * len(best)
    return list(tables.values())


def _best(column: str, values: Sequence[float]) -> float | None:
    """The best of several values, None if they do not differ."""
    best = min if column == "median rank" else max
    return best(values) if len(set(values)) > 1 else None
