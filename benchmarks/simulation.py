"""The simulation of losses on up to 4,096 GPUs: its parameters, its check, its sweep.

    python benchmarks/simulation.py                  # the check against the committed records
    python benchmarks/simulation.py --output benchmarks/results/simulation.json    # minutes
    python benchmarks/plots.py benchmarks/results/simulation.json

Without --output it prints the parameters that the records give next to those that the package has,
and each record of CLIP's and the sigmoid loss on one, two and four GPUs next to its simulation; the
exit code is 1 if one that is compared deviates by more than 5%. With it, it writes both, and
simulates 8 to 4,096 GPUs in nodes of 8 with 128 to 131,072 rows each, by each schedule: a step of
the loss, and a training step of ViT-B/32 around it. Needs no GPU.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from machinery import fitted, simulated
from machinery.cluster.hardware import Cluster, Gpu
from machinery.cluster.schedules import Grid, Workload
from machinery.cluster.step import Towers, compare, simulate
from machinery.simulated import Measured
from megabatch import files
from megabatch.benchmarking import records

RESULTS = Path(__file__).parent / "results"
#: The largest deviation of a simulated time from a measured one.
ALLOWED = 0.05
WIDTH = 768
GPUS = (8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
ROWS = tuple(128 << k for k in range(11))
#: Bytes of a GPU for the loss: schedules that take more are not chosen.
LIMIT = 16 << 30
#: ViT-B/32 on an H200, of results/throughput.json at 32,768 pairs; weights of OpenCLIP's model.
TOWERS = Towers(pairs_per_second=3_202.5, parameter_bytes=4 * 151.3e6)


def parameters(results: Path) -> dict[str, tuple[float, float]]:
    """By name: what the records give, and what the package has."""
    has = {**vars(Cluster(8)), **vars(Gpu()), **vars(Gpu().spread)}
    return {name: (value, has[name]) for name, value in fitted.fit(results).items()}


def comparison(one: Measured) -> dict[str, Any]:
    """A measured step and its simulation."""
    row = {
        "file": one.file,
        "what": one.what,
        "gpus": one.gpus,
        "rows": one.work.rows,
        "d": one.work.width,
        "schedule": one.schedule.name,
        "ms": one.ms,
        "simulated_ms": None,
        "deviation": None,
        "fitted": one.fitted,
        "skipped": one.skipped,
    }
    if not one.skipped:
        deviation = one.deviation(one.simulated())
        row |= {"simulated_ms": one.ms * (1 + deviation), "deviation": deviation}
    return row


def line(row: dict[str, Any]) -> str:
    """A comparison for the terminal."""
    rows = row["gpus"] * row["rows"]
    begin = f"{row['file']:19} {row['what'][:44]:44} {rows:>9,} x {row['d']:<4} on {row['gpus']}"
    if row["skipped"]:
        return f"{begin} {row['ms']:10.2f} ms  not compared: {row['skipped']}"
    times = f"{row['ms']:10.2f} ms {row['simulated_ms']:10.2f} {row['deviation']:+7.1%}"
    return f"{begin} {times}{'  fitted' if row['fitted'] else ''}"


def sweep(gpus: tuple[int, ...], sizes: tuple[int, ...]) -> Iterator[dict[str, Any]]:
    """Each schedule at each size, grids and rounds the best ones; then some other networks."""
    for n in gpus:
        for rows in sizes:
            yield from at(Cluster(n), rows)
            print(f"{n:,} GPUs, {rows:,} rows each", file=sys.stderr)
    cluster = Cluster(gpus[-3])
    spread = cluster.gpu.spread
    others = {
        "NICs of 100 Gbit/s": replace(cluster, nic=cluster.nic / 4),
        "one NIC a node": replace(cluster, nics=1),
        "half the network's latency": replace(cluster, network_latency=7e-6),
        "ranks of one speed": _spread(cluster, 0.0, spread.lasting),
        "twice the spread": _spread(cluster, 2.0, spread.lasting),
    }
    for name, other in others.items():
        for rows in (1024, 8192):
            yield from at(other, rows, name)


def _spread(cluster: Cluster, factor: float, lasting: float) -> Cluster:
    spread = cluster.gpu.spread
    wider = replace(spread, lasting=factor * lasting, drift=factor * spread.drift)
    return replace(cluster, gpu=replace(cluster.gpu, spread=wider))


def at(cluster: Cluster, rows: int, name: str = "") -> Iterator[dict[str, Any]]:
    """The best of each kind of schedule."""
    work = Workload(rows, WIDTH)
    for kind, (schedule, result) in compare(cluster, work, LIMIT).items():
        step = simulate(cluster, work, schedule, TOWERS)
        yield {
            "cluster": name,
            "gpus": cluster.gpus,
            "rows": rows,
            "kind": kind,
            **asdict(result),
            "round_rows": schedule.round_rows(work) if isinstance(schedule, Grid) else None,
            "efficiency": result.efficiency,
            "step_seconds": step.seconds,
            "step_efficiency": step.efficiency,
            "step_exposed": step.exposed,
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--output", type=Path, help="write the record, sweep included")
    parser.add_argument("--gpus", type=int, nargs="+", default=GPUS)
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS, help="of each GPU")
    options = parser.parse_args()
    found = parameters(RESULTS)
    for name, (value, has) in found.items():
        print(f"{name:14} {value:12.4g} from the records, {has:12.4g} in the package")
    rows = [comparison(one) for one in simulated.measured(RESULTS)]
    for row in rows:
        print(line(row))
    compared = [row for row in rows if not row["skipped"]]
    worst = max(compared, key=lambda row: abs(row["deviation"]))
    within = abs(worst["deviation"]) <= ALLOWED
    print(
        f"{len(compared)} compared, {sum(row['fitted'] for row in compared)} of them fitted, "
        f"{len(rows) - len(compared)} not compared; the largest deviation is "
        f"{worst['deviation']:+.1%}: {worst['file']}, {worst['what']}"
    )
    if options.output is not None:
        content = {
            "command": records.command_line(options.output),
            **records.environment(),
            "width": WIDTH,
            "parameters": asdict(Cluster(8)),
            "towers": asdict(TOWERS),
            "limit": LIMIT,
            "fit": {name: value for name, (value, _) in found.items()},
            "comparison": rows,
            "simulated": list(sweep(tuple(options.gpus), tuple(options.rows))),
        }
        files.write_text(options.output, json.dumps(content, indent=1, allow_nan=False) + "\n")
    sys.exit(0 if within else 1)


if __name__ == "__main__":
    main()
