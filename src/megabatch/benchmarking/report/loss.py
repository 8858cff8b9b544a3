"""One GPU: the memory and the time of losses."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

from megabatch.benchmarking.report import published
from megabatch.benchmarking.report.page import Answer, Part, Section
from megabatch.benchmarking.report.record_files import Record, RecordFile
from megabatch.benchmarking.report.tables import (
    NONE,
    count,
    error,
    gib,
    markdown,
    milliseconds,
    pick,
    share,
    times,
    value,
)

#: The case that all implementations share: its fields' values.
USUAL = {"dtype": "bfloat16", "d": 768, "scale": 14.3, "features": "pairs", "n": None}
TITLES = {"clip": "CLIP's loss", "siglip": "SigLIP's loss"}


def usual(file: RecordFile, loss: str) -> list[Record]:
    """The records of one loss, forward and backward, in the case that all contenders share."""
    wanted = {**USUAL, "loss": loss, "backward": True}
    return [r for r in file.measured if all(r.get(k) == v for k, v in wanted.items())]


def _by_size(
    file: RecordFile, cell: Callable[[Record], str], ratio: str | None = None
) -> Iterator[str]:
    """For each loss a table with a row for each contender and a column for each size."""
    for loss, title in TITLES.items():
        found = usual(file, loss)
        names = list(dict.fromkeys(r["contender"] for r in found))
        sizes = sorted({r["b"] for r in found if r["contender"] != "megabatch"})
        if len(names) < 2:
            continue
        rows = []
        for name in names:
            cells = [pick(found, contender=name, b=b) for b in sizes]
            rows.append((name, *(NONE if one is None else cell(one) for one in cells)))
        if ratio and "openclip" in names:
            rows.append(("OpenCLIP's over megabatch's", *_ratios(found, sizes, ratio)))
        yield from markdown((title, *(f"{b:,} pairs" for b in sizes)), rows)


def _ratios(found: Sequence[Record], sizes: Sequence[int], field: str) -> Iterator[str]:
    for b in sizes:
        mine, theirs = (
            value(found, field, contender=name, b=b) for name in ("megabatch", "openclip")
        )
        yield times(theirs / mine) if mine and theirs else NONE


def memory(files: Sequence[RecordFile]) -> Iterator[str]:
    """Memory besides inputs and gradients, by contender and size."""
    for file in files:
        yield from _by_size(file, lambda record: gib(record["extra_bytes"]), "extra_bytes")


def time(files: Sequence[RecordFile]) -> Iterator[str]:
    """Time and share of the product's rate, by contender and size."""
    for file in files:
        yield from _by_size(file, _time, "ms")


def _time(record: Record) -> str:
    return f"{milliseconds(record['ms'])}, {share(record['fraction'])}"


def other_cases(files: Sequence[RecordFile]) -> Iterator[str]:
    """This library alone: every case that the tables above leave out."""
    rows = []
    for file in files:
        shared = {r["b"] for loss in TITLES for r in usual(file, loss) if r["contender"] == "dense"}
        for record in file.measured:
            beside = record in usual(file, record["loss"]) and record["b"] in shared
            if record["contender"] != "megabatch" or beside:
                continue
            rows.append((_case(record), *_figures(record)))
    if rows:
        yield from markdown(("case", "time", "of the rate", "memory", "a row's error"), rows)


def _case(record: Record) -> str:
    """A description of a record's case."""
    name = TITLES.get(record["loss"], record["loss"])
    size = f"{record['b']:,}" + (f" x {record['n']:,}" if record.get("n") else "")
    dtype = record["dtype"] + (" (TF32)" if record.get("tf32") else "")
    parts = [name, size, f"d = {record['d']:,}", dtype]
    if (record["features"], record["scale"]) != (USUAL["features"], USUAL["scale"]):
        parts.append(f"{record['features']}, scale {record['scale']:g}")
    return ", ".join(parts if record["backward"] else [*parts, "forward alone"])


def _figures(record: Record) -> tuple[str, ...]:
    return (
        milliseconds(record["ms"]),
        share(record["fraction"]),
        gib(record["extra_bytes"]),
        error(record["max_row_error"]),
    )


def small(files: Sequence[RecordFile]) -> Iterator[str]:
    """Small batches: called alone, and on a GPU that has other work."""
    found = [r for file in files for r in usual(file, "clip") if r["b"] <= 16_384]
    rows = [
        (
            f"{record['b']:,} pairs, {record['contender']}",
            milliseconds(record["ms"]),
            milliseconds(record["queued_ms"]),
        )
        for record in sorted(found, key=lambda r: int(r["b"]))
        if record["contender"].startswith(("megabatch", "dense-"))
    ]
    if rows:
        yield from markdown(("", "called alone", "GPU busy with earlier work"), rows)


def again(files: Sequence[RecordFile]) -> Iterator[str]:
    """All records of these files in one table."""
    rows = [
        (file.date, record["contender"], _case(record), *_figures(record))
        for file in files
        for record in file.measured
        if record["contender"].startswith("megabatch")
    ]
    if rows:
        head = "day", "contender", "case", "time", "of the rate", "memory", "a row's error"
        yield from markdown(head, rows)


def family(files: Sequence[RecordFile]) -> Iterator[str]:
    """Other losses: every record of the files, a later file's in place of an earlier one's."""
    latest: dict[tuple[str, str], Record] = {}
    for file in files:
        for record in file.measured:
            latest[_case(record), record["contender"]] = record
    ordered = sorted(latest, key=lambda key: (latest[key]["loss"], latest[key]["b"], *key))
    rows = [(*key, *_figures(latest[key])) for key in ordered]
    head = "case", "contender", "time", "of the rate", "memory", "a row's error"
    yield from markdown(head, rows)


def tiling(files: Sequence[RecordFile]) -> Iterator[str]:
    """CLIP's loss by size of blocks, in two sweeps, and as one block."""
    rows = [
        (
            f"{record['b']:,}, d = {record['d']:,}: {_blocks(record['contender'])}",
            milliseconds(record["ms"]),
            share(record["fraction"]),
            gib(record["extra_bytes"]),
        )
        for file in files
        for record in file.measured
    ]
    if rows:
        yield from markdown(("CLIP's loss", "time", "of the rate", "memory"), rows)


def _blocks(contender: str) -> str:
    """The rows of a block in half precision in the contender's workspace."""
    if not contender.startswith("workspace"):
        return {"dense-compiled": "one block: dense under torch.compile"}.get(contender, contender)
    bytes_of_block = int(contender.split()[1]) << 20
    return f"blocks of {math.isqrt(bytes_of_block // 2):,} rows"


def directions(files: Sequence[RecordFile]) -> Iterator[str]:
    """CLIP's loss and losses of one direction, of the same run."""
    rows = []
    for file in files:
        usual_size = [r for r in file.measured if (r["b"], r["d"]) == (65_536, 768)]
        both = value(usual_size, "ms", loss="clip", contender="megabatch", features="pairs")
        one = value(usual_size, "ms", loss="infonce-ids", contender="megabatch", features="pairs")
        if both is not None and one is not None:
            rows += [
                ("`ClipLoss`, both directions", milliseconds(both)),
                ("`InfoNCELoss`, one direction, with ids", milliseconds(one)),
                ("computed: twice the one direction", milliseconds(2 * one)),
            ]
    if rows:
        yield from markdown(("65,536 pairs, d = 768, bfloat16", "time"), rows)


def distillation(files: Sequence[RecordFile]) -> Iterator[str]:
    """CLIP's loss with a teacher."""
    rows = [
        (
            f"{r['contender']}, {r['b']:,} pairs, d = {r['d']}, teacher's {r['teacher_d']}",
            *_figures(r),
        )
        for file in files
        for r in file.measured
    ]
    yield from markdown(("", "time", "of the rate", "memory", "a row's error"), rows)


def ranking(files: Sequence[RecordFile]) -> Iterator[str]:
    """Ranks and the best columns."""
    rows = [
        (
            f"{r['function']}, {r['rows']:,} rows, d = {r['d']}",
            milliseconds(r["ms"]),
            milliseconds(r["blocks_ms"]),
            f"{r['extra_mib']:,} MiB",
            count(r["different"]),
        )
        for file in files
        for r in file.measured
    ]
    yield from markdown(("", "fused", "products of blocks", "memory", "entries that differ"), rows)


def on_the_cpu(files: Sequence[RecordFile]) -> Iterator[str]:
    """CLIP's loss on a CPU, by contender."""
    rows = [
        (
            f"{r['b']:,} pairs, d = {r['d']}: {r['contender']}",
            milliseconds(r["ms"]),
            share(r.get("fraction")),
            gib(r.get("extra_bytes") or r.get("peak_bytes_of_the_process")),
            "the whole process"
            if "peak_bytes_of_the_process" in r
            else "besides inputs, gradients",
        )
        for file in files
        for r in file.measured
    ]
    yield from markdown(("", "time", "of the rate", "memory", "of what"), rows)


def summary_memory(file: RecordFile) -> str:
    """The summary's line on memory."""
    return _beside(usual(file, "clip"), "extra_bytes", gib)


def summary_time(file: RecordFile) -> str:
    """The summary's line on time."""
    found = usual(file, "clip")
    text = _beside(found, "ms", milliseconds)
    rate = value(found, "fraction", contender="megabatch", b=65_536)
    return f"{text}; {share(rate)} of the rate of large matrix products" if text else ""


def summary_largest(file: RecordFile) -> str:
    """The summary's line on the largest batch, of any number of GPUs."""
    found = [r for r in file.measured if r["contender"] == "megabatch" and r["backward"]]
    if not found:
        return ""
    largest = max(found, key=lambda r: r["b"])
    n = largest["n_devices"]
    return (
        f"{largest['b']:,} pairs, d = {largest['d']:,}, loss and gradients, "
        f"on {n} GPU{'s' if n > 1 else ''}: "
        f"{milliseconds(largest['ms'])}, {gib(largest['extra_bytes'])}{' on each' if n > 1 else ''}"
    )


def _beside(found: Sequence[Record], field: str, shown: Callable[[float | None], str]) -> str:
    names = {"megabatch": "megabatch", "dense-compiled": "dense under torch.compile"}
    names["openclip"] = "OpenCLIP's loss"
    figures = {
        title: value(found, field, contender=name, b=65_536) for name, title in names.items()
    }
    if any(number is None for number in figures.values()):
        return ""
    return ", ".join(f"{title} {shown(number)}" for title, number in figures.items())


def summary_cpu(file: RecordFile) -> str:
    """The summary's line on the CPU."""
    found = [r for r in file.measured if r["contender"] in ("megabatch", "openclip")]
    return ", ".join(
        f"{'OpenCLIP' if r['contender'] == 'openclip' else r['contender']} "
        f"{milliseconds(r['ms'])} and {gib(r['extra_bytes'])}"
        for r in found
    )


MEMORY = Section(
    "How much memory does the loss take?",
    (
        Part(
            "One GPU",
            ("single-gpu",),
            memory,
            """The peak memory of a forward and backward pass, not counting inputs and returned
            gradients; bfloat16, d = 768.""",
            (("single-gpu-memory.png", "Memory of the loss over the batch size"),),
        ),
        Part(
            "Compared with the paper's figures",
            ("single-gpu", "scaling"),
            published.loss_memory,
            f"""Reported by {published.PAPER} for ViT-L/14 on 8 A800 80GB, in GB; measured here
            without inputs and returned gradients, d = 768. The numbers of GPUs differ: compare rows
            of one kind only. The paper's ratios of 78 and 281 refer to fitted curves, not to
            measurements.""",
        ),
    ),
    (Answer("Memory of the loss, 65,536 pairs, one GPU", ("single-gpu",), summary_memory),),
)
SPEED = Section(
    "How fast is the loss on one GPU?",
    (
        Part(
            "CLIP's and SigLIP's loss, compared with others",
            ("single-gpu",),
            time,
            """The time of forward and backward, bfloat16, d = 768, called alone, and the share of
            the rate of a large matrix product, counting the operations that no implementation can
            avoid (8 b² d; 6 b² d for SigLIP's loss).""",
            (
                ("single-gpu-time.png", "Time of the loss over the batch size"),
                ("single-gpu-fraction.png", "Share of the product's rate over the batch size"),
            ),
        ),
        Part(
            "Small batches",
            ("single-gpu-small",),
            small,
            """Below 16,384 pairs launching the kernels takes longer than the GPU's work, which
            matters only if the GPU has no other work. "Captured" means as CUDA graphs.""",
        ),
        Part(
            "Other sizes, widths and dtypes",
            ("single-gpu", "single-gpu-4m*", "single-gpu-16m"),
            other_cases,
        ),
        Part("Later runs", ("single-gpu-engine", "single-gpu-graph"), again),
        Part(
            "The time that tiling costs",
            ("tiling*",),
            tiling,
            """CLIP's loss in bfloat16, by the number of rows in a block of the matrix; the
            workspace decides it. A block has fewer columns than rows if vectors of all rows and
            columns need a part of the workspace: in these runs blocks of 2,048 rows had 512
            columns, and those of 4,096 rows 1,536 to 3,072. Now they would have 1,024, and 2,048 to
            3,072. "Two sweeps" computes each direction with a loss of its own.""",
        ),
        Part(
            "Both directions from one matrix",
            ("losses",),
            directions,
            """CLIP's loss computes both directions in one sweep over the matrix; two losses of one
            direction need two sweeps.""",
        ),
        Part(
            "Other losses",
            ("losses", "losses-siglip", "losses-symmetric"),
            family,
            "`general` computes all tiles of x against itself instead of half of them.",
            (("losses.png", "Share of the matrix product's rate of each loss"),),
        ),
        Part("Distillation", ("distillation",), distillation),
        Part("Ranks and the best columns", ("ranking",), ranking),
        Part("On a CPU", ("bench-loss-cpu", "clip-cpu-*"), on_the_cpu, "Two cores, float32."),
    ),
    (
        Answer("Time of the loss, 65,536 pairs, one GPU", ("single-gpu",), summary_time),
        Answer("The largest batch on one GPU", ("single-gpu-4m-backward",), summary_largest),
        Answer("The loss on two CPU cores, 16,384 pairs", ("clip-cpu-16k",), summary_cpu),
    ),
)
