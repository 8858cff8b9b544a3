"""Figures from the records of benchmarks.

    python benchmarks/plots.py benchmarks/results/single-gpu.json [more records of one GPU]
    python benchmarks/plots.py benchmarks/results/scaling.json
    python benchmarks/plots.py benchmarks/results/batch-study.json
    python benchmarks/plots.py benchmarks/results/same-accuracy.json

Those of batch_study.py and same_accuracy.py have a figure for each data set (and precision). All
others are for bf16, scale 14.3, forward and backward, at one width. For one GPU: time and extra
memory over b (single-gpu-time.png, -memory.png, in the records' folder), and for the README both of
a few contenders (single-gpu-summary.png). For several GPUs: fraction of ideal and memory per GPU
over their number (scaling.png).
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, NullLocator, PercentFormatter

from page import place

#: contender -> colour, marker; megabatch's stand out.
STYLES = {
    "megabatch": ("#d62728", "o"),
    "megabatch-compiled": ("#ff9896", "o"),
    "megabatch-captured": ("#7b4173", "o"),
    "dense": ("#1f77b4", "s"),
    "dense-compiled": ("#17becf", "s"),
    "dense-captured": ("#393b79", "s"),
    "openclip": ("#7f7f7f", "D"),
    "liger": ("#2ca02c", "^"),
    "liger-cute": ("#006d2c", "^"),
    "memeff": ("#9467bd", "v"),
    "cut-cross-entropy": ("#8c564b", "<"),
    "inf-cl": ("#e8a000", ">"),
    "siglip-kernel": ("#008080", "P"),
}
LINES = {"-compiled": "--", "-captured": "-."}
TITLES = {"clip": "CLIP's loss", "siglip": "SigLIP's loss"}
FIGURES = {
    "time": ("ms", 1.0, "forward + backward, ms"),
    "memory": ("extra_bytes", 2.0**30, "memory beyond inputs and gradients, GiB"),
}


def chosen(records: list[dict[str, Any]], d: int) -> list[dict[str, Any]]:
    """The records for the figures; of several at one size the first counts."""
    wanted = {"dtype": "bfloat16", "d": d, "scale": 14.3, "features": "pairs", "n": None}
    wanted["backward"] = True
    found: dict[tuple[str, str, int], dict[str, Any]] = {}
    for record in records:
        fits = all(record[key] == value for key, value in wanted.items()) and record["b"] % 64 == 0
        if fits and record["loss"] in TITLES and record["ms"] is not None:
            found.setdefault((record["loss"], record["contender"], record["b"]), record)
    return list(found.values())


def figure(records: list[dict[str, Any]], field: str, unit: float, label: str) -> plt.Figure:
    made, panels = plt.subplots(1, 2, figsize=(13, 5.2), sharey=True, layout="constrained")
    entries: dict[str, Any] = {}
    for axes, loss in zip(panels, TITLES, strict=True):
        lines: dict[str, list[tuple[int, float]]] = defaultdict(list)
        for record in records:
            if record["loss"] == loss:
                lines[record["contender"]].append((record["b"], record[field] / unit))
        for name in sorted(lines, key=list(STYLES).index):
            entries.setdefault(name, draw(axes, name, sorted(lines[name])))
        finish(axes, loss, sorted({b for points in lines.values() for b, _ in points}))
    panels[0].set_ylabel(label)
    # The legend is next to the panels, as inside it would cover points.
    made.legend(entries.values(), entries.keys(), loc="outside right center", fontsize=9)
    return made


#: Contenders of the summary: OpenCLIP's loss, the fastest peers, and the one of least memory.
SUMMARY = {
    "megabatch": "megabatch",
    "dense-compiled": "one matrix, torch.compile",
    "openclip": "OpenCLIP's loss",
    "liger": "Liger",
    "cut-cross-entropy": "cut-cross-entropy",
}


def summary(records: list[dict[str, Any]]) -> plt.Figure:
    """Time and memory of CLIP's loss over the batch size."""
    made, panels = plt.subplots(1, 2, figsize=(11, 4), layout="constrained")
    for axes, field in zip(panels, ("time", "memory"), strict=True):
        key, unit, _ = FIGURES[field]
        sizes: set[int] = set()
        for name, label in SUMMARY.items():
            mine = [r for r in records if (r["loss"], r["contender"]) == ("clip", name)]
            points = sorted((r["b"], r[key] / unit) for r in mine)
            draw(axes, name, points).set_label(label)
            sizes.update(b for b, _ in points)
        finish(axes, "clip", sorted(sizes))
        axes.set_xlabel("pairs")
    panels[0].set_title("forward and backward, ms")
    panels[1].set_title("memory besides inputs and gradients, GiB")
    panels[0].legend(fontsize=9)
    return made


def draw(axes: Axes, name: str, points: list[tuple[int, float]]) -> Line2D:
    colour, marker = STYLES[name]
    ours = name == "megabatch"
    (line,) = axes.plot(
        *zip(*points, strict=True),
        color=colour,
        marker=marker,
        linewidth=2.6 if ours else 1.4,
        markersize=7 if ours else 5.5,
        linestyle=next((s for end, s in LINES.items() if name.endswith(end)), "-"),
        zorder=3 if ours else 2,
    )
    return line


def finish(axes: Axes, loss: str, sizes: list[int]) -> None:
    axes.set_title(TITLES[loss])
    axes.set_xscale("log", base=2)
    axes.set_xlabel("b")
    axes.set_xticks(sizes, [short(b) for b in sizes])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
    axes.grid(alpha=0.3)


def scaling(records: list[dict[str, Any]]) -> plt.Figure:
    """CLIP's loss over several GPUs: a line for each global batch; the sigmoid loss's dashed."""
    made, (ideal, memory) = plt.subplots(1, 2, figsize=(13, 5.2), layout="constrained")
    lines: dict[tuple[str, int], list[dict[str, Any]]] = defaultdict(list)
    for record in records:
        if record["contender"] == "megabatch" and record["ms"] is not None:
            lines[record["loss"], record["b"]].append(record)
    sizes = sorted({b for _, b in lines})
    for (loss, b), line in sorted(lines.items()):
        style = {
            "color": plt.get_cmap("viridis")(sizes.index(b) / max(1, len(sizes) - 1)),
            "marker": "o" if loss == "clip" else "s",
            "linestyle": "-" if loss == "clip" else "--",
            "label": f"{short(b)} pairs" + ("" if loss == "clip" else ", SigLIP's loss (dashed)"),
        }
        line.sort(key=lambda record: record["n_devices"])
        known = [(r["n_devices"], r["of_ideal"] or 1.0) for r in line if fraction_known(r)]
        if len(known) < 2:
            continue
        ideal.plot(*zip(*known, strict=True), **style)
        points = [(r["n_devices"], r["extra_bytes"] / 2**30) for r in line]
        memory.plot(*zip(*points, strict=True), **style)
    counts = sorted({r["n_devices"] for line in lines.values() for r in line})
    for axes in (ideal, memory):
        axes.set_xscale("log", base=2)
        axes.set_xticks(counts, [str(n) for n in counts])
        axes.xaxis.set_minor_locator(NullLocator())
        axes.set_xlabel("GPUs")
        axes.grid(alpha=0.3)
    ideal.set_ylabel("time on one GPU / (GPUs x time)")
    ideal.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    ideal.axhline(1, color="0.6", linewidth=1)
    ideal.set_ylim(0, None)
    memory.set_ylabel("memory of one GPU beyond inputs and gradients, GiB")
    memory.set_ylim(0, None)
    made.legend(*memory.get_legend_handles_labels(), loc="outside right center", fontsize=9)
    return made


def fraction_known(record: dict[str, Any]) -> bool:
    return record["n_devices"] == 1 or record["of_ideal"] is not None


def short(b: int) -> str:
    """A number of rows or GPUs; below 1024 as it is."""
    if b < 1024:
        return str(b)
    return f"{b // 1024}k" if b < 2**20 else f"{b // 2**20}M"


# --- studies --------------------------------------------------------------------------------------


def batch_study(content: dict[str, Any]) -> dict[str, plt.Figure]:
    """A figure for each data set: recall@10 by samples and by time, and what was memorised.

    Lines are means over seeds, bands their range. A step's time is that of an idle GPU.
    """
    from batch_study import TUNING_SEED  # with the losses, which take seconds to import

    ms = {(t["data"], t["loss"], t["batch"], t["group"]): t["ms"] for t in content["times"]}
    runs: dict[tuple[str, int, int], list[dict[str, Any]]] = defaultdict(list)
    for record in content["records"]:
        plain = record["loss"] == "clip" and record["group"] == record["batch"]
        if plain and record["seed"] < TUNING_SEED and record["status"] == "ok":
            runs[record["data"], record["batch"], record["steps"]].append(record)
    figures = {}
    for data in dict.fromkeys(data for data, *_ in runs):
        size = {"figsize": (15, 5), "layout": "constrained"}
        made, (by_samples, by_time, memorised) = plt.subplots(1, 3, **size)
        sizes = sorted({batch for of, batch, _ in runs if of == data})
        samples = {b: max(b * n for of, c, n in runs if (of, c) == (data, b)) for b in sizes}
        for (of, batch, steps), seeds in sorted(runs.items()):
            if of != data:
                continue
            colour = plt.get_cmap("viridis")(sizes.index(batch) / max(1, len(sizes) - 1))
            style = {"color": colour, "label": f"{batch:,} pairs"}
            done = np.array([point["step"] for point in seeds[0]["curve"]])
            recall, seen = (
                np.array([[point[name]["recall@10"] for point in run["curve"]] for run in seeds])
                for name in ("in_domain", "seen")
            )
            if abs(batch * steps - min(samples.values())) < max(sizes):
                _band(by_samples, done * batch / 1e6, recall, style)
                _band(memorised, done * batch / 1e6, seen - recall, style)
            if (data, "clip", batch, batch) in ms:
                _band(by_time, done * ms[data, "clip", batch, batch] / 6e4, recall, style)
        for axes, label in ((by_samples, "millions of samples"), (by_time, "minutes on one GPU"),
                            (memorised, "millions of samples")):  # fmt: skip
            axes.set_xlabel(label)
            axes.yaxis.set_major_formatter(PercentFormatter(1))
            axes.grid(alpha=0.3)
        by_samples.set_ylabel("recall@10 on held-out pairs")
        memorised.set_ylabel("lead of training pairs")
        by_samples.legend(fontsize=9)
        figures[data] = made
    return figures


def _band(axes: Axes, x: np.ndarray, runs: np.ndarray, style: dict[str, Any]) -> None:
    """The mean of runs (runs, points), and their range."""
    axes.plot(x, runs.mean(0), linewidth=1.6, **style)
    axes.fill_between(x, runs.min(0), runs.max(0), color=style["color"], alpha=0.25)


def same_accuracy(content: dict[str, Any]) -> dict[str, plt.Figure]:
    """A figure for each data set and precision: loss curves, and their distance from dense's."""
    groups: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for record in content["records"]:
        groups[f"{record['data']}-{record['precision']}"].append(record)
    return {name: _curves(runs) for name, runs in groups.items()}


def _curves(runs: list[dict[str, Any]]) -> plt.Figure:
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


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("records", type=Path, nargs="+", help="of several the first is described")
    parser.add_argument("--width", type=int, default=768, help="of the features")
    parser.add_argument("--output", type=Path, help="folder; default: that of the records")
    options = parser.parse_args()
    first: Path = options.records[0]
    contents = [json.loads(path.read_text()) for path in options.records]
    content = contents[0]
    everything = [record for each in contents for record in each.get("records", [])]
    folder: Path = options.output or first.parent
    folder.mkdir(parents=True, exist_ok=True)
    figures: dict[str, plt.Figure] = {}
    studies = {"study": batch_study, "comparison": same_accuracy}
    study = next((draw for field, draw in studies.items() if field in content), None)
    if study is not None:
        figures = {f"-{name}": made for name, made in study(content).items()}
    elif any("of_ideal" in record for record in everything):
        figures[""] = scaling([r for r in everything if r["d"] == options.width])
    else:
        records = chosen(everything, options.width)
        if not records:
            parser.error(f"{first}: no measured records of width {options.width}")
        for name, (field, unit, label) in FIGURES.items():
            figures[f"-{name}"] = figure(records, field, unit, label)
        if {"megabatch", "openclip"} <= {r["contender"] for r in records if r["loss"] == "clip"}:
            figures["-summary"] = summary(records)
    for name, made in figures.items():
        # A study goes on on several machines, but its time is that of one GPU.
        on = next((t["gpu"] for t in content.get("times", ())), None) or place(content["machine"])
        made.suptitle(f"{name[1:]}, {on}" if study else f"{on}, bf16, d = {options.width}")
        path = folder / f"{first.stem}{name}.png"
        made.savefig(path, dpi=130)
        plt.close(made)
        print(path)


if __name__ == "__main__":
    main()
