"""The report's charts: each drawn for a light and for a dark page, as SVG in a data URI."""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from megabatch.evaluation.table import CONTENDERS

_INK = {"light": "#1f2328", "dark": "#e6e6e6"}
_FAINT = {"light": "#d5d9de", "dark": "#444b54"}
_COLOURS = {
    "light": {
        "model": "#2166ac",
        "neighbours": "#1b7837",
        "probe": "#762a83",
        "baseline": "#e08214",
        "chance": "#7f7f7f",
    },
    "dark": {
        "model": "#6baed6",
        "neighbours": "#7fbf7b",
        "probe": "#c2a5cf",
        "baseline": "#fdae61",
        "chance": "#a6a6a6",
    },
}
# Bars must differ without colour, too.
_HATCHES = {"model": "", "neighbours": "\\\\", "probe": "xx", "baseline": "//", "chance": ".."}


_MOST_POINTS = 600  # about two for each pixel of a curve's width


@dataclass(frozen=True)
class Chart:
    """A chart as two data URIs, with its content in words."""

    light: str
    dark: str
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


def series(records: list[dict[str, Any]], key: str) -> Series | None:
    """The curve of one logged quantity; None if it has no finite value."""
    points = [(r["step"], r[key]) for r in records if isinstance(r.get(key), int | float)]
    points = [(step, value) for step, value in points if np.isfinite(value)]
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


def curves_chart(panels: Sequence[tuple[str, Series]]) -> Chart:
    """Draw titled curves over training steps, two per row."""

    def draw(figure: Figure, theme: str) -> None:
        for ax, (title, curve) in zip(_grid(figure, len(panels), 2), panels, strict=True):
            _draw_curve(ax, title, curve, _COLOURS[theme]["model"])

    alt = "Over training steps: " + "; ".join(
        f"{title}, from {s.values[0]:.4g} to {s.values[-1]:.4g}" for title, s in panels
    )
    return _chart(draw, (9.6, 2.5 * -(-len(panels) // 2)), alt)


def bars_chart(panels: Sequence[Bars], *, columns: int) -> Chart:
    """Draw the recall of all contenders side by side, a panel per task and direction."""
    rows = -(-len(panels) // columns)

    def draw(figure: Figure, theme: str) -> None:
        for ax, panel in zip(_grid(figure, len(panels), columns), panels, strict=True):
            _draw_bars(ax, panel, _COLOURS[theme])
        shown = {
            label: handle
            for ax in figure.axes
            for handle, label in zip(*ax.get_legend_handles_labels(), strict=True)
        }
        figure.legend(shown.values(), shown.keys(), loc="outside lower center", ncols=5)

    alt = "; ".join(
        f"{p.title}: "
        + ", ".join(
            f"{t} {100 * v:.1f}%"
            for t, v in zip(p.ticks, next(iter(p.values.values())), strict=True)
        )
        for p in panels
    )
    return _chart(draw, (9.6, 0.4 + 2.4 * rows), alt)


def _grid(figure: Figure, n: int, columns: int) -> list[Axes]:
    """The first n panels of a grid, whose last row may not be full."""
    axes = list(figure.subplots(-(-n // columns), columns, squeeze=False).flat)
    for ax in axes[n:]:
        ax.remove()
    return axes[:n]


def _draw_curve(ax: Axes, title: str, series: Series, colour: str) -> None:
    ax.plot(series.steps, series.values, color=colour, linewidth=1.4)
    if len(series.steps) == 1:
        ax.plot(series.steps, series.values, "o", color=colour)
    if series.low is not None and series.high is not None:
        ax.fill_between(series.steps, series.low, series.high, color=colour, alpha=0.2, lw=0)
    ax.set_title(title)
    ax.set_xlabel("step")
    ax.margins(x=0.01)
    if title.startswith("pairs per second"):
        ax.set_ylim(bottom=0)


def _draw_bars(ax: Axes, panel: Bars, colours: dict[str, str]) -> None:
    shown = panel.values
    width = 0.82 / len(shown)
    positions = np.arange(len(panel.ticks))
    for i, (name, values) in enumerate(shown.items()):
        bars = ax.bar(
            positions + (i - (len(shown) - 1) / 2) * width,
            [100 * v for v in values],
            width * 0.94,
            color=colours[name],
            hatch=_HATCHES[name],
            label=CONTENDERS[name],
        )
        ax.bar_label(bars, [percent(v) for v in values], fontsize=7.5, padding=1)
    ax.set_title(panel.title)
    ax.set_xticks(positions, panel.ticks)
    ax.set_xlim(-0.55, len(panel.ticks) - 0.45)
    ax.set_ylim(0, 108)
    ax.set_yticks(range(0, 101, 20))
    ax.set_ylabel("%")


def percent(value: float) -> str:
    """A fraction in percent, without the sign, with enough digits to tell a small one from 0."""
    hundredths = 100 * value
    if hundredths == 0 or hundredths >= 9.95:
        return f"{hundredths:.0f}"
    return f"{hundredths:.1f}" if hundredths >= 0.95 else f"{hundredths:.2f}"


def _chart(draw: Callable[[Figure, str], None], size: tuple[float, float], alt: str) -> Chart:
    return Chart(_svg(draw, size, "light"), _svg(draw, size, "dark"), alt)


def _svg(draw: Callable[[Figure, str], None], size: tuple[float, float], theme: str) -> str:
    ink, faint = _INK[theme], _FAINT[theme]
    style: dict[Any, Any] = {
        "font.size": 9,
        "axes.titlesize": 10,
        "axes.edgecolor": faint,
        "axes.grid": True,
        "axes.axisbelow": True,
        "axes.facecolor": "none",
        "axes.spines.top": False,
        "axes.spines.right": False,
        "grid.color": faint,
        "grid.linewidth": 0.5,
        "figure.constrained_layout.h_pad": 0.1,
        "hatch.linewidth": 0.6,
        "legend.frameon": False,
        "svg.hashsalt": "megabatch",
        **dict.fromkeys(
            ("text.color", "axes.labelcolor", "axes.titlecolor", "xtick.color", "ytick.color"), ink
        ),
    }
    with rc_context(style):
        figure = Figure(figsize=size, layout="constrained")
        draw(figure, theme)
        buffer = io.BytesIO()
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    return "data:image/svg+xml;base64," + base64.b64encode(buffer.getvalue()).decode()
