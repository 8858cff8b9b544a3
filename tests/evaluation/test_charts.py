from __future__ import annotations

import base64
from xml.etree import ElementTree

import numpy as np
import pytest

from megabatch.evaluation.charts import (
    Bars,
    Chart,
    Series,
    bars_chart,
    curves_chart,
    percent,
    series,
)


def svgs(chart: Chart) -> list[str]:
    drawn = []
    for uri in (chart.light, chart.dark):
        head, data = uri.split(",")
        assert head == "data:image/svg+xml;base64"
        drawn.append(base64.b64decode(data).decode())
        assert ElementTree.fromstring(drawn[-1]).tag.endswith("svg")
    return drawn


@pytest.mark.parametrize("panels", [1, 2, 3])
def test_each_curve_has_a_panel(panels: int) -> None:
    curve = Series(np.arange(3.0), np.array([4.0, 2.0, 1.0]))
    chart = curves_chart([(f"curve {i}", curve) for i in range(panels)])
    for svg in svgs(chart):
        assert svg.count('<g id="axes_') == panels
    assert "curve 0, from 4 to 1" in chart.alt


def test_a_single_point_and_a_banded_curve_can_be_drawn() -> None:
    one = Series(np.array([1.0]), np.array([2.0]))
    many = np.linspace(0, 1, 600)
    banded = Series(many, many, many - 0.1, many + 0.1)
    svgs(curves_chart([("pairs per second", one), ("loss", banded)]))


def test_bars_leave_no_empty_panel_and_both_themes_differ() -> None:
    with_baseline = Bars(
        "a",
        ["@1", "@5"],
        {"model": [0.5, 0.75], "baseline": [0.2, 0.3], "chance": [0.01, 0.05]},
    )
    without = Bars("b", ["@1", "@5"], {"neighbours": [0.5, 0.8], "chance": [0.0003, 0.0015]})
    chart = bars_chart([with_baseline, without, without], columns=2)
    light, dark = svgs(chart)
    assert light != dark
    assert light.count('<g id="axes_') == 3
    assert "a: @1 50.0%, @5 75.0%" in chart.alt
    for label in ("model", "nearest neighbours", "pixel nearest neighbour", "chance"):
        assert f"<!-- {label} -->" in light


def test_the_same_chart_is_the_same_text() -> None:
    bars = Bars("a", ["@1"], {"model": [0.5], "chance": [0.1]})
    assert bars_chart([bars], columns=1) == bars_chart([bars], columns=1)


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
