"""The paper's tables: memory and time of a step up to the largest batch that fits."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from megabatch.benchmarking.report.page import Answer, Part, Section
from megabatch.benchmarking.report.record_files import Record, RecordFile
from megabatch.benchmarking.report.tables import (
    NONE,
    count,
    gib,
    grouped,
    markdown,
    pick,
    seconds,
)

#: Names of the rows, by (what was measured, contender, where the batch is).
LINES = {
    ("step", "megabatch", "host"): "megabatch, batch on the host",
    ("step", "megabatch", "device"): "megabatch, batch on the GPU",
    ("step", "openclip", "device"): "OpenCLIP's loop",
    ("loss", "megabatch", "device"): "the loss alone: megabatch",
    ("loss", "openclip", "device"): "the loss alone: OpenCLIP's",
}


def memory(files: Sequence[RecordFile]) -> Iterator[str]:
    """A GPU's peak of memory by batch size."""
    return _by_size(files, lambda record: gib(record["peak_bytes"]))


def time(files: Sequence[RecordFile]) -> Iterator[str]:
    """The time of a step, and pairs a second, by batch size."""
    return _by_size(files, _time)


def _time(record: Record) -> str:
    rate = record["pairs_a_second"]
    shown = seconds(record["seconds"]) + ("" if rate is None else f", {count(rate, 'pairs/s')}")
    return f"{shown} (extrapolated)" if record["extrapolated"] else shown


def _by_size(files: Sequence[RecordFile], cell: Callable[[Record], str]) -> Iterator[str]:
    """For each model and number of GPUs a table with a column for each batch size."""
    found = [record for file in files for record in file.records]
    for (model, n), group in grouped(found, "model", "n_devices"):
        sizes = sorted({r["b"] for r in group})
        rows = []
        for (measured, contender, inputs), name in LINES.items():
            wanted = {"measured": measured, "contender": contender, "inputs": inputs}
            cells = [pick(group, b=b, **wanted) for b in sizes]
            if any(cells):
                rows.append((name, *(NONE if one is None else _cell(one, cell) for one in cells)))
        gpus = "one GPU" if n == 1 else f"{n} GPUs"
        micro = ", ".join(f"{m:,}" for m in sorted({r["micro_batch_size"] for r in group}))
        head = f"{model}, {gpus}, micro-batches of {micro}"
        yield from markdown((head, *(f"{b:,} pairs" for b in sizes)), rows)


def _cell(record: Record, cell: Callable[[Record], str]) -> str:
    return cell(record) if record["status"] == "ok" else str(record["status"])


def largest(file: RecordFile) -> str:
    """The summary's line: the largest step of each model."""
    found = []
    steps = [r for r in file.measured if (r["measured"], r["contender"]) == ("step", "megabatch")]
    for (model,), group in grouped(steps, "model"):
        one = max(group, key=lambda r: int(r["b"]))
        how = ", time extrapolated" if one["extrapolated"] else ""
        found.append(
            f"{model} {one['b']:,} pairs on {one['n_devices']} GPU{'s' * (one['n_devices'] > 1)}, "
            f"{gib(one['peak_bytes'])} of each{how}"
        )
    return "; ".join(found)


SECTION = Section(
    "How large can the batch of a step be?",
    (
        Part(
            "Memory",
            ("paper-tables*",),
            memory,
            """The peak memory of a GPU in a step with the whole batch, without kept activations,
            and of the loss alone, not counting its inputs and returned gradients. Where the time
            is extrapolated, the towers ran on 6 micro-batches of each pass.""",
            (("paper-tables*.png", "Peak memory over the batch size"),),
        ),
        Part(
            "Time",
            ("paper-tables*",),
            time,
            """If a time is extrapolated, the towers ran on 6 micro-batches of each pass, and the
            time of the others was added; the loss and everything else was computed for the whole
            batch. Such times are somewhat short, probably since a GPU that rests between the
            micro-batches that run is at higher clocks.""",
        ),
    ),
    (Answer("The largest measured step", ("paper-tables",), largest),),
)
