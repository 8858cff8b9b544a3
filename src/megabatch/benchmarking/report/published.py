"""Figures that others report: none of them was measured here."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from megabatch.benchmarking.report.record_files import RecordFile
from megabatch.benchmarking.report.tables import (
    NONE,
    gib,
    markdown,
    seconds,
    times,
    value,
)

PAPER = "[Inf-CL](https://arxiv.org/abs/2410.17243)"

#: Inf-CL's table of memory: ViT-L/14, 8 A800 80GB. Global batch -> GB of the loss; None: out of
#: memory.
LOSS_MEMORY: dict[str, tuple[float | None, ...]] = {
    "CLIP": (16.67, 66.11, None, None, None),
    "OpenCLIP": (2.27, 8.63, 33.64, None, None),
    "Inf-CL": (0.18, 0.36, 0.72, 1.45, None),
    "Inf-CL, data offload": (0.18, 0.36, 0.72, 1.45, 6.53),
}
SIZES = (32_768, 65_536, 131_072, 262_144, 1_048_576)


def loss_memory(files: Sequence[RecordFile]) -> Iterator[str]:
    """The paper's memory of the loss, and below it what this library's and OpenCLIP's take."""
    rows = [
        (
            f"reported: {name}, 8 A800",
            *("out of memory" if number is None else f"{number} GB" for number in row),
        )
        for name, row in LOSS_MEMORY.items()
    ]
    found = [r for file in files for r in file.measured]
    kinds = [gpu for file in files for gpu in file.content.get("machine", {}).get("gpus", [])]
    kind = kinds[0] if kinds else "one device"
    for n in sorted({r.get("n_devices", 1) for r in found}):
        gpus = kind if n == 1 else f"{n} x {kind}"
        wanted = {"loss": "clip", "n_devices": n, "d": 768}
        theirs, ours = (
            [value(found, "extra_bytes", b=b, contender=name, **wanted) for b in SIZES]
            for name in ("openclip", "megabatch")
        )
        for name, row in (("OpenCLIP's loss", theirs), ("megabatch", ours)):
            if any(row):
                rows.append((f"measured: {name}, {gpus}", *map(gib, row)))
        if any(theirs):
            ratios = (times(a / b) if a and b else NONE for a, b in zip(theirs, ours, strict=True))
            rows.append((f"computed: their ratio, {gpus}", *ratios))
    yield from markdown(("a GPU's memory for the loss", *(f"{b:,}" for b in SIZES)), rows)


#: Inf-CL's seconds per iteration: ViT-L/14, 8 A800 80GB, by global batch.
ITERATION = {
    "CLIP": {65_536: 56.3},
    "OpenCLIP": {65_536: 48.9, 131_072: 97.9},
    "Inf-CL": {65_536: 49.4, 131_072: 98.3, 262_144: 200.3},
}


def iterations() -> list[str]:
    """The paper's seconds per iteration."""
    sizes = SIZES[1:4]
    rows = [
        (
            f"reported: {name}, ViT-L/14, 8 A800",
            *(seconds(row[b]) if b in row else NONE for b in sizes),
        )
        for name, row in ITERATION.items()
    ]
    return markdown(("seconds per iteration", *(f"{b:,}" for b in sizes)), rows)
