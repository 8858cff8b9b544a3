"""`report.html`: one file with everything in it, to look at a run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from PIL import Image

from megabatch.evaluation.charts import Bars, Chart, bars_chart, curves_chart
from megabatch.evaluation.gallery import Query, choose_queries
from megabatch.evaluation.metrics_log import read_metrics, series
from megabatch.evaluation.run_folder import write_atomically
from megabatch.evaluation.table import (
    CONTENDERS,
    WAYS,
    classification_groups,
    direction,
    left_out,
    retrieval_groups,
    zero_shot_groups,
)
from megabatch.evaluation.tasks import KS, Matched

_WIDEST = 24  # letters of a data set's name in a chart
_CURVES = {
    "loss": "loss",
    "lr": "learning rate",
    "pairs_per_second": "pairs per second",
    "logit_scale": "logit scale",
}


@dataclass(frozen=True)
class Gallery:
    """The queries shown of one task."""

    title: str
    shown_with: str
    examples: list[Query]
    failures: list[Query]


@dataclass(frozen=True)
class Shown:
    """What a gallery is drawn from; `picture_of` and `pictures_are` as a `Task` has them."""

    title: str
    matched: Matched
    picture_of: Callable[[str], tuple[Image.Image, bool] | None] | None = None
    pictures_are: str = "one of its evaluated images"


def write_report(
    folder: Path, evaluation: dict[str, Any], shown: Sequence[Shown], run: Path | None
) -> Path:
    """Write `folder/report.html` from the evaluation, the run's log and the tasks' features.

    `run`: the run's folder, None where a model is evaluated that is no run's.
    """
    html = render(
        name=evaluation["run"]["model"] if run is None else run.resolve().name,
        evaluation=evaluation,
        records=[] if run is None else read_metrics(run / "metrics.jsonl"),
        galleries=[_gallery(s) for s in shown],
        config="" if run is None else (run / "config.toml").read_text(encoding="utf-8"),
    )
    path = folder / "report.html"
    write_atomically(path, html)
    return path


def render(
    *,
    name: str,
    evaluation: dict[str, Any],
    records: list[dict[str, Any]],
    galleries: Sequence[Gallery],
    config: str,
) -> str:
    """The page as text; everything put into it is escaped."""
    environment = Environment(
        loader=PackageLoader("megabatch.evaluation", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("report.html").render(
        name=name,
        evaluation=evaluation,
        facts=_facts(evaluation, records),
        recall=_recall_chart(evaluation),
        retrieval=retrieval_groups(evaluation),
        zero_shot=zero_shot_groups(evaluation),
        classification=classification_groups(evaluation),
        by_class=_by_class(evaluation),
        left_out=left_out,
        curves=_training_curves(records),
        galleries=galleries,
        config=config,
    )


def _gallery(shown: Shown) -> Gallery:
    examples, failures = choose_queries(shown.matched, shown.picture_of, examples=8, failures=4)
    return Gallery(shown.title, shown.pictures_are, examples, failures)


def _by_class(evaluation: dict[str, Any]) -> list[tuple[str, list[tuple[str, str]]]]:
    """Of each zero-shot task its classes from the worst on; of many the first and last ten."""
    tables = []
    for task in evaluation["zero_shot"].values():
        recalls = sorted(task.get("recall_by_class", {}).items(), key=lambda item: item[1])
        rows = [(name, f"{100 * recall:.1f}%") for name, recall in recalls]
        if len(rows) > 20:
            rows = [*rows[:10], ("…", ""), *rows[-10:]]
        if rows:
            tables.append((task["title"], rows))
    return tables


def _facts(evaluation: dict[str, Any], records: list[dict[str, Any]]) -> list[tuple[str, str]]:
    run = evaluation["run"]
    facts = [
        ("model", f"{run['model']}, {run['parameters'] / 1e6:.1f} M parameters"),
        *([("training data", str(run["train_data"]))] if run["train_data"] else []),
        ("weights", run["weights"]),
        ("evaluation", f"{evaluation['seconds']:.0f} s on {run['device']}, {run['precision']}"),
    ]
    if records:
        last = records[-1]
        facts.append(("steps", f"{last['step']:,}"))
        for key, term, form in (
            ("epoch", "epochs", "{:.4g}"),
            ("samples", "pairs seen", "{:,.0f}"),
            ("seconds", "training time", "{:,.0f} s"),
            ("loss", "last loss", "{:.4f}"),
        ):
            if isinstance(last.get(key), int | float):
                facts.append((term, form.format(last[key])))
    return facts


def _training_curves(records: list[dict[str, Any]]) -> Chart | None:
    panels = [(title, series(records, key)) for key, title in _CURVES.items()]
    drawn = [(title, curve) for title, curve in panels if curve is not None]
    return curves_chart(drawn) if drawn else None


def _recall_chart(evaluation: dict[str, Any]) -> Chart:
    """Image to text of every task and the classification tasks first, text to image after them."""
    retrieval = evaluation["retrieval"].values()
    recalls = [f"recall@{k}" for k in KS]
    classed = [
        *((task, "zero-shot, top k") for task in evaluation["zero_shot"].values()),
        *((task, "trained, top k") for task in evaluation.get("classification", {}).values()),
    ]
    panels = [
        *(
            _panel(
                task, direction(task, WAYS[0], "to"), [f"image_to_text/{r}" for r in recalls], KS
            )
            for task in retrieval
        ),
        *(_panel(task, subtitle, ["top1", "top5"], (1, 5)) for task, subtitle in classed),
        *(
            _panel(
                task, direction(task, WAYS[1], "to"), [f"text_to_image/{r}" for r in recalls], KS
            )
            for task in retrieval
        ),
    ]
    return bars_chart(panels, columns=len(retrieval) + len(classed))


def _panel(task: dict[str, Any], subtitle: str, keys: list[str], ks: Sequence[int]) -> Bars:
    values = {
        name: [task[name][key] for key in keys]
        for name in CONTENDERS
        if keys[0] in task.get(name, {})
    }
    title = task["title"]
    if len(title) > _WIDEST:  # a path, whose end tells most
        title = "…" + title[1 - _WIDEST :]
    return Bars(f"{title}: {subtitle}", [f"@{k}" for k in ks], values)
