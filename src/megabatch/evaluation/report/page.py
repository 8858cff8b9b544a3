"""The page of one run or one evaluated model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from megabatch.evaluation.report.charts import (
    RUN_COLOURS,
    Bars,
    Series,
    bars_chart,
    curves_chart,
    heat_map_chart,
    histogram_chart,
    is_number,
    series,
)
from megabatch.evaluation.report.content import Point, TaskContent
from megabatch.evaluation.report.sources import Source, read_source
from megabatch.evaluation.run_folder import validated_on
from megabatch.evaluation.table import (
    ACCURACY,
    CONTENDERS,
    RETRIEVAL,
    WAYS,
    classification_groups,
    direction,
    left_out,
    retrieval_groups,
    zero_shot_groups,
)
from megabatch.evaluation.tasks import KS

CURVES = {
    "loss": "loss",
    "lr": "learning rate",
    "grad_norm": "gradient norm",
    "logit_scale": "logit scale (1 / temperature)",
    "pairs_per_second": "pairs per second",
}
_VALIDATION = ("recall@1", "top1")  # figures of evaluations during the training that are drawn
_TITLE_LENGTH = 24  # letters of a data set's name above a chart


def make_page(folder: Path) -> str:
    """The page of the run or evaluation in a folder, as HTML.

    Raises:
        UsageError: the folder has neither, or a file in it is damaged.
    """
    return render(read_source(folder))


def render(source: Source) -> str:
    """Render the page; all text that is inserted into it is escaped."""
    evaluation, tasks = source.evaluation, source.content.tasks if source.content else []
    curves = {
        title: curve
        for key, title in CURVES.items()
        if (curve := series(source.records, key)) is not None
    }
    for figure in validation_figures([source]):
        if (curve := figure.series(source)) is not None:
            curves[figure.title] = curve
    recall = _recall_panels(evaluation) if evaluation else []
    shown = {name for _, panel in recall for name in panel.values}
    return (
        templates()
        .get_template("page.html")
        .render(
            name=source.name,
            evaluation=evaluation,
            outdated=source.outdated,
            facts=_facts(source),
            recall=[(title, bars_chart(panel)) for title, panel in recall],
            contenders=[(key, label) for key, label in CONTENDERS.items() if key in shown],
            retrieval_columns=RETRIEVAL,
            accuracy_columns=ACCURACY,
            retrieval=retrieval_groups(evaluation) if evaluation else [],
            zero_shot=zero_shot_groups(evaluation) if evaluation else [],
            classification=classification_groups(evaluation),
            by_class=_by_class(evaluation),
            confusions=source.content.confusions if source.content else {},
            left_out=left_out,
            curves=[(title, curves_chart(title, {0: curve})) for title, curve in curves.items()],
            missing_curves=[title for title in CURVES.values() if title not in curves],
            tasks=tasks,
            histograms=[histogram_chart(task.histogram) for task in tasks],
            heat_maps=[heat_map_chart(task.heat_map) for task in tasks],
            config=source.config,
            short=_short,
            method_name=lambda method: CONTENDERS.get(method, method),
            way_name=_way_name,
            point_colour=_point_colour,
            cosine=lambda value: f"{round(value, 3) + 0.0:.3f}",  # no "-0.000"
            classes_coloured=_classes_coloured,
        )
    )


@dataclass(frozen=True)
class ValidationFigure:
    """A figure of evaluations during the training, on one set of data, and its curve's title."""

    key: str
    data: str | None
    title: str

    def series(self, source: Source) -> Series | None:
        """The run's curve; None if the run has no such figure."""
        on_data = [record for record in source.validation if validated_on(record) == self.data]
        return series(on_data, self.key)


def validation_figures(sources: Sequence[Source]) -> list[ValidationFigure]:
    """The figures of evaluations during the training that are drawn, of any of the runs.

    Figures on different data have curves of their own, whose titles then name the data.
    """
    found = dict.fromkeys(
        (key, validated_on(record))
        for source in sources
        for record in source.validation
        for key in record
        if key.endswith(_VALIDATION)
    )
    several = len({data for _, data in found}) > 1
    figures = []
    for key, data in found:
        title = "validation: " + key.replace("/", ", ").replace("_", " ")
        if several:
            title += f", on {data or 'the default data'}"
        figures.append(ValidationFigure(key, data, title))
    return figures


def templates() -> Environment:
    """The environment of the templates: all that is inserted is escaped, nothing is undefined."""
    return Environment(
        loader=PackageLoader("megabatch.evaluation.report", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def _by_class(evaluation: dict[str, Any]) -> list[tuple[str, list[tuple[str, str]]]]:
    """The classes of each zero-shot task, the worst first; of many, the first and last ten."""
    tables = []
    for task in evaluation.get("zero_shot", {}).values():
        recalls = sorted(task.get("recall_by_class", {}).items(), key=lambda item: item[1])
        rows = [(name, f"{100 * recall:.1f}%") for name, recall in recalls]
        if len(rows) > 20:
            rows = [*rows[:10], ("…", ""), *rows[-10:]]
        if rows:
            tables.append((task["title"], rows))
    return tables


def _facts(source: Source) -> list[tuple[str, str]]:
    settings, evaluation = source.settings, source.evaluation
    run = evaluation.get("run", {})
    model = run.get("model", settings.get("model", ""))
    if "parameters" in run:
        model = f"{model}, {run['parameters'] / 1e6:.1f} M parameters"
    facts = [("model", model), ("training data", settings.get("train_data", run.get("train_data")))]
    batch, micro_batch = (settings.get(f"{kind}_batch_size") for kind in ("global", "micro"))
    if isinstance(batch, int):
        of = f", micro-batches of {micro_batch:,}" if isinstance(micro_batch, int) else ""
        facts.append(("batch size", f"{batch:,}{of}"))
    if source.records:
        last = source.records[-1]
        for key, term, form in (
            ("loss", "final loss", "{:.4f}"),
            ("step", "steps", "{:,}"),
            ("epoch", "epochs", "{:.4g}"),
            ("samples", "pairs seen", "{:,.0f}"),
            ("seconds", "training time", "{:,.0f} s"),
        ):
            if is_number(last.get(key)):
                facts.append((term, form.format(last[key])))
    if evaluation:
        facts.append(("weights", run.get("weights")))
        if source.evaluated_step is not None:
            facts.append(("evaluated step", f"{source.evaluated_step:,}"))
        how = f"{run.get('device')}, {run.get('precision')}"
        facts.append(("evaluation", f"{evaluation.get('seconds', 0):.0f} s on {how}"))
    return [(term, str(value)) for term, value in facts if value]


def _recall_panels(evaluation: dict[str, Any]) -> list[tuple[str, Bars]]:
    """Image to text of every task, then the classification tasks, then text to image."""
    retrieval = evaluation["retrieval"].values()
    recalls = [f"recall@{k}" for k in KS]
    classed = [
        *((task, "zero-shot, top k") for task in evaluation["zero_shot"].values()),
        *((task, "trained, top k") for task in evaluation.get("classification", {}).values()),
    ]
    there, back = (
        [
            _panel(task, direction(task, way, "to"), [f"{way}/{r}" for r in recalls], KS)
            for task in retrieval
        ]
        for way in WAYS
    )
    return [*there, *(_panel(*task, ["top1", "top5"], (1, 5)) for task in classed), *back]


def _panel(
    task: dict[str, Any], subtitle: str, keys: list[str], ks: Sequence[int]
) -> tuple[str, Bars]:
    values = {
        name: [task[name][key] for key in keys]
        for name in CONTENDERS
        if keys[0] in task.get(name, {})
    }
    title = f"{_short(task['title'])}: {subtitle}"
    return title, Bars(title, [f"@{k}" for k in ks], values)


def _short(title: str) -> str:
    """A data set's title; of a long path the end, which is the most specific."""
    return title if len(title) <= _TITLE_LENGTH else "…" + title[1 - _TITLE_LENGTH :]


def _way_name(task: TaskContent, way: str) -> str:
    return direction({"first": task.first}, way, "→").capitalize()


def _classes_coloured(points: Sequence[Point]) -> bool:
    """Whether there are classes, and a colour for each."""
    groups = [point.group for point in points if point.group is not None]
    return bool(groups) and max(groups) < len(RUN_COLOURS)


def _point_colour(point: Point, by_class: bool) -> str:
    """The variable of a point's colour: by its class, or by its kind."""
    return RUN_COLOURS[point.group or 0] if by_class else RUN_COLOURS[int(point.second)]
