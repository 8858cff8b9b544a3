"""Figures of batch_study.py's and same_accuracy.py's records."""

from __future__ import annotations

import math
from collections import defaultdict
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator, PercentFormatter

from machinery.study_plan import ARMS
from machinery.study_summary import Point, points

TITLES = {
    "negatives": "negatives alone: same batches, same steps",
    "long": "negatives alone: batches of 4,096, more steps",
    "samples": "batch at equal samples, rate tuned",
    "steps": "batch at equal steps, rate tuned",
}
TESTS = {"in_domain": "in-domain test", "unseen": "unseen family"}
#: Loss -> colour, marker.
LOSSES = {"clip": ("#d62728", "o"), "siglip": ("#1f77b4", "s"), "dcl": ("#2ca02c", "^")}


def batch_study(content: dict[str, Any]) -> dict[str, Figure]:
    """A figure for each data set: recall@10 by size, a row for each test and a column for each arm.

    Points are means over seeds, bars the standard deviation, dots the runs, the dotted line chance.
    """
    by_data: dict[str, list[Point]] = defaultdict(list)
    for point in points(content):
        by_data[point.data].append(point)
    figures = {}
    for data, found in by_data.items():
        arms = [arm for arm in ARMS if len({p.size for p in found if p.arm == arm}) > 1]
        made, panels = plt.subplots(
            len(TESTS),
            len(arms),
            figsize=(4 + 3.6 * len(arms), 8),
            sharex="col",
            sharey="row",
            layout="constrained",
        )
        for row, test in zip(panels, TESTS, strict=True):
            for axes, arm in zip(row, arms, strict=True):
                _draw(axes, [point for point in found if point.arm == arm], test)
                chance = content["tests"][data][test]["chance"]["recall@10"]
                axes.axhline(chance, color="0.4", linestyle=":", label="chance")
            row[0].set_ylabel(f"{TESTS[test]}, recall@10")
            row[0].set_ylim(0, None)  # after all panels of the row: they share it
        for axes, arm in zip(panels[0], arms, strict=True):
            axes.set_title(TITLES[arm])
        for axes in panels[-1]:
            axes.set_xlabel("pairs that meet in the loss")
        panels[0][0].legend(fontsize=9)
        figures[data] = made
    return figures


def _draw(axes: Axes, found: list[Point], test: str) -> None:
    for loss, (colour, marker) in LOSSES.items():
        line = [point for point in found if point.loss == loss]
        if line:
            means, deviations = zip(*(point.figure(test) for point in line), strict=True)
            sizes = [point.size for point in line]
            style: dict[str, Any] = {"color": colour, "marker": marker, "label": loss}
            axes.errorbar(sizes, means, yerr=deviations, capsize=3, **style)
            for point in line:
                values = [run["tests"][test]["recall@10"] for run in point.runs]
                axes.plot([point.size] * len(values), values, ".", color=colour, markersize=3)
    sizes = sorted({point.size for point in found})
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, [f"{size:,}" for size in sizes], fontsize=8)
    axes.xaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(PercentFormatter(1))
    axes.grid(alpha=0.3)


def same_accuracy(content: dict[str, Any]) -> dict[str, Figure]:
    """A figure for each data set and precision: loss curves, and their distance from dense's."""
    groups: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for record in content["records"]:
        groups[f"{record['data']}-{record['precision']}"].append(record)
    return {name: _curves(runs) for name, runs in groups.items()}


def _curves(runs: list[dict[str, Any]]) -> Figure:
    made, (curves, distances) = plt.subplots(1, 2, figsize=(13, 5), layout="constrained")
    ways = list(dict.fromkeys((run["contender"], run["n_devices"]) for run in runs))
    reference = {r["seed"]: r for r in runs if (r["contender"], r["n_devices"]) == ("dense", 1)}
    for number, way in enumerate(ways):
        own = [run for run in runs if (run["contender"], run["n_devices"]) == way]
        colour = plt.get_cmap("tab10")(number)
        label = f"{way[0]}, {way[1]} rank{'s' if way[1] > 1 else ''}"
        steps = range(1, own[0]["steps"] + 1)
        for run in own:
            # Narrower and narrower, so that curves that coincide are all visible.
            width = 5 - 4 * number / max(1, len(ways) - 1)
            curves.plot(steps, run["losses"], color=colour, linewidth=width)
        pairs = [(run, reference[run["seed"]]) for run in own if run["seed"] in reference]
        if pairs and way != ("dense", 1):
            furthest = [
                max(abs(run["losses"][i] - other["losses"][i]) for run, other in pairs)
                for i in range(own[0]["steps"])
            ]
            shown = [distance or math.nan for distance in furthest]  # 0 has no logarithm
            distances.plot(steps, shown, ".-", color=colour, label=label)
    curves.set_ylabel("loss, a line for each run")
    distances.set_ylabel("largest difference from dense on one rank, same seed")
    distances.set_yscale("log")
    if distances.has_data():
        distances.legend(fontsize=9)
    for axes in (curves, distances):
        axes.set_xlabel("step")
        axes.grid(alpha=0.3)
    return made
