"""Figures of batch_study.py's and same_accuracy.py's records."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
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
    """Left the mean loss of all seeds and their range; right the distances, on a log scale."""
    made, (curves, distances) = plt.subplots(1, 2, figsize=(13, 5), layout="constrained")
    ways: dict[tuple[str, int], dict[int, np.ndarray]] = defaultdict(dict)
    for run in runs:
        ways[run["contender"], run["n_devices"]][run["seed"]] = np.array(run["losses"])
    reference = ways["dense", 1]
    steps = np.arange(1, runs[0]["steps"] + 1)
    for number, ((contender, ranks), losses) in enumerate(ways.items()):
        seeds = np.stack(list(losses.values()))
        label = f"{contender}, {ranks} rank{'s' if ranks > 1 else ''}"
        style: dict[str, Any] = {"color": plt.get_cmap("tab10")(number), "label": label}
        # Narrower and narrower, so that curves that coincide are all visible.
        width = 6 - 5 * number / max(1, len(ways) - 1)
        curves.plot(steps, seeds.mean(0), linewidth=width, **style)
        apart = [abs(losses[seed] - reference[seed]) for seed in losses.keys() & reference.keys()]
        if apart and losses is not reference:
            furthest = np.max(apart, axis=0)
            distances.plot(steps, np.where(furthest > 0, furthest, np.nan), ".-", **style)
    seeds = np.stack(list(reference.values()))
    low, high = seeds.min(0), seeds.max(0)
    curves.fill_between(steps, low, high, color="0.85", zorder=0, label="dense, range of all seeds")
    distances.plot(steps, high - low, color="0.5", label="dense, range of all seeds")
    curves.set_ylabel(f"loss, mean of {len(seeds)} seeds")
    distances.set_ylabel("largest difference from dense on one rank, same seed")
    distances.set_yscale("log")
    for axes in (curves, distances):
        axes.legend(fontsize=9)
        axes.set_xlabel("step")
        axes.grid(alpha=0.3)
    return made
