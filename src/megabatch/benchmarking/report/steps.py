"""Whole training steps: this trainer, OpenCLIP's and sentence-transformers'."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from megabatch.benchmarking.report import published
from megabatch.benchmarking.report.page import Answer, Part, Section
from megabatch.benchmarking.report.record_files import Record, RecordFile
from megabatch.benchmarking.report.tables import (
    NONE,
    count,
    error,
    gib,
    grouped,
    markdown,
    milliseconds,
    pick,
    seconds,
    share,
    times,
)

#: Trainers by contender.
TRAINERS = {
    "megabatch": "megabatch",
    "megabatch-eager": "megabatch, not compiled",
    "openclip-compiled": "OpenCLIP's loop, compiled",
    "openclip": "OpenCLIP's loop",
}


def beside_openclip(files: Sequence[RecordFile]) -> Iterator[str]:
    """The fastest record of this trainer and the fastest ones of OpenCLIP's loop."""
    rows = []
    for file in files:
        for (model, b, n), group in grouped(file.measured, "model", "b", "n_devices"):
            ours = fastest(group, "megabatch") or fastest(group, "megabatch-eager")
            others = [fastest(group, name) for name in ("openclip-compiled", "openclip")]
            if ours is not None and any(others):
                size = f"{model}, {b:,} pairs, {_gpus(n)}"
                rows.append((size, _rate(ours), *(_compared(ours, one) for one in others)))
    if rows:
        head = "pairs/s (rows at a time)", "megabatch", "OpenCLIP's loop, compiled", "not compiled"
        yield from markdown(head, rows)


def first_layers(files: Sequence[RecordFile]) -> Iterator[str]:
    """Layers before the first block of images, as torch has them and as the trainer has them."""
    inputs = {"convolution": "of patches", "normalization": "of pixels"}
    names = (
        "convolution",
        "product",
        "product-compiled",
        "normalization",
        "normalization-compiled",
    )
    for file in files:
        rows = [
            (f"{model}, {b:,} images", *(_layer(pick(group, contender=name)) for name in names))
            for (model, b), group in grouped(file.measured, "model", "b")
        ]
        head = (f"{name} {inputs[name]}" if name in inputs else name for name in names)
        yield from markdown(("", *head), rows)


def _layer(record: Record | None) -> str:
    if record is None:
        return NONE
    rate = f", {record['tflops']:.0f} TFLOP/s" if record["tflops"] else ""
    return milliseconds(record["ms"]) + rate


def _gpus(n: object) -> str:
    return "one device" if n == 1 else f"{n} devices"


def _rate(record: Record) -> str:
    return f"{count(record['pairs_a_second'], 'pairs/s')} ({record['micro_batch_size']:,})"


def _compared(ours: Record, theirs: Record | None) -> str:
    """Their rate, and how many times as fast ours is."""
    if theirs is None:
        return NONE
    return f"{_rate(theirs)}: {times(ours['pairs_a_second'] / theirs['pairs_a_second'])}"


def every_step(files: Sequence[RecordFile]) -> Iterator[str]:
    """Every measured step."""
    rows = [
        (
            f"{r['model']}, {r['b']:,} pairs, {_gpus(r['n_devices'])}",
            f"{TRAINERS[r['contender']]}, {r['micro_batch_size']:,}",
            seconds(r["seconds"]),
            count(r["pairs_a_second"], "pairs/s"),
            gib(r["peak_bytes"]),
            str(r["kept_micro_batches"]),
        )
        for file in files
        for r in file.measured
    ]
    head = (
        "model, batch",
        "trainer, rows at a time",
        "a step",
        "rate",
        "peak memory",
        "encoded once",
    )
    yield from markdown(head, rows)


def parts(files: Sequence[RecordFile]) -> Iterator[str]:
    """The parts of a step, in time and as shares."""
    for file in files:
        split = [record for record in file.measured if record["parts"]]
        names = list(dict.fromkeys(itertools.chain.from_iterable(r["parts"] for r in split)))
        rows = []
        for name in names:
            cells = [name]
            for record in split:
                took, whole = record["parts"].get(name, 0.0), sum(record["parts"].values())
                cells.append(f"{seconds(took)}, {share(took / whole)}")
            rows.append(tuple(cells))
        if rows:
            heads = [
                f"{r['contender']}, {r['model']}, {r['b']:,} pairs in {r['micro_batch_size']:,}"
                + (f", step {r['step']}" if "step" in r else "")
                for r in split
            ]
            yield from markdown(("part", *heads), rows)


def towers(files: Sequence[RecordFile]) -> Iterator[str]:
    """Pairs a second of the towers alone."""
    rows = []
    names = "model", "b", "tokens", "contender"
    for file in files:
        for (model, b, tokens, name), group in grouped(file.measured, *names):
            rates = {r["compiled"]: count(r["pairs_a_second"], "pairs/s") for r in group}
            what = f"{model}, {b:,} rows, texts of {tokens}, {name}"
            rows.append((what, rates.get(False, NONE), rates.get(True, NONE)))
    yield from markdown(("towers alone", "eager", "compiled"), rows)


def openclip_trainer(files: Sequence[RecordFile]) -> Iterator[str]:
    """OpenCLIP's unmodified trainer by itself and with this library's loss and caching."""
    rows = [
        (
            f"{r['model']}, {r['b']:,} pairs in {r['accum_freq']} micro-batches",
            "OpenCLIP's trainer" if r["contender"] == "openclip" else "the same with megabatch",
            seconds(r["seconds"]),
            gib(r["extra_bytes"]),
        )
        for file in files
        for r in file.measured
    ]
    yield from markdown(("", "trainer", "a step", "peak memory"), rows)


def million_of_towers(files: Sequence[RecordFile]) -> Iterator[str]:
    """Complete optimizer steps of an open_clip model on the same million pairs, and their parts."""
    for file in files:
        rows = [
            (
                f"{r['step']}",
                seconds(r["seconds"]),
                count(r["pairs_a_second"], "pairs/s"),
                gib(r["peak_bytes"]),
                f"{r['loss_before']:.4f}",
            )
            for r in file.measured
        ]
        if rows:
            one = file.measured[-1]
            what = f"{one['b']:,} pairs of {one['model']}, {_gpus(one['n_devices'])}, "
            what += f"learning rate {one['lr']:g}: step"
            head = what, "time", "rate", "peak memory of a GPU", "loss before it"
            yield from markdown(head, rows)
            yield ""
    yield from parts(files)


def retrievers(files: Sequence[RecordFile]) -> Iterator[str]:
    """sentence-transformers' cached loss, this library's in its trainer, and this trainer."""
    names = {
        "sentence-transformers": "its cached loss",
        "megabatch": "its trainer, megabatch's loss",
        "trainer": "megabatch's trainer",
    }
    rows = []
    for file in files:
        for (model, b), group in grouped(file.measured, "model", "b"):
            for record in group:
                ratio = record["pairs_a_second"] / group[0]["pairs_a_second"]
                rows.append(
                    (
                        f"{model}, {b:,} pairs: {names[record['contender']]}",
                        seconds(record["seconds"]),
                        count(record["pairs_a_second"], "pairs/s"),
                        times(ratio),
                        gib(record["extra_bytes"]),
                        NONE if record is group[0] else error(record["loss_difference"]),
                    )
                )
    if rows:
        head = "sentence-transformers", "a step", "rate", "as fast", "memory", "losses differ by"
        yield from markdown(head, rows)


def gradient_caching(files: Sequence[RecordFile]) -> Iterator[str]:
    """A step of gradient caching, alone and added to earlier gradients."""
    rows = [
        (
            f"{r['b']:,} pairs in micro-batches of {r['micro_batch_size']}, {r['contender']}"
            + (", accumulating" if r["accumulate"] else ""),
            milliseconds(r["ms"]),
            gib(r["extra_bytes"]),
        )
        for file in files
        for r in file.measured
    ]
    yield from markdown(("", "a step", "peak memory besides the weights"), rows)


def million(files: Sequence[RecordFile]) -> Iterator[str]:
    """Complete optimizer steps of a million pairs, with the loss before each."""
    for file in files:
        steps = file.content["steps"]
        before = 0.0
        rows = []
        for step in steps:
            took, before = step["seconds"] - before, step["seconds"]
            rows.append(
                (
                    f"{step['step']}",
                    seconds(took),
                    count(step["pairs_per_second"], "pairs/s"),
                    share(step["data_wait"]),
                    gib(step["memory_bytes"]),
                    f"{step['loss']:.2f}",
                )
            )
        pairs = steps[0]["samples"] // steps[0]["step"]
        head = f"step of {pairs:,} pairs", "time", "rate", "waiting for data", "peak memory", "loss"
        yield from markdown(head, rows)


def late_decoding(files: Sequence[RecordFile]) -> Iterator[str]:
    """Host memory of a batch of images."""
    rows = [
        (
            f"{r['b']:,} images" + ("" if r["passes"] else ", only waiting"),
            r["decode"],
            f"{r['bytes_a_pair'] / 1e6:.2f} MB",
        )
        for file in files
        for r in file.measured
    ]
    yield from markdown(("batch", "decoded", "host memory of a pair"), rows)


def loader(files: Sequence[RecordFile]) -> Iterator[str]:
    """Images a second of the loader, by resize and workers, and waiting in training."""
    rows = []
    for file in files:
        for record in file.measured:
            if record["kind"] == "stage":
                continue
            rate = record["images_per_second"]
            rows.append(
                (
                    f"{file.name}: {record['contender']}, {record['workers']} loading",
                    NONE if rate is None else count(rate, "images/s"),
                    milliseconds(record["worker_ms"]),
                    share(record["data_wait"]),
                )
            )
    head = "resize by", "loader", "a worker's time for an image", "a training's time waiting"
    yield from markdown(head, rows)


def reported(files: Sequence[RecordFile]) -> list[str]:
    """The paper's seconds per iteration, wherever steps were measured."""
    return published.iterations() if files else []


def fastest(found: Sequence[Record], contender: str) -> Record | None:
    """A contender's record with the most pairs a second, if it has any."""
    own = [r for r in found if r["contender"] == contender and r["pairs_a_second"]]
    return max(own, key=lambda r: float(r["pairs_a_second"]), default=None)


def summary(file: RecordFile) -> str:
    """The summary's line: the largest batch that OpenCLIP's loop was measured at."""
    theirs = [r for r in file.measured if r["contender"].startswith("openclip")]
    if not theirs:
        return ""
    b = max(r["b"] for r in theirs)
    group = [r for r in file.measured if r["b"] == b and r["model"] == theirs[0]["model"]]
    ours = fastest(group, "megabatch") or fastest(group, "megabatch-eager")
    if ours is None:
        return ""
    rates = [
        f"{TRAINERS[name]} {_rate(record)}"
        for name in TRAINERS
        if (record := fastest(group, name)) is not None
    ]
    return f"{ours['model']}, {b:,} pairs (rows at a time): {', '.join(rates)}"


def summary_retrievers(*files: RecordFile) -> str:
    """The summary's line on retrievers."""
    found = []
    for file in files:
        theirs, ours = (fastest(file.measured, c) for c in ("sentence-transformers", "trainer"))
        if theirs is not None and ours is not None:
            ratio = ours["pairs_a_second"] / theirs["pairs_a_second"]
            found.append(f"{ours['model']} {times(ratio)}")
    return f"as fast as its cached loss: {', '.join(found)}" if found else ""


SECTION = Section(
    "How fast is a whole training step?",
    (
        Part(
            "Compared with OpenCLIP's loop",
            ("throughput*",),
            beside_openclip,
            """The fastest measured configuration of each, and how many times as fast megabatch is.
            All of them train the same model on the same pairs, which wait on the host.""",
        ),
        Part("Every measured step", ("throughput*",), every_step),
        Part("Parts of a step", ("throughput*",), parts),
        Part(
            "The towers alone",
            ("towers*",),
            towers,
            "`once`: forward and backward; `twice`: as gradient caching needs it.",
        ),
        Part(
            "The first layers of images",
            ("patches*",),
            first_layers,
            """bfloat16, forward and backward for the weights. `compiled` means by torch.compile, as
            in the trainer.""",
        ),
        Part(
            "OpenCLIP's own trainer",
            ("openclip-trainer-gpu",),
            openclip_trainer,
            """OpenCLIP's unmodified trainer with its data loading, by itself and with
            `megabatch.integrations.open_clip`.""",
        ),
        Part(
            "Compared with sentence-transformers",
            ("retriever", "retriever-trainer", "retriever-bert-base"),
            retrievers,
        ),
        Part("Gradient caching alone", ("gradient-caching",), gradient_caching),
        Part(
            "A million pairs in a step",
            ("icons-1m",),
            million,
            """Complete optimizer steps of small towers on one GPU, with nothing extrapolated. The
            first step includes compilation.""",
        ),
        Part(
            "A million pairs of an open_clip model in a step",
            ("million*",),
            million_of_towers,
            """Complete optimizer steps with the same batch, with nothing extrapolated: icons, each
            drawn in several places, sizes and colours. The first step includes compilation.""",
        ),
        Part("Batches of images on the host", ("late-decoding",), late_decoding),
        Part("Images from JPEG shards", ("data-rate-*",), loader),
        Part(
            "The paper's time of an iteration",
            ("throughput*",),
            reported,
            f"Reported by {published.PAPER}, for other GPUs and another model than above.",
        ),
    ),
    (
        Answer("A training step, compared with OpenCLIP's loop", ("throughput",), summary),
        Answer(
            "A retriever's step, compared with sentence-transformers",
            ("retriever-bert-base", "retriever-trainer"),
            summary_retrievers,
        ),
    ),
)
