"""The committed records of losses on GPUs, as steps that the simulation predicts."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from machinery.cluster.hardware import Cluster, Gpu
from machinery.cluster.schedules import Grid, Ring, Schedule, Workload
from machinery.cluster.step import Result, simulate

Record = dict[str, Any]

SWEEPS = {"clip": (2, 6), "siglip": (6,)}
#: Records of one GPU: the kernels' parameters are fitted to them.
SINGLE = ("single-gpu", "single-gpu-engine", "single-gpu-small", "single-gpu-4m")
#: Records of one GPU that are later than the fit.
PREDICTED = ("single-gpu-4m-backward", "single-gpu-16m")
#: Records of `benchmarks/scaling.py`.
SCALING = (
    *("scaling", "scaling-2gpu", "scaling-2gpu-engine", "scaling-own-first", "scaling-two-parts"),
    *("scaling-repeated", "scaling-ring", "rounds-2gpu"),
)
MIB = 1 << 20
PRODUCT_RATE = Gpu().product_rate

HOST = "called alone, it waits for the host"
#: The code of scaling-ring.json, in which the host takes as long.
OLD_HOST = "the host took as long, as in scaling-ring.json"
VARIANT = "another schedule than those simulated"
PADDED = "rows that are no multiple of 16 bytes, or no whole tiles, take further kernels"
PRECISION = "products in float32"
LOSS = "another operation"


@dataclass(frozen=True)
class Rounds(Grid):
    """A grid whose rounds have so many rows of each rank."""

    step: int = 0

    def round_rows(self, work: Workload) -> int:
        """Rows of each rank in a round."""
        return self.step


@dataclass(frozen=True)
class Measured:
    """One measured step and its simulation's inputs.

    what: the record, for the reader. ms: measured; transfers: whether there were any. rate: of
    matrix products on that machine, FLOP/s. fitted: parameters were fitted to it. skipped: why it
    is not compared, "" if it is.
    """

    file: str
    what: str
    gpus: int
    work: Workload
    schedule: Schedule
    ms: float
    rate: float
    memory: int | None = None
    transfers: bool = True
    fitted: bool = False
    skipped: str = ""

    @property
    def cluster(self) -> Cluster:
        """The machine."""
        return Cluster(self.gpus, gpu=replace(Gpu(), product_rate=self.rate))

    def simulated(self) -> Result:
        """The simulation of this step."""
        return simulate(self.cluster, self.work, self.schedule)

    def deviation(self, result: Result) -> float:
        """By which fraction the simulated time differs from the measured one."""
        seconds = result.seconds - (0.0 if self.transfers else result.exposed)
        return 1e3 * seconds / self.ms - 1


def measured(results: Path) -> list[Measured]:
    """All steps of the records in a folder."""
    found = [*single(results), *scaling(results), *turns(results), *gathering(results)]
    return [*found, *transfers(results), *hiding(results), *prototype(results)]


def read(results: Path, name: str) -> Any:
    """The content of a record."""
    return json.loads((results / f"{name}.json").read_text())


def single(results: Path) -> Iterator[Measured]:
    """One GPU."""
    for file in (*SINGLE, *PREDICTED):
        for r in read(results, file)["records"]:
            if r["contender"].startswith("megabatch") and r["status"] == "ok":
                fitted = r["loss"] == "clip" and file in SINGLE
                yield _of_record(file, r, Grid((1, 1)), fitted=fitted)


def scaling(results: Path) -> Iterator[Measured]:
    """The records of scaling.py."""
    for file in SCALING:
        for r in read(results, file)["records"]:
            if not r["contender"].startswith("megabatch") or r["status"] != "ok":
                continue
            kind, n = r["contender"].removeprefix("megabatch"), r["n_devices"]
            overlap = kind != "-no-overlap"
            schedule: Schedule = Grid((n, 1), overlap=overlap)
            # In scaling-ring.json all but the smallest batches travel the ring.
            if kind == "-ring" or (file == "scaling-ring" and n > 1 and r["b"] > 16_384):
                schedule = Ring(overlap=overlap)
            elif kind == "-rounds":
                schedule = Grid((n, 1), Grid.gather - 1)
            yield _of_record(file, r, schedule)


def _of_record(file: str, r: Record, schedule: Schedule, fitted: bool = False) -> Measured:
    n, kind = r["n_devices"], r["contender"].removeprefix("megabatch").removeprefix("-")
    backward = r.get("backward", True) is not False
    sweeps = SWEEPS.get(r["loss"], (2, 6)) if backward else (2,)
    skipped = ""
    captured = kind in ("captured", "graph")
    if r.get("n") or r["loss"] not in SWEEPS:
        skipped = LOSS
    elif r["dtype"] == "float32":
        skipped = PRECISION
    elif r["d"] % 8 or r["b"] % 128 or r["d"] == 700:
        skipped = PADDED
    elif not captured and (r["b"] <= 16_384 or _host_bound(r)):
        skipped = HOST
    what = f"{r['loss']} {kind or 'default'}".strip()
    rate = 1e12 * r["product_tflops"] if r.get("product_tflops") else Gpu().product_rate
    work = Workload(r["b"] // n, r["d"], sweeps)
    return Measured(
        *(file, what, n, work, schedule, r["ms"], rate),
        memory=r.get("extra_bytes"),
        transfers=kind != "no-transfers",
        fitted=(fitted or (file, kind) == ("scaling", "captured")) and not skipped,
        skipped=skipped,
    )


def _host_bound(r: Record) -> bool:
    """Whether the launches of a short step take almost as long as the step."""
    return r["ms"] < 30 and (r.get("host_ms") or 0) > 0.8 * r["ms"]


def turns(results: Path) -> Iterator[Measured]:
    """Contenders in alternation."""
    found = read(results, "turns-2gpu")["records"]
    rate = rate_of(found[0]["ms"], found[0]["b"])
    for r in found:
        alone = r["contender"] == "alone"
        n = 1 if alone else r["n_devices"]
        kind = "" if alone else r["contender"].removeprefix("megabatch")
        yield _clip(
            *("turns-2gpu", kind.removeprefix("-") or r["contender"], n, r["b"], r["ms"]),
            schedule=Grid((n, 1), overlap=kind != "-no-overlap"),
            rate=rate,
            transfers=kind != "-no-transfers",
        )


def gathering(results: Path) -> Iterator[Measured]:
    """How much to gather at once; 0: the ring."""
    found = read(results, "gathering-4gpu")["records"]
    rate = rate_of(_median(found[0]["rank_0_ms"]), found[0]["b"])
    for r in found:
        n, b, overlap = r["n_devices"], r["b"], r["overlap"]
        size, rows = r["gathered_mib"] * MIB, r["b"] // r["n_devices"]
        schedule: Schedule = Ring(overlap=overlap)
        if n == 1:
            schedule = Grid((1, 1))
        elif size:
            step = min(rows, size // (2 * r["d"] * n))
            schedule = Rounds((n, 1), overlap=overlap, step=step)
        what = f"{r['gathered_mib']} MiB at once, overlap {'on' if overlap else 'off'}"
        yield _clip("gathering-4gpu", what, n, b, _median(r["rank_0_ms"]), schedule, rate)


def _median(numbers: Any) -> float:
    """The median of lists of numbers of any depth."""
    return float(np.median(np.concatenate([np.ravel(some) for some in numbers])))


def transfers(results: Path) -> Iterator[Measured]:
    """Ways to transfer."""
    earlier = ""
    found = read(results, "transfers-4gpu")["records"]
    rates = {
        r["run"][0]: rate_of(statistics.median(r["ms"]), r["b"])
        for r in found
        if (r["how"], r["loss"], r["b"]) == ("one GPU", "clip", 262_144)
    }
    for r in found:
        how, n, b = r["how"], r["gpus"], r["b"]
        waits = how.startswith("the same, every transfer waited for")
        earlier = earlier if waits else how
        schedule: Schedule = Grid((n, 1), overlap=not waits)
        if earlier.startswith("ring"):
            schedule = Ring(overlap=not waits)
        other = "copies by copy engines" in earlier or "PRIORITY" in how or "NCHANNELS" in r["run"]
        skipped = VARIANT if other and n > 1 and how != "no transfers" else ""
        if b <= 16_384:
            skipped = HOST
        elif r["loss"] == "siglip" and b == 65_536 and n > 1:
            skipped = OLD_HOST
        yield _clip(
            *("transfers-4gpu", f"{r['loss']} {how}", n, b, statistics.median(r["ms"]), schedule),
            rate=rates[r["run"][0]],
            sweeps=SWEEPS[r["loss"]],
            transfers=how != "no transfers",
            skipped=skipped,
        )


def hiding(results: Path) -> Iterator[Measured]:
    """Ways to hide transfers."""
    for n in (2, 4):
        file = f"hiding-{n}gpu"
        for run in read(results, file)["runs"]:
            for size, ways in run.items():
                if not isinstance(ways, dict) or not size.split()[0].isdigit():
                    continue
                for how, ms in ways.items():
                    yield _hidden(file, n, size, how, ms)


def _hidden(file: str, n: int, size: str, how: str, ms: list[Any]) -> Measured:
    b = int(size.split()[0])
    rows = b // n
    known: dict[str, Schedule] = {
        "everything at once": Grid((n, 1), overlap=False),
        "no transfers": Grid((n, 1)),
        "own columns first": Grid((n, 1)),
        "beside it, which begins 10 us before": Grid((n, 1)),
        "4 rounds, features gathered again": Rounds((n, 1), step=rows // 4),
    }
    if how.startswith("two by two"):
        known[how] = Grid((2, 2), overlap=False)
    skipped = "" if how in known and "on two" not in size else VARIANT
    return _clip(
        *(file, f"{size} {how}", n, b, _median(ms), known.get(how, Grid((n, 1)))),
        sweeps=SWEEPS["siglip" if "sigmoid" in size else "clip"],
        transfers=how != "no transfers",
        skipped=skipped,
    )


def prototype(results: Path) -> Iterator[Measured]:
    """The first ring."""
    found = read(results, "ring-4gpu-prototype")
    alone = next(r for r in found if r["what"] == "strong" and (r["n"], r["b"]) == (1, 262_144))
    for r in found:
        if r["what"] not in ("strong", "big"):
            continue
        n, b = r["n"], r["b"]
        skipped = HOST if b <= 16_384 else ""
        schedule: Schedule = Ring() if n > 1 else Grid((1, 1))
        rate = rate_of(alone["ms"], alone["b"])
        yield _clip("ring-4gpu-prototype", "ring", n, b, r["ms"], schedule, rate, skipped=skipped)


def rate_of(alone_ms: float, b: int) -> float:
    """The product rate with which the simulation of CLIP's loss on one GPU takes so long."""
    gpu, operations = Gpu(), 8 * b**2 * 768
    seconds = 1e-3 * alone_ms - 2 * gpu.chunk
    return gpu.product_rate * gpu.sweep_seconds(operations, 768) / seconds


def _clip(
    file: str,
    what: str,
    n: int,
    b: int,
    ms: float,
    schedule: Schedule,
    rate: float = PRODUCT_RATE,
    sweeps: tuple[int, ...] = (2, 6),
    transfers: bool = True,
    skipped: str = "",
) -> Measured:
    """A record of width 768, without a product rate of its own."""
    work = Workload(b // n, 768, sweeps)
    fitted = n == 1 and rate != PRODUCT_RATE and not skipped
    return Measured(
        *(file, what, n, work, schedule, ms, rate),
        transfers=transfers,
        fitted=fitted,
        skipped=skipped,
    )
