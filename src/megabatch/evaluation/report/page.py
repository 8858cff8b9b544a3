"""The page of one run or evaluated model, or of several that it compares.

Its charts are SVG within the page, with numbers and words of our own alone. Captions and the names
of classes, data and runs stand around them, in HTML that the template escapes.
"""

from __future__ import annotations

import io
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import Environment, PackageLoader, StrictUndefined, UndefinedError
from markupsafe import Markup
from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, MaxNLocator
from numpy.typing import NDArray

from megabatch.errors import UsageError, one_line
from megabatch.evaluation.config import read_config
from megabatch.evaluation.report.content import NAME
from megabatch.evaluation.run_folder import read_metrics, validated_on
from megabatch.evaluation.table import cell, direction, entries_of, groups, left_out

#: Of runs, on a light and on a dark page alike.
COLOURS = (
    *("#3583c6", "#e07b39", "#3fa35b", "#a06cc5", "#d9534f"),
    *("#2aa198", "#b58900", "#808080", "#d4569f", "#7a7fd6"),
)
CURVES = {
    "loss": "loss",
    "lr": "learning rate",
    "grad_norm": "gradient norm",
    "logit_scale": "logit scale (1 / temperature)",
    "pairs_per_second": "pairs per second",
}
_VALIDATION = ("recall@1", "top1")  # figures of evaluations during the training that are drawn
_INK = "#010203"  # becomes the page's colour of text
_STYLE: dict[Any, Any] = {
    "font.family": "DejaVu Sans",  # for the layout; the page replaces it
    "font.size": 9,
    "axes.edgecolor": "#808080",
    "axes.grid": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "grid.color": "#808080",
    "grid.alpha": 0.3,
    "path.simplify_threshold": 1.0,  # pixels: a curve of any length takes 26 kB
    "svg.fonttype": "none",  # text as text, a fraction of its size as paths
    **dict.fromkeys(("text.color", "axes.labelcolor", "xtick.color", "ytick.color"), _INK),
}


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
        sources = [_read(folder) for folder in folders]
        names = [folder.resolve().name for folder in folders]
        if len(set(names)) < len(names):
            names = [str(folder) for folder in folders]
        return environment.get_template("page.html").render(
            name=f"{len(sources)} runs compared" if several else names[0],
            names=names,
            sources=sources,
            facts=_by_run([source["facts"] for source in sources]),
            settings=_by_run([source["settings"] for source in sources], differ=several),
            curves=_curves(sources),
            tables=_tables([source["evaluation"] for source in sources]),
            **{f.__name__: f for f in (cell, colour, direction, entries_of, left_out)},
        )
    except (UndefinedError, LookupError, TypeError, ValueError, AttributeError) as error:
        where = ", ".join(map(str, folders))
        raise UsageError(
            f"{where}: evaluation.json or report.json is not as this version of megabatch eval "
            f"writes it ({one_line(error, 200)}): evaluate again, or remove it"
        ) from error


def _read(folder: Path) -> dict[str, Any]:
    """The content of the files of a run, or of an evaluated model, as far as it has them.

    evaluation, content: of evaluation.json and report.json. settings: of config.toml. records: the
    logged steps; validation: figures of evaluations during the training. facts: about the evaluated
    model, and the last logged step.
    """
    evaluation, content = (
        dict(json.loads(path.read_text(encoding="utf-8"))) if path.is_file() else {}
        for path in (folder / "evaluation.json", folder / NAME)
    )
    settings = {}
    if (folder / "config.toml").is_file():
        settings = {**read_config(folder), "output": None}  # its own folder
    elif not evaluation:
        raise UsageError(f"{folder} is not a run: it has neither config.toml nor evaluation.json")
    records = read_metrics(folder / "metrics.jsonl")
    run = evaluation.get("run", {})
    facts = {**run, "evaluated_step": run.get("step"), "date": evaluation.get("date")}
    return {
        "evaluation": evaluation,
        "content": {"tasks": [], **content},
        "settings": settings,
        "records": records,
        "validation": read_metrics(folder / "validation.jsonl"),
        "facts": {**facts, "step": None, **(records[-1] if records else {})},
    }


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


def _tables(evaluations: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """A table for each task: all contenders of one run, or of several runs all but chance.

    Runs are compared on equal data alone, which have equal headings.
    """
    tables: dict[str, dict[str, Any]] = {}
    for run, evaluation in enumerate(evaluations):
        for group in groups(evaluation) if evaluation else ():
            new = {"heading": group.heading, "columns": list(group.columns), "rows": []}
            tables.setdefault(group.heading, new)["rows"] += [
                {"run": run, "contender": name, "figures": figures}
                for name, figures in group.rows.items()
                if len(evaluations) == 1 or name != "chance"
            ]
    return list(tables.values())


# Curves.


def _curves(sources: Sequence[dict[str, Any]]) -> list[tuple[str, Markup]]:
    """A chart with a title for each quantity that any run logged several times.

    Runs are compared by the pairs that they have seen, since their batch sizes may differ.
    Evaluations during the training on different data have curves of their own.
    """
    x, label = ("samples", "pairs seen") if len(sources) > 1 else ("step", "step")
    found = [
        (title, label, [series(source["records"], key, x) for source in sources])
        for key, title in CURVES.items()
    ]
    logs = [source["validation"] for source in sources]
    keys = {(k, validated_on(r)) for log in logs for r in log for k in r if k.endswith(_VALIDATION)}
    for key, data in sorted(keys, key=str):
        title = f"validation: {key.replace('/', ', ').replace('_', ' ')}"
        title += f", on {data}" if data else ""
        on_data = [[r for r in log if validated_on(r) == data] for log in logs]
        found.append((title, "step", [series(records, key) for records in on_data]))
    charts = []
    for title, label, curves in found:
        if logged := {run: curve for run, curve in enumerate(curves) if len(curve) > 1}:
            charts.append((title, curves_chart(title, logged, label)))
    return charts


def series(records: list[dict[str, Any]], key: str, x: str = "step") -> NDArray[np.float64]:
    """The curve of one logged quantity over another, float64 (points, 2).

    Values that are no finite numbers are left out.
    """
    points = np.array([(r.get(x), r.get(key)) for r in records], dtype=np.float64).reshape(-1, 2)
    return points[np.isfinite(points).all(1)]


def colour(run: int) -> str:
    """The colour of a run, by its number."""
    return COLOURS[run % len(COLOURS)]


@rc_context(_STYLE)
def curves_chart(title: str, curves: Mapping[int, Any], x_label: str) -> Markup:
    """Draw a quantity's curves, each by the number of its run, whose colour it has, as `<svg>`."""
    figure = Figure(figsize=(4.0, 2.5), layout="constrained")  # one to three in a row of the page
    ax = figure.add_subplot()
    for run, curve in curves.items():
        ax.plot(*curve.T, color=colour(run), lw=1.4)
    ax.set_xlabel(x_label)
    ax.margins(x=0.01)
    ax.xaxis.set_major_locator(MaxNLocator(steps=[1, 2, 5, 10], integer=True))
    ax.xaxis.set_major_formatter(EngFormatter(sep=""))
    ranges = [f"from {curve[0, 1]:.4g} to {curve[-1, 1]:.4g}" for curve in curves.values()]
    alt = f"{title}, {'; '.join(ranges)}"
    buffer = io.StringIO()
    # With this salt, ids differ between the charts of a page, and not between pages.
    with rc_context({"svg.hashsalt": alt}):
        nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        figure.savefig(buffer, format="svg", transparent=True, metadata=nothing)
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :].replace(_INK, "currentColor")
    svg = re.sub(r"<style.*?</style>", "", svg, flags=re.DOTALL)  # it would hold for all the page
    return Markup('<div role="img" aria-label="{}">{}</div>').format(alt, Markup(svg))
