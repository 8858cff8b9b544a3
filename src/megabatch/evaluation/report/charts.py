"""The report's curves as SVG that is part of the page.

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
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, MaxNLocator
from numpy.typing import NDArray

#: Of runs, on a light and on a dark page alike.
COLOURS = (
    *("#3583c6", "#e07b39", "#3fa35b", "#a06cc5", "#d9534f"),
    *("#2aa198", "#b58900", "#808080", "#d4569f", "#7a7fd6"),
)
_MOST_POINTS = 600  # about two for each pixel of a curve's width
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
    "svg.fonttype": "none",  # text as text, a fraction of its size as paths
    **dict.fromkeys(("text.color", "axes.labelcolor", "xtick.color", "ytick.color"), _INK),
}


def colour(run: int) -> str:
    """The colour of a run, by its number."""
    return COLOURS[run % len(COLOURS)]


def series(records: list[dict[str, Any]], key: str, x: str = "step") -> NDArray[np.float64]:
    """The curve of one logged quantity over another, float64 (points, 4).

    Columns: x, the quantity, and its lowest and highest value where points were averaged. Values
    that are no finite numbers are left out.
    """
    points = [(r[x], r[key]) for r in records if _is_number(r.get(x)) and _is_number(r.get(key))]
    parts = np.array_split(np.array(points, dtype=np.float64).reshape(-1, 2), _MOST_POINTS)
    return np.array([(*p.mean(0), p[:, 1].min(), p[:, 1].max()) for p in parts if len(p)])


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and bool(np.isfinite(value))


@rc_context(_STYLE)
def curves_chart(title: str, curves: Mapping[int, Any], x_label: str) -> Markup:
    """Draw a quantity's curves, each by the number of its run, whose colour it has, as `<svg>`."""
    figure = Figure(figsize=(4.0, 2.5), layout="constrained")  # one to three in a row of the page
    ax = figure.add_subplot()
    for run, curve in curves.items():
        x, values, low, high = curve.T
        ax.plot(x, values, color=colour(run), lw=1.4)
        ax.fill_between(x, low, high, color=colour(run), alpha=0.2, lw=0)
    ax.set_xlabel(x_label)
    ax.margins(x=0.01)
    ax.xaxis.set_major_locator(MaxNLocator(steps=[1, 2, 5, 10], integer=True))
    ax.xaxis.set_major_formatter(EngFormatter(sep=""))
    ranges = [f"from {c[0, 1]:.4g} to {c[-1, 1]:.4g}" for c in curves.values()]
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
