from __future__ import annotations

import re
from xml.etree import ElementTree

import numpy as np
import pytest

from megabatch.evaluation.report import charts
from megabatch.evaluation.report.charts import (
    Bars,
    Chart,
    Series,
    bars_chart,
    curves_chart,
    heat_map_chart,
    histogram_chart,
    percent,
    series,
)
from megabatch.evaluation.report.content import HeatMap, Histogram


def texts(chart: Chart) -> list[str]:
    """The texts of a chart, whose XML must be sound, and whose colours must be the page's."""
    svg = ElementTree.fromstring(chart.svg)
    assert svg.tag.endswith("svg")
    assert not any(element.tag.endswith("style") for element in svg.iter())
    assert not any(colour in chart.svg for colour in charts._COLOURS.values())
    return ["".join(e.itertext()) for e in svg.iter() if e.tag.endswith("text")]


def variables(chart: Chart) -> set[str]:
    return set(re.findall(r"var\((--[a-z0-9-]+)\)", chart.svg))


def test_every_colour_has_a_value_for_light_and_dark_pages() -> None:
    style = charts.__file__.replace("charts.py", "base.html")
    with open(style) as file:
        light, dark = file.read().split("prefers-color-scheme: dark", 1)
    for variable in charts._COLOURS:
        assert f"{variable}: #" in light
        assert f"{variable}: #" in dark
    assert len(set(charts._COLOURS.values())) == len(charts._COLOURS)


def test_curves_have_the_colours_of_their_runs() -> None:
    curve = Series(np.arange(3.0), np.array([4.0, 2.0, 1.0]))
    chart = curves_chart("loss", {0: curve, 2: curve, 13: curve}, "pairs seen")
    assert "pairs seen" in texts(chart)
    assert variables(chart) == {"--ink", "--line", "--run-1", "--run-3", "--run-4"}
    assert chart.svg.count("stroke-dasharray") == 1  # the 14th run shares the fourth one's colour
    assert chart.alt.startswith("loss, from 4 to 1; ")


def test_a_single_point_and_a_banded_curve_can_be_drawn() -> None:
    one = Series(np.array([1.0]), np.array([2.0]))
    many = np.linspace(0, 1, 600)
    banded = Series(many, many, many - 0.1, many + 0.1)
    for curve in (one, banded):
        assert "--run-1" in variables(curves_chart("pairs per second", {0: curve}))


def test_bars_have_a_value_and_a_colour_each() -> None:
    values = {"model": [0.5, 0.75], "baseline": [0.2, 0.3], "chance": [0.01, 0.05]}
    chart = bars_chart(Bars("a", ["@1", "@5"], values))
    assert {"50", "75", "20", "30", "1.0", "5.0", "@1", "@5"} <= set(texts(chart))
    assert {"--model", "--baseline", "--chance"} <= variables(chart)
    assert "--probe" not in variables(chart)
    assert chart.alt == "a: @1 50.0%, @5 75.0%"
    assert len(chart.svg) < 20_000


def test_a_histogram_shows_shares_also_of_no_negative() -> None:
    histogram = Histogram(-0.5, 1, [0, 1, 3], [4, 0, 0], 0.75, -0.25, 1)
    chart = histogram_chart(histogram)
    assert {"--model", "--chance"} <= variables(chart)
    assert "0.750" in chart.alt
    alone = histogram_chart(Histogram(-0.5, 1, [0, 1, 3], [0, 0, 0], 0.75, 0, 1))
    assert "--chance" not in variables(alone)


def test_a_heat_map_is_a_small_image() -> None:
    n = 40
    cosines = np.eye(n).tolist()
    chart = heat_map_chart(HeatMap([str(i) for i in range(n)], cosines))
    assert {"query", "text", "cosine"} <= set(texts(chart))
    assert "data:image/png;base64," in chart.svg
    assert len(chart.svg) < 30_000


def test_a_heat_map_has_room_for_the_label_of_its_bar() -> None:
    cosines = np.linspace(-0.011, 0.141, 36).reshape(6, 6).tolist()
    chart = heat_map_chart(HeatMap([str(i) for i in range(6)], cosines))
    (right,) = re.findall(r'x="([\d.]+)"[^>]*>cosine<', chart.svg)
    (width,) = re.findall(r'viewBox="0 0 (\d+) ', chart.svg)
    assert float(right) < float(width) - 2


def test_charts_of_one_page_have_ids_of_their_own() -> None:
    curve = Series(np.arange(3.0), np.array([4.0, 2.0, 1.0]))
    one, other = (curves_chart(title, {0: curve}).svg for title in ("loss", "norm"))
    references = [set(re.findall(r"[(\"]#([a-z0-9]+)", svg)) for svg in (one, other)]
    assert references[0]
    assert not references[0] & references[1]


def test_the_same_chart_is_the_same_text() -> None:
    bars = Bars("a", ["@1"], {"model": [0.5], "chance": [0.1]})
    assert bars_chart(bars) == bars_chart(bars)


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (0.0003, "0.03"), (0.0149, "1.5"), (0.0995, "10"), (0.756, "76"), (1, "100")],
)
def test_percent_keeps_digits_for_small_values(value: float, text: str) -> None:
    assert percent(value) == text


def test_values_that_are_no_finite_number_leave_a_gap() -> None:
    records = [
        {"step": 1, "loss": float("nan")},
        {"step": 2, "loss": None},
        {"step": 3, "loss": 5},
    ]
    got = series(records, "loss")
    assert got is not None
    assert got.steps.tolist() == [3]
    assert series(records, "lr") is None
    assert series(records, "loss", "samples") is None


def test_a_long_curve_is_averaged_within_its_bounds() -> None:
    records = [{"step": i, "loss": float(i % 7)} for i in range(1, 50_001)]
    got = series(records, "loss")
    assert got is not None
    assert got.low is not None
    assert got.high is not None
    assert len(got.steps) == len(got.values) == 600
    assert np.all(np.diff(got.steps) > 0)
    assert got.low.min() == 0
    assert got.high.max() == 6
    assert np.all((got.low <= got.values) & (got.values <= got.high))
