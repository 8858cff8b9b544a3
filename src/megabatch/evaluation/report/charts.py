"""The report's charts as SVG that is part of the page and takes its colours.

They contain numbers and words of our own alone. Captions and the names of classes, data and runs
stand around them, in HTML that the template escapes.
"""

from __future__ import annotations

import io
import re
from collections.abc import Mapping
from typing import Any

import numpy as np
from markupsafe import Markup
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, MaxNLocator
from numpy.typing import NDArray

# The page's colours in light and in dark mode. Matplotlib draws in the light ones, each of which
# then becomes the page's variable; so no two may be equal.
COLOURS = {
    "ink": ("#1f2328", "#e6e6e6"),
    "line": ("#d5d9de", "#444b54"),
    "page": ("#fffffe", "#14171b"),
    "c0": ("#2166ac", "#6baed6"),
    "c1": ("#d95f02", "#fdae61"),
    "c2": ("#1b7837", "#7fbf7b"),
    "c3": ("#762a83", "#c2a5cf"),
    "c4": ("#b2182b", "#f4827a"),
    "c5": ("#01857c", "#5cc8bf"),
    "c6": ("#8c6d00", "#e0c558"),
    "c7": ("#737373", "#b8b8b8"),
    "c8": ("#c51b8a", "#f48fc4"),
    "c9": ("#5e4fa2", "#a99be0"),
}
OF_CONTENDER = {"model": 0, "neighbours": 2, "probe": 3, "baseline": 1, "chance": 7}
# Bars must differ without colour, too. (A hatch of dots would be 60 kB of paths for each chart.)
_HATCHES = {"model": "", "neighbours": "\\\\", "probe": "xx", "baseline": "//", "chance": "--"}
_DASHES = ("-", "--", ":", "-.")  # of the first ten runs, the next ten ...
_MOST_POINTS = 600  # about two for each pixel of a curve's width
_INK, _LINE = COLOURS["ink"][0], COLOURS["line"][0]
_STYLE: dict[Any, Any] = {
    "font.family": "DejaVu Sans",  # for the layout; the page replaces it
    "font.size": 9,
    "axes.edgecolor": _LINE,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.facecolor": "none",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "grid.color": _LINE,
    "grid.linewidth": 0.5,
    "hatch.color": COLOURS["page"][0],
    "hatch.linewidth": 0.8,
    "svg.fonttype": "none",  # text as text, a fraction of its size as paths
    **dict.fromkeys(("text.color", "axes.labelcolor", "xtick.color", "ytick.color"), _INK),
}


def colour(number: int) -> str:
    """The light colour of a run, a contender or a class."""
    return COLOURS[f"c{number % 10}"][0]


def series(records: list[dict[str, Any]], key: str, x: str = "step") -> NDArray[np.float64]:
    """The curve of one logged quantity over another, float64 (points, 4).

    Columns: x, the quantity, and its lowest and highest value where points were averaged. Values
    that are no finite numbers are left out.
    """
    points = [(r[x], r[key]) for r in records if is_number(r.get(x)) and is_number(r.get(key))]
    parts = np.array_split(np.array(points, dtype=np.float64).reshape(-1, 2), _MOST_POINTS)
    return np.array([(*p.mean(0), p[:, 1].min(), p[:, 1].max()) for p in parts if len(p)])


def is_number(value: Any) -> bool:
    """Whether a logged value is a finite number."""
    return isinstance(value, int | float) and bool(np.isfinite(value))


@rc_context(_STYLE)
def curves_chart(title: str, curves: Mapping[int, Any], x_label: str = "step") -> Markup:
    """Draw a quantity's curves in one panel, each by the number of its run, whose colour it has."""
    ax = _axes()
    for number, curve in curves.items():
        x, values, low, high = curve.T
        style: dict[str, Any] = {
            "color": colour(number),
            "marker": "o" if len(x) == 1 else None,
            "lw": 1.4,
        }
        ax.plot(x, values, _DASHES[number // 10 % len(_DASHES)], **style)
        if (high > low).any():
            ax.fill_between(x, low, high, color=colour(number), alpha=0.2, lw=0)
    ax.set_xlabel(x_label)
    ax.margins(x=0.01)
    ax.xaxis.set_major_locator(MaxNLocator(steps=[1, 2, 5, 10], integer=True))
    ax.xaxis.set_major_formatter(EngFormatter(sep=""))
    if title.startswith("pairs per second"):
        ax.set_ylim(bottom=0)
        ax.yaxis.set_major_formatter(EngFormatter(sep=""))
    ranges = [f"from {c[0, 1]:.4g} to {c[-1, 1]:.4g}" for c in curves.values()]
    return _svg(ax, f"{title}, {'; '.join(ranges)}")


@rc_context(_STYLE)
def bars_chart(title: str, ticks: list[str], values: Mapping[str, list[float]]) -> Markup:
    """Draw the figures of all contenders side by side, for each tick."""
    ax, width = _axes(), 0.82 / len(values)
    for i, (name, of_contender) in enumerate(values.items()):
        bars = ax.bar(
            np.arange(len(ticks)) + (i - (len(values) - 1) / 2) * width,
            [100 * value for value in of_contender],
            width * 0.94,
            color=colour(OF_CONTENDER[name]),
            hatch=_HATCHES[name],
        )
        ax.bar_label(bars, [percent(value) for value in of_contender], fontsize=7.5, padding=1)
    ax.set_xticks(range(len(ticks)), ticks)
    ax.set_xlim(-0.55, len(ticks) - 0.45)
    ax.set_ylim(0, 108)
    ax.set_yticks(range(0, 101, 20))
    ax.set_ylabel("%")
    ax.grid(axis="x", visible=False)
    first = zip(ticks, next(iter(values.values())), strict=True)
    return _svg(ax, f"{title}: {', '.join(f'{t} {100 * v:.1f}%' for t, v in first)}")


@rc_context(_STYLE)
def histogram_chart(histogram: dict[str, Any]) -> Markup:
    """Draw the shares of positives and negatives in each bin of cosines."""
    ax = _axes()
    edges = np.linspace(histogram["low"], histogram["high"], len(histogram["positives"]) + 1)
    for number, kind in ((7, "negatives"), (0, "positives")):
        if total := sum(histogram[kind]):
            shares = 100 * np.array(histogram[kind]) / total
            ax.stairs(shares, edges, fill=True, color=colour(number), alpha=0.35)
            ax.stairs(shares, edges, color=colour(number))
    ax.set_xlabel("cosine")
    ax.set_ylabel("% of pairs")
    means = histogram["mean_positive"], histogram["mean_negative"]
    return _svg(
        ax, "cosines of positives, {:.3f} on average, and of negatives, {:.3f}".format(*means)
    )


@rc_context(_STYLE)
def heat_map_chart(heat_map: dict[str, Any]) -> Markup:
    """Draw a matrix of cosines, whose diagonal has the positives."""
    ax = _axes()
    drawn = ax.imshow(heat_map["cosines"], cmap="viridis", interpolation="none")
    # The usual ticks depend on the bar's length: the layout could leave no room for the label.
    bar = ax.figure.colorbar(drawn, ax=ax, label="cosine", ticks=MaxNLocator(6))
    bar.outline.set_visible(False)
    ax.grid(visible=False)
    ax.set_xlabel("text")
    ax.set_ylabel("query")
    n = len(heat_map["texts"])
    return _svg(ax, f"cosines of {n} queries with {n} texts")


def percent(value: float) -> str:
    """A fraction in percent, without the sign, with enough digits to tell a small one from 0."""
    hundredths = 100 * value
    if hundredths == 0 or hundredths >= 9.95:
        return f"{hundredths:.0f}"
    return f"{hundredths:.1f}" if hundredths >= 0.95 else f"{hundredths:.2f}"


def _axes() -> Axes:
    """One panel; the page has one to three of them in a row."""
    return Figure(figsize=(4.0, 2.5), layout="constrained").add_subplot()


def _svg(ax: Axes, alt: str) -> Markup:
    """The chart as an `<svg>` element, with a description of its content."""
    buffer, figure = io.StringIO(), ax.figure
    assert isinstance(figure, Figure)  # not a part of one
    # With this salt, ids differ between the charts of a page, and not between runs.
    with rc_context({"svg.hashsalt": alt}):
        nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        figure.savefig(buffer, format="svg", transparent=True, metadata=nothing)
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<style.*?</style>", "", svg, flags=re.DOTALL)  # it would hold for all the page
    for name, (light, _) in COLOURS.items():
        svg = svg.replace(light, f"var(--{name})")
    return Markup('<div role="img" aria-label="{}">{}</div>').format(alt, Markup(svg))
