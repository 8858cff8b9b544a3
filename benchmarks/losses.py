"""The whole family of losses on one GPU: time, memory, share of the product, error.

    python benchmarks/losses.py --output benchmarks/results/losses.json
    python benchmarks/losses.py --plot benchmarks/results/losses.json

SigLIP's loss beside siglip-kernel and the dense expression; NT-Xent and the supervised loss, whose
matrix is symmetric, beside the same by the general path; CLIP's loss and InfoNCE with ids and a
margin beside CLIP's without. Options as of single_gpu.py; the records are plotted at the end, where
matplotlib is installed.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import single_gpu
from megabatch.benchmarking.family import FAMILY
from megabatch.benchmarking.group import Group
from single_gpu import HEADLINE_SECONDS, SIGLIP_PEERS, alone, beside, case

SELF_SIMILAR = ("megabatch", "general")
MASKED = ("clip-ids", "infonce-ids", "infonce-margin")
COLOURS = {
    "megabatch": "#d62728",
    "general": "#ff9896",
    "siglip-kernel": "#e8a000",
    "dense": "#1f77b4",
    "dense-compiled": "#17becf",
}


def groups() -> Iterator[Group]:
    """What is measured, the most important first."""
    yield beside(case(65_536, loss="siglip"), ("megabatch", "siglip-kernel"), HEADLINE_SECONDS)
    yield beside(case(32_768, loss="nt-xent"), SELF_SIMILAR)
    yield alone(case(65_536))
    for loss in MASKED:
        yield alone(case(65_536, loss=loss))
    yield beside(case(32_768, loss="supcon"), SELF_SIMILAR)
    for b in (8192, 16_384):
        yield beside(case(b, loss="siglip"), SIGLIP_PEERS)
    for d in (512, 1024):
        yield beside(case(65_536, d, loss="siglip"), ("megabatch", "siglip-kernel"))
    yield alone(case(65_536, loss="siglip", dtype="float16"))
    yield alone(case(65_536, loss="siglip", features="trained", scale=100.0))
    yield alone(case(65_601, loss="siglip"))
    for loss in FAMILY:  # the views of NT-Xent and the supervised loss have 16,384 rows together
        b = 8192 if "general" in FAMILY[loss].contenders else 16_384
        yield beside(case(b, loss=loss), ("megabatch", "dense"))
    yield beside(case(65_536, loss="siglip"), ("dense", "dense-compiled"))


def plot(path: Path) -> Path:
    """Bars of the share of the matrix product: d = 768, bf16, the largest size of each loss."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.ticker import PercentFormatter

    content = json.loads(path.read_text())
    shown = chosen(content["records"])
    if not shown:
        raise ValueError(f"{path}: no measured records")
    figure, axes = plt.subplots(figsize=(9, 0.42 * len(shown) + 1.4), layout="constrained")
    for place, record in enumerate(shown):
        axes.barh(place, record["fraction"], color=COLOURS.get(record["contender"], "0.5"))
        label = f" {record['fraction']:.0%}, {record['ms']:,.1f} ms"
        axes.text(record["fraction"], place, label, va="center", fontsize=9)
    names = [f"{r['loss']}, {r['b']:,}: {r['contender']}" for r in shown]
    axes.set_yticks(range(len(shown)), names, fontsize=9)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.15)
    axes.xaxis.set_major_formatter(PercentFormatter(1))
    axes.set_xlabel("necessary work / (time x rate of an 8192³ product)")
    gpus = content["machine"]["gpus"]
    axes.set_title(f"{gpus[0] if gpus else content['machine']['cpu']}, d = {shown[0]['d']}, bf16")
    picture = path.with_suffix(".png")
    figure.savefig(picture, dpi=130)
    plt.close(figure)
    return picture


def chosen(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Measured ones of the plain kind, at the largest size of each loss."""
    plain = {"dtype": "bfloat16", "scale": 14.3, "features": "pairs", "n": None}
    kept = [
        record
        for record in records
        if record["fraction"] is not None and all(record[key] == plain[key] for key in plain)
    ]
    widths = [record["d"] for record in kept]
    kept = [r for r in kept if r["d"] == max(set(widths), key=widths.count)]
    even = [record for record in kept if record["b"] % 64 == 0]  # an odd size says something else
    largest = {r["loss"]: max(s["b"] for s in even if s["loss"] == r["loss"]) for r in even}
    here = [record for record in even if record["b"] == largest[record["loss"]]]
    order = list(largest)
    return sorted(here, key=lambda r: (order.index(r["loss"]), r["ms"]))


def main() -> None:
    if sys.argv[1:2] == ["--plot"]:
        print(plot(Path(sys.argv[2])))
        return
    path = single_gpu.main(groups, __file__, __doc__ or "", "benchmarks/results/losses.json")
    if path is None or not path.exists():
        return
    try:
        print(plot(path))
    except (ImportError, ValueError) as error:
        print(f"no plot: {error}")


if __name__ == "__main__":
    main()
