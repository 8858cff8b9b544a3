"""`megabatch bench`."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from megabatch.errors import UsageError
from megabatch.hints import Interval
from megabatch.options import parse_one_of

if TYPE_CHECKING:
    from megabatch.benchmarking import bench, records

# Libraries are imported by the functions that use them, as --help needs none.

AT_LEAST_1, ABOVE_0 = Interval(at_least=1), Interval(above=0)

_DESCRIPTION = "Compare megabatch with other implementations."


@dataclass(frozen=True)
class LossOptions:
    """CLIP's loss, forward and backward: time, peak memory, error against float64."""

    batch_size: Annotated[tuple[int, ...] | None, AT_LEAST_1] = None
    """Pairs; several sizes are measured one after another. Default: 8,192 on the CPU, 16,384 on
    CUDA."""
    width: Annotated[int, AT_LEAST_1] = 512
    """Width of the features."""
    dtype: Literal["float32", "bfloat16", "float16", "float64"] = "float32"
    """Dtype of the features; in half precision losses run under autocast."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto uses CUDA if it is available."""
    contenders: tuple[str, ...] = ()
    """megabatch, megabatch-keeping (all logits, in 1.125 GiB), dense, two-products, openclip; on
    CUDA also megabatch-compiled, dense-compiled, inf-cl, memeff, liger, cut-cross-entropy. Default:
    all that run here, two-products only without open_clip, which computes the same. Times and
    memory are shown relative to the first."""
    scale: Annotated[float, ABOVE_0] = 14.3
    """Logit scale (1 / temperature), exponentiated."""
    rounds: Annotated[int, AT_LEAST_1] = 2
    """Processes for each contender; contenders take turns."""
    repetitions: Annotated[int, AT_LEAST_1] = 2
    """Minimum number of timed calls in each process; the median of all is reported."""
    seconds: Annotated[float | None, ABOVE_0] = None
    """Minimum time for the calls, and for the matrix products before and after. Default: 1 on the
    CPU, 2 on CUDA."""
    product_size: Annotated[int | None, AT_LEAST_1] = None
    """Rows and columns of the matrix product that serves as yardstick. Default: 4,096 on the CPU,
    8,192 on CUDA."""
    check_batch_size: Annotated[int | None, AT_LEAST_1] = None
    """Pairs in the comparison with float64. Default: at most 4,096 on the CPU, 65,536 on CUDA."""
    max_memory: Annotated[float | None, ABOVE_0] = None
    """GiB that a contender may use besides its inputs (CPU only); more is out of memory. Default:
    the machine's."""
    output: Path | None = None
    """JSON file for the records."""


def main(argv: list[str]) -> int:
    """Run `megabatch bench ...`; returns the exit code: 1 if a contender failed or was wrong."""
    commands = {"loss": LossOptions}
    options = parse_one_of(commands, argv, prog="megabatch bench", description=_DESCRIPTION)
    return bench_loss(options, command=shlex.join(["megabatch", "bench", *argv]))


def bench_loss(options: LossOptions, command: str) -> int:
    """Measure, print a table, write the records after each batch size.

    Progress goes to stderr, a line for each measurement, also where that is no terminal.
    """
    from megabatch.benchmarking import bench, records
    from megabatch.terminal import plain_console

    plan = _plan(options)
    if options.output is not None:
        _check_output(options.output)
    console, progress = plain_console(), plain_console(stderr=True)
    done: list[records.Record] = []

    def ends(text: str) -> None:
        progress.print(text)  # which flushes

    with progress.status("") as status:
        for some in bench.run(plan, starts=status.update, ends=ends):
            done += some
            if options.output is not None:
                _write(options.output, command, done)
    about = records.machine()
    place = about["cpu"] if plan.device == "cpu" else about["gpus"][0]
    threads = f", {about['threads']} threads" if plan.device == "cpu" else ""
    console.print(
        f"{plan.loss.name} loss, forward + backward, d = {plan.width}, {plan.dtype}, "
        f"{place}{threads}",
        style="bold",
    )
    console.print(bench.table(done))
    for record in done:
        if record.note:
            console.print(f"{record.contender}, b = {record.b:,}: {record.status}: {record.note}")
    for line in _left_out(options, plan):
        console.print(line)
    if options.output is not None:
        console.print(f"records: {options.output}")
    return int(any(record.status in ("failed", "wrong") for record in done))


def _left_out(options: LossOptions, plan: bench.Plan) -> Iterator[str]:
    """Lines on measurements that the defaults omit to save time."""
    if not options.contenders:
        for contender in plan.loss.duplicates(plan.device):
            yield (
                f"Not measured, to save time: {contender.name}, which computes the same as "
                f"{contender.like} (--contenders)."
            )
    if options.batch_size is None and plan.device == "cpu":
        yield (
            "Not measured, to save time: larger batches, where the differences in memory grow. "
            "Twice the batch takes four times as long (--batch-size 16384)."
        )


def _plan(options: LossOptions) -> bench.Plan:
    if options.batch_size == ():
        raise UsageError("--batch-size: expected at least one")
    from megabatch.benchmarking import bench
    from megabatch.benchmarking.contenders import CLIP
    from megabatch.benchmarking.measure import Effort

    device = _device(options)
    contenders = CLIP.choose(options.contenders, device)
    on_cpu = device == "cpu"
    effort = Effort(
        seconds=options.seconds or (1.0 if on_cpu else 2.0),
        repetitions=options.repetitions,
        product_size=options.product_size or (4096 if on_cpu else 8192),
        check_batch_size=options.check_batch_size or (4096 if on_cpu else 65_536),
        max_memory=None if options.max_memory is None else int(options.max_memory * 2**30),
    )
    return bench.Plan(
        loss=CLIP,
        contenders=contenders,
        batch_sizes=options.batch_size or (8192 if on_cpu else 16_384,),
        width=options.width,
        dtype=options.dtype,
        device=device,
        scale=options.scale,
        rounds=options.rounds,
        effort=effort,
    )


def _device(options: LossOptions) -> str:
    import torch

    device = options.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda" and not torch.cuda.is_available():
        raise UsageError("--device cuda: this machine has no CUDA device that torch can use")
    if device == "cuda" and options.max_memory is not None:
        raise UsageError("--max-memory: only on the CPU")
    if device == "cpu" and sys.platform != "linux":
        raise UsageError("--device cpu: peak memory is measured on Linux only")
    return device


def _check_output(path: Path) -> None:
    """Fail before the measurements rather than after them."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_dir():
            raise UsageError(f"--output {path}: is a folder, expected a file")
        partial = path.with_name(path.name + ".partial")
        partial.touch()
        partial.unlink()
    except OSError as error:
        raise UsageError(f"--output {path}: cannot be written: {error.strerror}") from error


def _write(path: Path, command: str, done: list[records.Record]) -> None:
    from megabatch.benchmarking import records

    try:
        records.write(path, command, done)
    except OSError as error:
        raise UsageError(f"--output {path}: cannot be written: {error.strerror}") from error
