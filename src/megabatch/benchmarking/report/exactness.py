"""Is it exact? Errors against float64, and trainings compared with other libraries'."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from megabatch.benchmarking.report.page import Answer, Part, Section
from megabatch.benchmarking.report.record_files import RecordFile
from megabatch.benchmarking.report.tables import NONE, count, error, grouped, markdown, value

#: exactness.py's dense implementations.
CAREFUL, PLAIN = "dense, careful", "dense"


def gradients(files: Sequence[RecordFile]) -> Iterator[str]:
    """The largest error of any row's gradient, by dtype, features and scale."""
    for file in files:
        rows = []
        for (dtype, features, scale), group in grouped(file.measured, "dtype", "features", "scale"):
            errors = (
                error(value(group, "gradient_max", contender=name))
                for name in ("megabatch", CAREFUL, PLAIN)
            )
            loss = error(value(group, "loss_max", contender="megabatch"))
            rows.append((f"{dtype}, {features}, {scale:g}", *errors, loss))
        head = "dtype, features, scale", "megabatch", "dense in fp32", "dense", "megabatch's loss"
        yield from markdown(head, rows)


def full_size(files: Sequence[RecordFile]) -> Iterator[str]:
    """Errors at the full size, of all implementations of CLIP's loss."""
    for file in files:
        wanted = {"loss": "clip", "dtype": "bfloat16", "features": "pairs", "backward": True}
        found = [r for r in file.measured if all(r[name] == v for name, v in wanted.items())]
        largest = max((r["b"] for r in found if r["contender"] != "megabatch"), default=None)
        rows = [
            (
                record["contender"],
                error(record["max_row_error"]),
                error(record["loss_error"]),
                error(record["scale_gradient_error"]),
            )
            for record in found
            if (record["b"], record["d"], record["scale"]) == (largest, 768, 14.3)
        ]
        if largest:
            head = f"{largest:,} pairs, d = 768", "a row's gradient", "loss", "scale's gradient"
            yield from markdown(head, rows)


def across_gpus(files: Sequence[RecordFile]) -> Iterator[str]:
    """The same over several GPUs, with peers' notes."""
    rows = []
    for file in files:
        most = max(r["n_devices"] for r in file.measured)
        for record in file.measured:
            if (record["n_devices"], record["b"], record["d"]) != (most, 65_536, 768):
                continue
            if record["max_row_error"] is not None:
                errors = (record[f"{name}_error"] for name in ("max_row", "loss", "scale_gradient"))
                what = f"{record['contender']}, {record['loss']}"
                rows.append((what, *map(error, errors), record["note"] or "as it should be"))
    if rows:
        head = "contender, loss", "a row's gradient", "loss", "scale's gradient", "result"
        yield from markdown(head, rows)


def trainings(files: Sequence[RecordFile]) -> Iterator[str]:
    """Largest differences between whole trainings with another library and with this one."""
    rows = []
    for file in files:
        for record in file.measured:
            if record.get("loss_difference") is None:
                continue
            last = record.get("scale_difference"), record.get("weight_difference")
            rows.append(
                (
                    f"{'OpenCLIP' if 'accum_freq' in record else 'sentence-transformers'}, "
                    f"{record['steps']} steps, {record['dtype']}",
                    count(record["b"]),
                    str(record["n_devices"]),
                    str(record.get("accum_freq", NONE)),
                    error(record["loss_difference"]),
                    *(NONE if number is None else error(number) for number in last),
                )
            )
    if rows:
        head = "trainer", "batch", "ranks", "accum-freq", "loss", "logit scale", "last weights"
        yield from markdown(head, rows)


def largest_error(file: RecordFile) -> str:
    """The summary's line."""
    wanted = {"loss": "clip", "dtype": "bfloat16", "b": 65_536, "d": 768, "features": "pairs"}
    mine, theirs = (
        value(file.measured, "max_row_error", contender=name, **wanted)
        for name in ("megabatch", "openclip")
    )
    if mine is None or theirs is None:
        return ""
    return (
        f"the largest error of a gradient's row against float64, bfloat16: {error(mine)}, "
        f"OpenCLIP's loss {error(theirs)}"
    )


SECTION = Section(
    "Is it exact?",
    (
        Part(
            "One GPU, 65,536 pairs",
            ("single-gpu",),
            full_size,
            """CLIP's loss in bfloat16: the largest relative error against float64 on the same
            inputs, of any row of either gradient, of the loss, and of the scale's gradient.""",
        ),
        Part(
            "Other features and scales",
            ("exactness",),
            gradients,
            """The largest error of any row of the gradient, by dtype, kind of features and logit
            scale. "Dense in fp32" is a careful dense implementation, whose logits and softmax are
            in float32; "dense" rounds logits to the features' dtype. In float16, gradients of pairs
            that are already learnt underflow in all implementations.""",
        ),
        Part(
            "Several GPUs",
            ("scaling",),
            across_gpus,
            "65,536 pairs on the largest number of GPUs in the run, after averaging as DDP does.",
        ),
        Part(
            "Whole trainings",
            ("openclip-trainer", "openclip-trainer-gpu", "retriever-100-steps*"),
            trainings,
            """Other libraries' trainers with their own loss and with this library's: the largest
            relative difference of any step's loss and logit scale, and the difference of the final
            weights relative to the distance that they moved.""",
        ),
    ),
    (Answer("Is it exact?", ("single-gpu",), largest_error),),
)
