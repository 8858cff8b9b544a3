"""Several GPUs of one host: strong scaling, overlap, peers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from megabatch.benchmarking.report.loss import TITLES, summary_largest
from megabatch.benchmarking.report.page import Answer, Part, Section
from megabatch.benchmarking.report.record_files import Record, RecordFile
from megabatch.benchmarking.report.tables import (
    NONE,
    gib,
    grouped,
    markdown,
    milliseconds,
    pick,
    share,
    value,
)

VARIANTS = {
    "megabatch": "as it is",
    "megabatch-no-overlap": "overlap off",
    "megabatch-no-transfers": "no transfers (a wrong result)",
    "megabatch-rounds": "in rounds of 96 MiB",
    "megabatch-ring": "ring",
}


def strong(files: Sequence[RecordFile]) -> Iterator[str]:
    """The same batch on more and more GPUs."""
    for file in files:
        found = [r for r in file.measured if r["contender"] == "megabatch"]
        counts = sorted({r["n_devices"] for r in found})
        rows = []
        found.sort(key=lambda r: (r["loss"], -r["b"]))
        for (loss, b), group in grouped(found, "loss", "b"):
            if len({r["n_devices"] for r in group}) > 1:
                cells = (_cell(pick(group, n_devices=n)) for n in counts)
                rows.append((f"{TITLES[str(loss)]}, {b:,} pairs", *cells))
        yield from markdown(("", *(f"{n} GPU{'s' if n > 1 else ''}" for n in counts)), rows)


def _cell(record: Record | None) -> str:
    if record is None:
        return NONE
    ideal = record["of_ideal"] if record["n_devices"] > 1 else None
    return milliseconds(record["ms"]) + (f", {share(ideal)}" if ideal else "")


def large(files: Sequence[RecordFile]) -> Iterator[str]:
    """The largest batches, with each GPU's memory."""
    latest: dict[tuple[int, int], Record] = {}
    for file in files:
        for record in file.measured:
            if record["b"] >= 2**20 and record["contender"] == "megabatch":
                latest[record["n_devices"], record["b"]] = record
    rows = [
        (
            f"{b:,} pairs, {n} GPU{'s' if n > 1 else ''}",
            milliseconds(r["ms"]),
            gib(r["extra_bytes"]),
        )
        for (n, b), r in sorted(latest.items(), key=lambda item: item[0][::-1])
    ]
    if rows:
        yield from markdown(("CLIP's loss, d = 768", "time", "memory of a GPU"), rows)


def overlap(files: Sequence[RecordFile]) -> Iterator[str]:
    """Schedules of one batch: with and without overlap, without transfers, other schedules."""
    rows = []
    for file in files:
        for (loss, b, n), group in grouped(file.measured, "loss", "b", "n_devices"):
            if not any(r["contender"] == "megabatch-no-overlap" for r in group):
                continue
            cells = (_cell(pick(group, contender=name)) for name in VARIANTS)
            rows.append((f"{file.name}: {TITLES[str(loss)]}, {b:,}, {n} GPUs", *cells))
    if rows:
        yield from markdown(("record: loss, pairs", *VARIANTS.values()), rows)


def grids(files: Sequence[RecordFile]) -> Iterator[str]:
    """Grids of ranks, unequal shards and x against itself, with the default of equal shards."""
    rows = [
        (f"{record['contender']}, {record['b']:,}", milliseconds(record["ms"]))
        for file in files
        for record in file.measured
    ]
    if rows:
        yield from markdown(("schedule, rows of the batch", "time"), rows)


def peers(files: Sequence[RecordFile]) -> Iterator[str]:
    """All implementations on the most GPUs."""
    for file in files:
        most = max(r["n_devices"] for r in file.measured)
        rows = []
        for (loss, b), group in grouped(
            [r for r in file.measured if r["n_devices"] == most], "loss", "b"
        ):
            apart = [r for r in group if r["contender"] not in VARIANTS]
            if not apart:
                continue
            for record in [pick(group, contender="megabatch"), *apart]:
                if record is not None:
                    rows.append(
                        (
                            f"{TITLES[str(loss)]}, {b:,}: {record['contender']}",
                            milliseconds(record["ms"]),
                            milliseconds(record["queued_ms"]),
                            gib(record["extra_bytes"]),
                            record["note"],
                        )
                    )
        head = f"on {most} GPUs", "time", "busy GPU", "memory of a GPU", "result"
        yield from markdown(head, rows)


def later(files: Sequence[RecordFile]) -> Iterator[str]:
    """Later and earlier runs: times on one GPU and on several, and the share of ideal."""
    rows = []
    for file in files:
        found = [r for r in file.measured if r["contender"] in ("alone", "megabatch")]
        for (loss, b), group in grouped(found, "loss", "b"):
            alone = value(group, "ms", n_devices=1)
            for record in group:
                if record["n_devices"] == 1 or alone is None:
                    continue
                ideal = record.get("of_ideal") or alone / record["n_devices"] / record["ms"]
                rows.append(
                    (
                        f"{file.date}, {file.name}",
                        f"{TITLES[str(loss)]}, {b:,}",
                        milliseconds(alone),
                        f"{milliseconds(record['ms'])} on {record['n_devices']}",
                        share(ideal),
                    )
                )
    if rows:
        yield from markdown(("run", "loss, pairs", "one GPU", "several", "of ideal"), rows)


def summary(file: RecordFile) -> str:
    """The summary's line: the most GPUs at three sizes."""
    most = max(r["n_devices"] for r in file.measured)
    found = [
        (
            b,
            value(
                file.measured, "of_ideal", contender="megabatch", b=b, n_devices=most, loss="clip"
            ),
        )
        for b in (65_536, 262_144, 1_048_576)
    ]
    known = [f"{share(ideal)} at {b:,} pairs" for b, ideal in found if ideal]
    return f"{most} GPUs of one host, of ideal: {', '.join(known)}" if known else ""


SECTION = Section(
    "How does it scale to several GPUs?",
    (
        Part(
            "The same batch on more GPUs",
            ("scaling",),
            strong,
            """The time for bfloat16, d = 768, on GPUs of one host, and the share of the ideal,
            which is the time of one GPU divided by the number of GPUs. At 16,384 pairs launching
            the kernels takes longer than the GPUs' work.""",
            (("scaling.png", "Share of ideal and memory over the number of GPUs"),),
        ),
        Part("Large batches", ("scaling", "rounds-2gpu"), large),
        Part(
            "Overlap on and off",
            ("scaling", "turns-2gpu"),
            overlap,
            """"No transfers" is the computation alone, the best that any overlap can reach.
            Contenders in `scaling` ran one after another, during which the speed of GPUs fluctuates
            by a per cent; those in `turns-2gpu` took turns.""",
        ),
        Part(
            "Grids, unequal shards, x against itself",
            ("grid",),
            grids,
            """bfloat16, d = 768, measured in turns. `alone` is CLIP's loss on one GPU, `megabatch`
            the same on all, and `-columns` on a grid with that many columns of ranks. In `unequal`
            every second rank has one row less; `unequal-gathered` is the schedule for this between
            hosts. `nt-xent` has twice as many rows, which are compared with themselves.""",
        ),
        Part("Compared with others", ("scaling",), peers),
        Part(
            "Other runs",
            (
                "scaling-own-first",
                "scaling-2gpu",
                "scaling-2gpu-engine",
                "turns-2gpu",
                "turns-2gpu-engine",
            ),
            later,
        ),
    ),
    (
        Answer("Several GPUs of one host", ("scaling",), summary),
        Answer("The largest batch on several GPUs", ("scaling",), summary_largest),
    ),
)
