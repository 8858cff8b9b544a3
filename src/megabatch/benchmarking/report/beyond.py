"""More than one machine: simulated GPUs, and two emulated hosts."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence

from megabatch.benchmarking.report.page import Part, Section
from megabatch.benchmarking.report.record_files import Record, RecordFile
from megabatch.benchmarking.report.tables import (
    NONE,
    count,
    digits,
    error,
    gib,
    grouped,
    markdown,
    milliseconds,
    seconds,
    share,
    value,
)

#: Numbers of GPUs in the simulation's sweep, and rows of each GPU.
GPUS, ROWS = (8, 64, 1024, 4096), (1024, 8192, 32_768)


def simulated(files: Sequence[RecordFile]) -> Iterator[str]:
    """The best schedule on many GPUs."""
    rows = []
    for file in files:
        usual = [r for r in file.content["simulated"] if not r["cluster"]]
        for (gpus, each), group in grouped(usual, "gpus", "rows"):
            if gpus not in GPUS or each not in ROWS:
                continue
            best = min(group, key=lambda r: float(r["seconds"]))
            kinds = (share(value(group, "efficiency", kind=k)) for k in ("ring", "gather", "grid"))
            rows.append(
                (
                    f"{gpus:,} x {each:,}",
                    *kinds,
                    f"{best['schedule']}: {seconds(best['seconds'])}",
                    seconds(best["exposed"]),
                    gib(best["memory"]),
                    share(max(r["step_efficiency"] for r in group)),
                )
            )
    head = "GPUs x rows of each", "ring", "gather", "grid", "best, time of the loss"
    yield from markdown((*head, "exposed transfers", "memory", "training step"), rows)


def check(files: Sequence[RecordFile]) -> Iterator[str]:
    """The simulation's deviation from each record."""
    rows = []
    for file in files:
        for (name,), group in grouped(file.content["comparison"], "file"):
            compared = [abs(r["deviation"]) for r in group if not r["skipped"]]
            if compared:
                fitted = sum(bool(r["fitted"]) for r in group if not r["skipped"])
                middle, most = statistics.median(compared), max(compared)
                counts = count(len(compared)), count(fitted), count(len(group) - len(compared))
                rows.append((str(name), *counts, share(middle), share(most)))
    head = "record", "compared", "of them fitted", "not compared", "median deviation", "largest"
    yield from markdown(head, rows)


def steps(files: Sequence[RecordFile]) -> Iterator[str]:
    """Steps on two hosts, by schedule and speed of the link."""
    for file in files:
        found = [r for r in file.records if "schedule" in r and "mbit" in r]
        speeds = list(dict.fromkeys(r["mbit"] for r in found))
        rows = []
        for (schedule,), group in grouped(found, "schedule"):
            cells = (milliseconds(value(group, "ms", mbit=mbit)) for mbit in speeds)
            rows.append((str(schedule), *cells, f"{digits(group[0]['received_bytes'] / 1e6)} MB"))
        if rows:
            heads = ("no limit" if mbit is None else f"{mbit:,} Mbit/s" for mbit in speeds)
            yield from markdown(("schedule", *heads, "received by a host"), rows)


def failures(files: Sequence[RecordFile]) -> Iterator[str]:
    """How soon ranks raise an error after a failure."""
    rows = [
        (_event(r), r.get("schedule", NONE), _span(r), f"{r['timeout_s']} s")
        for file in files
        for r in file.records
        if "timeout_s" in r and r.get("seconds")
    ]
    rows += [
        (
            f"the link is down for {r['stall_s']} s",
            r["schedule"],
            f"the step ends {seconds(r['ended_s_after_stall'])} after it is back, with the same "
            f"gradients: {'yes' if r['same_gradients'] else 'no'}",
            NONE,
        )
        for file in files
        for r in file.records
        if "stall_s" in r
    ]
    if rows:
        head = "event", "schedule", "the other ranks raise an error after", "timeout"
        yield from markdown(head, rows)


def _event(record: Record) -> str:
    events = {
        "late": "a rank never makes its call",
        "host dies": "all processes of a host are killed",
        "host vanishes": "a host disappears silently",
        "link dies": "the link goes down silently",
    }
    scenario: str = record["scenario"]
    return events.get(scenario, scenario)


def _span(record: Record) -> str:
    low, high = min(record["seconds"]), max(record["seconds"])
    return f"{low:.1f} s" if f"{low:.1f}" == f"{high:.1f}" else f"{low:.1f} to {high:.1f} s"


def trainings(files: Sequence[RecordFile]) -> Iterator[str]:
    """`torchrun` over two hosts, compared with one."""
    rows = []
    for file in files:
        for r in file.records:
            if r["scenario"] == "training" and r.get("loss_difference") is not None:
                same = "yes" if r.get("same_weights") else "no"
                rows.append((r["run"], error(r["loss_difference"]), same))
    if rows:
        yield from markdown(("run", "losses differ by", "the same weights, bit for bit"), rows)


SIMULATED = Section(
    "Thousands of GPUs, simulated",
    (
        Part(
            "Simulated: CLIP's loss, and a training step of ViT-B/32",
            ("simulation",),
            simulated,
            """Efficiency is the time of the computation alone as a share of the whole time. Nodes
            of 8 H200s with 8 NICs of 400 Gbit/s, bfloat16, d = 768.""",
            (("simulation.png", "Simulated efficiency by schedule, rows and number of GPUs"),),
        ),
        Part("The simulation compared with measurements", ("simulation",), check),
    ),
    text="""Nothing in this section was measured on more than four GPUs. `docs/simulation.md`
    describes the model and its limits.""",
)
HOSTS = Section(
    "Two hosts",
    (
        Part(
            "Steps by schedule and speed of the link",
            ("two-hosts",),
            steps,
            """CLIP's loss, unless NT-Xent is named; 512 rows of 512 float32 numbers on each
            rank.""",
        ),
        Part("Failures", ("two-hosts", "two-hosts-training"), failures),
        Part("Training over two hosts, compared with one", ("two-hosts-training",), trainings),
    ),
    text="""Two hosts emulated on one machine with two busy cores, two CPU ranks on each: the
    figures show which schedule waits for the link, not what a cluster achieves. `docs/two-hosts.md`
    has the details.""",
)
