"""The report's charts as SVG that is part of the page and takes its colours.

They contain numbers and words of our own alone. Captions and the names of classes, data and runs
stand around them, in HTML that the templates escape.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from markupsafe import Markup
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, MaxNLocator

from megabatch.evaluation.report.content import HeatMap, Histogram

# Matplotlib draws in these colours, which then become variables of the page's style: that has a
# value for each on a light and on a dark page.
_COLOURS = {
    "--ink": "#1f2328",
    "--line": "#d5d9de",
    "--page": "#fffffe",
    "--model": "#2166ac",
    "--neighbours": "#1b7837",
    "--probe": "#762a83",
    "--baseline": "#e08214",
    "--chance": "#7f7f7f",
    "--run-1": "#2166ad",
    "--run-2": "#d95f02",
    "--run-3": "#1b7838",
    "--run-4": "#762a84",
    "--run-5": "#b2182b",
    "--run-6": "#01857c",
    "--run-7": "#8c6d00",
    "--run-8": "#636363",
    "--run-9": "#c51b8a",
    "--run-10": "#5e4fa2",
}
RUN_COLOURS = [name for name in _COLOURS if name.startswith("--run-")]
_DASHES = ("-", "--", ":", "-.")  # of the first ten runs, the next ten ...
# Bars must differ without colour, too. (A hatch of dots would be 60 kB of paths for each chart.)
_HATCHES = {"model": "", "neighbours": "\\\\", "probe": "xx", "baseline": "//", "chance": "--"}

_SIZE = (4.0, 2.5)  # inches; the page has one to three charts in a row
_MOST_POINTS = 600  # about two for each pixel of a curve's width


@dataclass(frozen=True)
class Chart:
    """A chart as an `<svg>` element, with a description of its content."""

    svg: Markup
    alt: str


@dataclass(frozen=True)
class Bars:
    """A panel of the comparison: by contender, a figure for each tick."""

    title: str
    ticks: Sequence[str]
    values: Mapping[str, Sequence[float]]


@dataclass(frozen=True)
class Series:
    """A curve over steps; where points were averaged, `low` and `high` are their bounds."""

    steps: np.ndarray
    values: np.ndarray
    low: np.ndarray | None = None
    high: np.ndarray | None = None


def series(records: list[dict[str, Any]], key: str, x: str = "step") -> Series | None:
    """The curve of one logged quantity over another; None if it has no finite value."""
    points = [(r[x], r[key]) for r in records if is_number(r.get(x)) and is_number(r.get(key))]
    if not points:
        return None
    steps, values = (np.array(column, dtype=np.float64) for column in zip(*points, strict=True))
    if len(steps) <= _MOST_POINTS:
        return Series(steps, values)
    parts = np.array_split(values, _MOST_POINTS)
    return Series(
        steps=np.array([p.mean() for p in np.array_split(steps, _MOST_POINTS)]),
        values=np.array([p.mean() for p in parts]),
        low=np.array([p.min() for p in parts]),
        high=np.array([p.max() for p in parts]),
    )


def is_number(value: Any) -> bool:
    """Whether a logged value is a finite number."""
    return isinstance(value, int | float) and bool(np.isfinite(value))


def curves_chart(title: str, curves: Mapping[int, Series], x_label: str = "step") -> Chart:
    """Draw a quantity's curves in one panel, each by the number of its run, whose colour it has."""

    def draw(ax: Axes) -> None:
        for number, curve in curves.items():
            colour = _COLOURS[RUN_COLOURS[number % len(RUN_COLOURS)]]
            dash = _DASHES[number // len(RUN_COLOURS) % len(_DASHES)]
            marker = "o" if len(curve.steps) == 1 else None
            ax.plot(curve.steps, curve.values, dash, color=colour, lw=1.4, marker=marker)
            if curve.low is not None and curve.high is not None:
                ax.fill_between(curve.steps, curve.low, curve.high, color=colour, alpha=0.2, lw=0)
        ax.set_xlabel(x_label)
        ax.margins(x=0.01)
        ax.xaxis.set_major_locator(MaxNLocator(nbins="auto", steps=[1, 2, 5, 10], integer=True))
        ax.xaxis.set_major_formatter(EngFormatter(sep=""))
        if title.startswith("pairs per second"):
            ax.set_ylim(bottom=0)
            ax.yaxis.set_major_formatter(EngFormatter(sep=""))

    ranges = [f"from {s.values[0]:.4g} to {s.values[-1]:.4g}" for s in curves.values()]
    return _chart(draw, f"{title}, {'; '.join(ranges)}")


def bars_chart(panel: Bars) -> Chart:
    """Draw the recall of all contenders side by side."""

    def draw(ax: Axes) -> None:
        width = 0.82 / len(panel.values)
        positions = np.arange(len(panel.ticks))
        for i, (name, values) in enumerate(panel.values.items()):
            bars = ax.bar(
                positions + (i - (len(panel.values) - 1) / 2) * width,
                [100 * v for v in values],
                width * 0.94,
                color=_COLOURS[f"--{name}"],
                hatch=_HATCHES[name],
            )
            ax.bar_label(bars, [percent(v) for v in values], fontsize=7.5, padding=1)
        ax.set_xticks(positions, panel.ticks)
        ax.set_xlim(-0.55, len(panel.ticks) - 0.45)
        ax.set_ylim(0, 108)
        ax.set_yticks(range(0, 101, 20))
        ax.set_ylabel("%")
        ax.grid(axis="x", visible=False)

    first = next(iter(panel.values.values()))
    shown = [f"{t} {100 * v:.1f}%" for t, v in zip(panel.ticks, first, strict=True)]
    return _chart(draw, f"{panel.title}: {', '.join(shown)}")


def histogram_chart(histogram: Histogram) -> Chart:
    """Draw the shares of positives and negatives in each bin of cosines."""

    def draw(ax: Axes) -> None:
        edges = np.linspace(histogram.low, histogram.high, len(histogram.positives) + 1)
        for name, counts in (("chance", histogram.negatives), ("model", histogram.positives)):
            if total := sum(counts):
                shares = 100 * np.array(counts) / total
                ax.stairs(shares, edges, fill=True, color=_COLOURS[f"--{name}"], alpha=0.35)
                ax.stairs(shares, edges, color=_COLOURS[f"--{name}"])
        ax.set_xlabel("cosine")
        ax.set_ylabel("% of pairs")

    return _chart(
        draw,
        f"cosines of positives, {histogram.mean_positive:.3f} on average, "
        f"and of negatives, {histogram.mean_negative:.3f}",
    )


def heat_map_chart(heat_map: HeatMap) -> Chart:
    """Draw a matrix of cosines, whose diagonal has the positives."""

    def draw(ax: Axes) -> None:
        drawn = ax.imshow(heat_map.cosines, cmap="viridis", interpolation="none")
        # The usual ticks depend on the bar's length: the layout could leave no room for the label.
        bar = ax.figure.colorbar(drawn, ax=ax, label="cosine", ticks=MaxNLocator(6))
        bar.outline.set_visible(False)
        ax.grid(visible=False)
        ax.set_xlabel("text")
        ax.set_ylabel("query")

    n = len(heat_map.texts)
    return _chart(draw, f"cosines of {n} queries with {n} texts")


def percent(value: float) -> str:
    """A fraction in percent, without the sign, with enough digits to tell a small one from 0."""
    hundredths = 100 * value
    if hundredths == 0 or hundredths >= 9.95:
        return f"{hundredths:.0f}"
    return f"{hundredths:.1f}" if hundredths >= 0.95 else f"{hundredths:.2f}"


def _chart(draw: Callable[[Axes], None], alt: str) -> Chart:
    ink, line = _COLOURS["--ink"], _COLOURS["--line"]
    style: dict[Any, Any] = {
        "font.family": "DejaVu Sans",  # for the layout; the page replaces it
        "font.size": 9,
        "axes.edgecolor": line,
        "axes.grid": True,
        "axes.axisbelow": True,
        "axes.facecolor": "none",
        "axes.spines.top": False,
        "axes.spines.right": False,
        "grid.color": line,
        "grid.linewidth": 0.5,
        "hatch.color": _COLOURS["--page"],
        "hatch.linewidth": 0.8,
        "svg.fonttype": "none",  # text as text, a fraction of its size as paths
        "svg.hashsalt": alt,  # ids differ between the charts of a page, and not between runs
        **dict.fromkeys(("text.color", "axes.labelcolor", "xtick.color", "ytick.color"), ink),
    }
    with rc_context(style):
        figure = Figure(figsize=_SIZE, layout="constrained")
        draw(figure.add_subplot())
        buffer = io.StringIO()
        nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        figure.savefig(buffer, format="svg", transparent=True, metadata=nothing)
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<style.*?</style>", "", svg, flags=re.DOTALL)  # it would hold for all the page
    for variable, colour in _COLOURS.items():
        svg = svg.replace(colour, f"var({variable})")
    return Chart(Markup(svg), alt)
