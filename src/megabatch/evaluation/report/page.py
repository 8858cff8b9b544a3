"""The page of one run or evaluated model, or of several that it compares."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined, UndefinedError
from markupsafe import Markup

from megabatch.errors import UsageError, one_line
from megabatch.evaluation.config import read_config
from megabatch.evaluation.report import charts
from megabatch.evaluation.report.charts import series
from megabatch.evaluation.report.content import NAME, read
from megabatch.evaluation.run_folder import read_metrics, validated_on
from megabatch.evaluation.table import (
    CONTENDERS,
    OF_MODEL,
    Group,
    cell,
    direction,
    groups,
    left_out,
)

CURVES = {
    "loss": "loss",
    "lr": "learning rate",
    "grad_norm": "gradient norm",
    "logit_scale": "logit scale (1 / temperature)",
    "pairs_per_second": "pairs per second",
}
_VALIDATION = ("recall@1", "top1")  # figures of evaluations during the training that are drawn
# The page shows settings, the last logged step and the evaluation.
_FACTS = {
    "model": ("model", "{}"),
    "parameters": ("parameters", "{:,}"),
    "train_data": ("training data", "{}"),
    "global_batch_size": ("batch size", "{:,}"),
    "micro_batch_size": ("micro-batch size", "{:,}"),
    "loss": ("final loss", "{:.4f}"),
    "step": ("steps", "{:,}"),
    "epoch": ("epochs", "{:.4g}"),
    "samples": ("pairs seen", "{:,.0f}"),
    "seconds": ("training time", "{:,.0f} s"),
    "mean_pace": ("pairs per second", "{:,.0f}"),
    "weights": ("weights", "{}"),
    "evaluated_step": ("evaluated step", "{:,}"),
    "evaluation": ("evaluation", "{}"),
}


@dataclass
class Source:
    """Everything that is known about a run or an evaluated model, whatever of it exists.

    evaluation, content: of evaluation.json, {} if there is none, and of report.json. settings,
    config: the run's config.toml, as a dictionary and as text; empty without a run. records: the
    logged steps; validation: figures of evaluations during the training.
    """

    name: str
    evaluation: dict[str, Any]
    content: dict[str, Any]
    settings: dict[str, Any] = field(default_factory=dict)
    config: str = ""
    records: list[dict[str, Any]] = field(default_factory=list)
    validation: list[dict[str, Any]] = field(default_factory=list)

    @property
    def outdated(self) -> str:
        """A remark on the steps of the evaluation and of the log; "" if the run did not go on."""
        step = self.evaluation.get("run", {}).get("step")
        last = self.records[-1]["step"] if self.records else 0
        if not isinstance(step, int) or step >= last:
            return ""
        return f"evaluated at step {step:,}, trained to step {last:,}"


def read_source(folder: Path) -> Source:
    """Read a run's folder, or the folder that an evaluation was written to.

    Raises:
        UsageError: it is neither, or a file in it is damaged.
    """
    evaluation = read(folder / "evaluation.json", "run", "retrieval", "zero_shot")
    content = {"run": None, "tasks": [], "confusions": {}} | read(folder / NAME, "confusions")
    run = folder / str(content["run"] or ".") if evaluation else folder
    if not (run / "config.toml").is_file():
        run = folder
    if (run / "config.toml").is_file():
        text = (run / "config.toml").read_text(encoding="utf-8", errors="replace")
        logs = [read_metrics(run / f"{name}.jsonl") for name in ("metrics", "validation")]
        return Source(run.resolve().name, evaluation, content, read_config(run), text, *logs)
    if evaluation:
        return Source(str(evaluation["run"].get("model", folder.name)), evaluation, content)
    if not folder.is_dir():
        raise UsageError(f"{folder} is not a folder")
    raise UsageError(f"{folder} is not a run: it has neither config.toml nor evaluation.json")


def make_page(folders: Sequence[Path]) -> str:
    """The page of the run or evaluation in a folder, or of several, as HTML.

    All text that is inserted into it is escaped.

    Raises:
        UsageError: a folder has neither, or a file in it is damaged.
    """
    sources = [read_source(folder) for folder in folders]
    names = [source.name for source in sources]
    if len(set(names)) < len(names):
        names = [str(folder) for folder in folders]
    environment = Environment(
        loader=PackageLoader("megabatch.evaluation.report", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    several = len(sources) > 1
    try:
        found = [groups(source.evaluation) for source in sources]
        return environment.get_template("page.html").render(
            name=f"{len(sources)} runs compared" if several else names[0],
            names=names,
            sources=sources,
            several=several,
            facts=_by_run([_facts(source) for source in sources]),
            settings=_by_run([_settings(source) for source in sources], differ=True),
            curves=_curves(sources, names),
            tables=_tables(found),
            bars=[] if several else [_bars(group) for group in found[0]],
            colours=charts.COLOURS,
            contenders={CONTENDERS[key]: n for key, n in charts.OF_CONTENDER.items()},
            **{f.__name__: f for f in (cell, direction, left_out)},
            **{f.__name__: f for f in (charts.histogram_chart, charts.heat_map_chart)},
        )
    except (UndefinedError, KeyError, TypeError, ValueError) as error:
        where = ", ".join(map(str, folders))
        raise UsageError(
            f"{where}: a file of the evaluation is not as this version of megabatch writes it "
            f"({one_line(error, 200)}): evaluate again"
        ) from error


def _by_run(values: list[dict[str, str]], *, differ: bool = False) -> list[tuple[str, list[str]]]:
    """The runs' values under each name, all or those that differ."""
    names = dict.fromkeys(name for of_run in values for name in of_run)
    rows = [(name, [of_run.get(name, "–") for of_run in values]) for name in names]
    return [row for row in rows if not differ or len(set(row[1])) > 1]


def _facts(source: Source) -> dict[str, str]:
    evaluation = source.evaluation
    run, last = evaluation.get("run", {}), source.records[-1] if source.records else {}
    values = {**source.settings, **run, "step": None, **last, "evaluated_step": run.get("step")}
    with contextlib.suppress(KeyError, TypeError, ZeroDivisionError):
        values["mean_pace"] = last["samples"] / last["seconds"]  # of all steps
    if evaluation:
        how = f"{run.get('device')}, {run.get('precision')}"
        values["evaluation"] = f"{evaluation.get('seconds', 0):.0f} s on {how}"
    facts = {}
    for key, (term, form) in _FACTS.items():
        with contextlib.suppress(ValueError, TypeError):  # not a number, or none
            if values.get(key) is not None:
                facts[term] = form.format(values[key])
    return facts


def _settings(source: Source) -> dict[str, str]:
    """A run's settings, as texts, without its own folder."""
    return {
        key: value if isinstance(value, str) else json.dumps(value, default=str)
        for key, value in source.settings.items()
        if key != "output"
    }


def _curves(
    sources: Sequence[Source], names: Sequence[str]
) -> tuple[list[tuple[str, Markup]], list[str]]:
    """A chart for each quantity that any run logged, and lines about what is missing.

    Runs of different batch sizes are compared by the pairs that they have seen. Evaluations during
    the training on different data have curves of their own, whose titles then name the data.
    """
    batches = {source.settings.get("global_batch_size") for source in sources}
    logged = [source.records[-1] for source in sources if source.records]
    by_pairs = len(batches) > 1 and all("samples" in last for last in logged)
    x, label = ("samples", "pairs seen") if by_pairs else ("step", "step")
    curves = {t: ([series(s.records, key, x) for s in sources], label) for key, t in CURVES.items()}
    figures = {
        (key, validated_on(record)): None
        for source in sources
        for record in source.validation
        for key in record
        if key.endswith(_VALIDATION)
    }
    for key, data in figures:
        title = "validation: " + key.replace("/", ", ").replace("_", " ")
        if len({data for _, data in figures}) > 1:
            title += f", on {data or 'the default data'}"
        on_data = [[r for r in s.validation if validated_on(r) == data] for s in sources]
        curves[title] = [series(records, key) for records in on_data], "step"
    drawn, missing = [], []
    for title, (of_runs, label) in curves.items():
        present = {i: curve for i, curve in enumerate(of_runs) if len(curve)}
        if present:
            drawn.append((title, charts.curves_chart(title, present, label)))
        absent = [n for i, n in enumerate(names) if sources[i].records and i not in present]
        if absent:
            missing.append(f"Without {title} in the log: {', '.join(absent)}.")
    silent = [n for n, s in zip(names, sources, strict=True) if s.config and not s.records]
    if silent:
        missing.append(f"Without a log of training (metrics.jsonl): {', '.join(silent)}.")
    return drawn, missing


def _bars(group: Group) -> tuple[str, Markup]:
    """A chart of the contenders' recalls or accuracies, with its title."""
    title = f"{group.title}: {group.what}"
    recalls = [i for i, column in enumerate(group.columns) if column != "median rank"]
    complete = [i for i in recalls if all(row[i] is not None for row in group.rows.values())]
    ticks = [list(group.columns)[i] for i in complete]
    values = {name: [row[i] or 0.0 for i in complete] for name, row in group.rows.items()}
    return title, charts.bars_chart(title, ticks, values)


def _tables(found: Sequence[Sequence[Group]]) -> list[dict[str, Any]]:
    """A table for each task: all contenders of one run, or the models of several, the best marked.

    Runs are compared on equal data alone, which have equal headings.
    """
    several = len(found) > 1
    tables: dict[str, dict[str, Any]] = {}
    for run, of_run in enumerate(found):
        for group in of_run:
            new = {"heading": group.heading, "columns": list(group.columns), "rows": []}
            table = tables.setdefault(group.heading, new)
            table["rows"] += [
                {"run": run, "contender": name, "label": CONTENDERS[name], "values": values}
                for name, values in group.rows.items()
                if name in OF_MODEL or not several
            ]
    for table in tables.values():
        by_column = zip(*(row["values"] for row in table["rows"]), strict=True)
        best = list(map(_best, table["columns"], by_column))
        table["best"] = best if several else [None] * len(best)
    return list(tables.values())


def _best(column: str, values: Sequence[float | None]) -> float | None:
    """The best of several values, None if they do not differ."""
    known = {value for value in values if value is not None}
    best = min if column == "median rank" else max
    return best(known) if len(known) > 1 else None
