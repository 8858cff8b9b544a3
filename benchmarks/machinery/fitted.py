"""The simulation's parameters, as the committed records give them."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import numpy as np

from machinery.cluster.hardware import Cluster, Spread
from machinery.simulated import SWEEPS, Measured, read, scaling, single


def fit(results: Path) -> dict[str, float]:
    """The parameters of `hardware` that are fitted, by name."""
    operation, logit, chunk = kernels(one for one in single(results) if one.fitted)
    rates = [r["product_tflops"] for r in read(results, "scaling")["records"]]
    spread = spreads(results)
    return {
        "product_rate": 1e12 * statistics.fmean(rate for rate in rates if rate),
        "per_operation": operation,
        "per_logit": logit,
        "chunk": chunk,
        "host": host(results),
        "slowdown": slowdown(results),
        "nvlink": nvlink(results),
        "base_latency": base_latency(results),
        "lasting": spread.lasting,
        "drift": spread.drift,
        "memory": spread.memory,
    }


def nvlink(results: Path) -> float:
    """Bytes per second of collectives alone on four GPUs, of 65,536 rows each."""
    alone = read(results, "hiding-4gpu")["transfers_ms"]
    latency = Cluster.base_latency + 3 * Cluster.nvlink_latency
    rows = 3 * 65_536 * 768  # from three ranks
    ways = ("all ranks gather", 2), ("all ranks reduce and scatter", 4)
    return statistics.fmean(item * rows / (1e-3 * alone[how] - latency) for how, item in ways)


def kernels(found: Iterable[Measured]) -> tuple[float, float, float]:
    """`per_operation`, `per_logit` and `chunk`, by least squares of the relative deviation."""
    equations = []
    for one in found:
        seconds = 1e-3 * one.ms
        ideal = sum(one.work.sweeps) * one.work.rows**2 * one.work.width / one.rate
        terms = (ideal, ideal / one.work.width, len(one.work.sweeps))
        equations.append([term / seconds for term in terms])
    matrix = np.array(equations)
    operation, logit, chunk = np.linalg.lstsq(matrix, np.ones(len(matrix)), rcond=None)[0]
    return float(operation), float(logit), float(chunk)


def spreads(results: Path) -> Spread:
    """The differences between GPUs, and of one from call to call."""
    squares, freedom = 0.0, 0
    for file in ("scaling", "scaling-2gpu", "scaling-own-first"):
        for r in read(results, file)["records"]:
            alone = r["n_devices"] == 1 and r["contender"] == "megabatch" and r["b"] >= 65_536
            if alone and len(r["device_ms"]) > 1:
                relative = [ms / statistics.fmean(r["device_ms"]) for ms in r["device_ms"]]
                squares += (len(relative) - 1) * statistics.variance(relative)
                freedom += len(relative) - 1
    # Calls of 44 ms on one GPU, and of 350 ms on two, which depend on the slower one.
    short = _variation(results, ("single-gpu", "single-gpu-engine"), 1, 65_536)
    long = _variation(results, ("scaling", "scaling-2gpu", "scaling-own-first"), 2, 262_144)
    unit = Spread(0.0, 1.0, 1.0)
    memories = np.geomspace(1e-3, 1.0, 1000)
    ratios = [
        replace(unit, memory=t).deviation(0.044) / replace(unit, memory=t).deviation(0.355)
        for t in memories
    ]
    memory = float(memories[int(np.argmin(np.abs(np.array(ratios) - short / long)))])
    drift = short / replace(unit, memory=memory).deviation(0.044)
    return Spread(math.sqrt(squares / freedom), drift, memory)


def _variation(results: Path, files: tuple[str, ...], n: int, b: int) -> float:
    """Mean standard deviation of the calls' times, relative to their mean."""
    found = [
        statistics.stdev(r["times_ms"]) / statistics.fmean(r["times_ms"])
        for file in files
        for r in read(results, file)["records"]
        if (r["loss"], r["n_devices"], r["b"], r["d"]) == ("clip", n, b, 768)
        and r["contender"] in ("megabatch", "megabatch-no-transfers")
        and r["dtype"] == "bfloat16"
        and len(r["times_ms"]) > 4
    ]
    return statistics.fmean(found)


def slowdown(results: Path) -> float:
    """The share of a transfer's time that a simultaneous computation does not hide.

    At 65,536 rows: the gathering of features during own columns on four GPUs, and the gradients'
    transfer during the completion of x's gradient on two.
    """
    four, two = read(results, "hiding-4gpu"), read(results, "hiding-2gpu")
    ways = four["runs"][2]["65536"]
    gathered = four["transfers_ms"]["all ranks gather"] / 4  # of a quarter of the rows
    gain = statistics.fmean(ways["everything at once"]) - statistics.fmean(
        ways["own columns first"]
    )
    ways = two["runs"][1]["65536"]
    after, beside = (
        "x's gradient completed after the transfer",
        "beside it, which begins 10 us before",
    )
    later = statistics.fmean(ways[after]) - statistics.fmean(ways[beside])
    summed = 1e3 * 4 * 32_768 * 768 / Cluster(2).nvlink
    return statistics.fmean((1 - gain / gathered, 1 - later / summed))


def base_latency(results: Path) -> float:
    """With which steps of 16,384 pairs on two and four GPUs, as CUDA graphs, are right on average.

    Such a step has five collectives: features, states, two numbers of each row, gradients, and the
    scale's gradient.
    """
    found = [m for m in scaling(results) if m.file == "scaling" and m.gpus > 1 and _captured(m)]
    lacking = [1e-3 * one.ms - one.simulated().seconds for one in found]
    return Cluster.base_latency + statistics.fmean(lacking) / 5


def _captured(one: Measured) -> bool:
    return one.what.endswith("captured")


def host(results: Path) -> float:
    """Seconds of the host for a chunk of a sweep: half of a ring step's, of a small batch."""
    taken = {
        r["n"]: r["ms"]
        for r in read(results, "ring-4gpu-prototype")
        if r["what"] == "strong" and r["b"] == 16_384
    }
    return 1e-3 * (taken[4] - taken[2]) / 2 / len(SWEEPS["clip"])
