"""`megabatch bench loss`: CLIP's loss by this library and by others, side by side on this machine.

Each measurement runs in a process of its own, so the peak of memory is its contender's, and a
contender that fails or is killed is a result. (`benchmarks/` has more peers, losses and cases.)
"""

from __future__ import annotations

import importlib.util
import json
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from pydantic import PositiveFloat, PositiveInt
from pydantic.dataclasses import dataclass

from megabatch.errors import UsageError, did_you_mean
from megabatch.options import CONFIG, parse

if TYPE_CHECKING:
    from rich.table import Table

    from megabatch.benchmarking.measure import Record

# Libraries are imported by the functions that use them, as --help needs none.


@dataclass(frozen=True, config=CONFIG)
class LossOptions:
    """CLIP's loss, forward and backward: time, peak memory, error against float64."""

    batch_size: tuple[PositiveInt, ...] | None = None
    """Pairs; several sizes are measured one after another. Default: 8,192 on the CPU, 16,384 on
    CUDA."""
    width: PositiveInt = 512
    """Width of the features."""
    dtype: Literal["float32", "bfloat16", "float16", "float64"] = "float32"
    """Dtype of the features; in half precision losses run under autocast."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto uses CUDA if it is available."""
    contenders: tuple[str, ...] = ()
    """megabatch, dense (one matrix), openclip (open_clip's ClipLoss); on CUDA also
    megabatch-compiled and dense-compiled. Default: all that run here. Times and memory are shown
    relative to the first."""
    scale: PositiveFloat = 14.3
    """Logit scale (1 / temperature), exponentiated."""
    rounds: PositiveInt = 2
    """Processes for each contender; contenders take turns."""
    repetitions: PositiveInt = 2
    """Minimum number of timed calls in each process; the median of all is reported."""
    seconds: PositiveFloat | None = None
    """Minimum time for the calls, and for the matrix products before and after. Default: 1 on the
    CPU, 2 on CUDA."""
    max_memory: PositiveFloat | None = None
    """GiB that a contender may use besides its inputs (CPU only); more is out of memory. Default:
    the machine's."""
    output: Path | None = None
    """JSON file for the records."""


# --- the command ----------------------------------------------------------------------------------


def main(argv: list[str]) -> int:
    """Run `megabatch bench loss`; returns the exit code: 1 if a contender failed or was wrong."""
    options = parse(LossOptions, argv, prog="megabatch bench loss")
    return bench_loss(options, command=shlex.join(["megabatch", "bench", "loss", *argv]))


def bench_loss(options: LossOptions, command: str) -> int:
    """Measure, print a table, write the records after each batch size.

    Contenders take turns, A B A B, so that a machine that slows down affects all of them. One that
    fails is not tried again. Progress goes to stderr, a line for each measurement.
    """
    from megabatch.benchmarking import records
    from megabatch.benchmarking.measure import Record
    from megabatch.terminal import plain_console

    device = _device(options)
    names = _chosen(options.contenders, device)
    if options.batch_size == ():
        raise UsageError("--batch-size: expected at least one")
    if options.output is not None:
        _check_output(options.output)
    console, progress = plain_console(), plain_console(stderr=True)
    done: list[Record] = []
    for b in options.batch_size or (8192 if device == "cpu" else 16_384,):
        rounds: dict[str, list[Record]] = {name: [] for name in names}
        for turn in range(options.rounds):
            for name in names:
                if any(one.status != "ok" for one in rounds[name]):
                    continue
                case = Record(name, device, options.dtype, b, options.width, options.scale)
                title = f"{name}, b = {b:,}, round {turn + 1} of {options.rounds}"
                started = time.monotonic()
                with progress.status(title):
                    found = in_process(case, options)
                shown = found.status if found.ms is None else f"{found.ms:,.1f} ms a call"
                taken = time.monotonic() - started
                progress.print(f"{title}: {shown}, measured in {taken:.0f} s")
                rounds[name].append(found)
        done += map(combined, rounds.values())
        if options.output is not None:
            records.write(options.output, command, done)
    about = records.machine()
    place = about["gpus"][0] if device == "cuda" else f"{about['cpu']}, {about['threads']} threads"
    settings = f"d = {options.width}, {options.dtype}, {place}"
    console.print(f"clip loss, forward + backward, {settings}", style="bold")
    console.print(table(done))
    for record in done:
        if record.note:
            console.print(f"{record.contender}, b = {record.b:,}: {record.status}: {record.note}")
    if options.output is not None:
        console.print(f"records: {options.output}")
    return int(any(record.status in ("failed", "wrong") for record in done))


def _device(options: LossOptions) -> str:
    import torch

    available = torch.cuda.is_available()
    device = ("cuda" if available else "cpu") if options.device == "auto" else options.device
    if device == "cuda" and not available:
        raise UsageError("--device cuda: this machine has no CUDA device that torch can use")
    if device == "cuda" and options.max_memory is not None:
        raise UsageError("--max-memory: only on the CPU")
    if device == "cpu" and sys.platform != "linux":
        raise UsageError("--device cpu: peak memory is measured on Linux only")
    return device


def _chosen(names: tuple[str, ...], device: str) -> list[str]:
    """The contenders with these names, or without names all that run here."""
    from megabatch.benchmarking.measure import CONTENDERS

    missing = {} if importlib.util.find_spec("open_clip") else {"openclip": "open_clip_torch"}
    here = [name for name in CONTENDERS if device == "cuda" or not name.endswith("-compiled")]
    for name in names:
        if name not in CONTENDERS:
            hint = did_you_mean(name, CONTENDERS)
            raise UsageError(f"--contenders {name}: expected some of {', '.join(CONTENDERS)}{hint}")
        if names.count(name) > 1:
            raise UsageError(f"--contenders {name}: given {names.count(name)} times")
        if name in missing:
            raise UsageError(f"--contenders {name}: needs pip install {missing[name]}")
        if name not in here:
            raise UsageError(f"--contenders {name}: needs --device cuda")
    return list(names) or [name for name in here if name not in missing]


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


def combined(rounds: Sequence[Record]) -> Record:
    """The rounds of a case as one: median time, mean product rate, maximum of the rest."""
    if rounds[-1].status != "ok":
        return rounds[-1]
    times = tuple(ms for one in rounds for ms in one.times_ms)
    ms, rate = statistics.median(times), statistics.fmean(r.product_tflops or 0 for r in rounds)
    largest = {
        name: max(getattr(one, name) for one in rounds)
        for name in ("extra_bytes", "max_row_error", "loss_error", "scale_gradient_error")
    }
    # The least work of any implementation: the matrix 2, again 2, two products of it 2 each.
    fraction = 8 * rounds[0].b ** 2 * rounds[0].d / (ms * 1e9) / rate
    return replace(
        rounds[0], ms=ms, fraction=fraction, product_tflops=rate, times_ms=times, **largest
    )


def table(records: Sequence[Record]) -> Table:
    """A row per record, with time and memory relative to the first contender of the same size."""
    from rich.table import Table
    from rich.text import Text

    made = Table(
        box=None, padding=(0, 1), collapse_padding=True, pad_edge=False, header_style="bold"
    )
    for column in ("b", "contender", "ms", "×", "of\nproduct", "extra\nmemory", "×", "row\nerror"):
        left = column == "contender"
        made.add_column(column, justify="left" if left else "right", vertical="bottom")
    for r in records:
        first = next(one for one in records if one.b == r.b)
        if r.ms is None or r.fraction is None or r.extra_bytes is None:
            made.add_row(f"{r.b:,}", r.contender, Text(r.status, "red"), *[""] * 5)
            continue
        error = Text("wrong", "red") if r.status == "wrong" else f"{r.max_row_error:.1e}"
        times = f"{r.ms / first.ms:.1f}" if first.ms else ""
        more = f"{r.extra_bytes / first.extra_bytes:.1f}" if first.extra_bytes else ""
        made.add_row(
            *(f"{r.b:,}", r.contender, f"{r.ms:,.1f}", times, f"{r.fraction:.0%}"),
            *(f"{r.extra_bytes / 2**30:,.3f} GiB", more, error),
        )
    return made


# --- one measurement ------------------------------------------------------------------------------


def in_process(case: Record, options: LossOptions) -> Record:
    """Measure a case in a process of its own."""
    from megabatch.benchmarking.measure import Record

    effort = {
        "seconds": options.seconds or (1.0 if case.device == "cpu" else 2.0),
        "repetitions": options.repetitions,
        "max_memory": None if options.max_memory is None else int(options.max_memory * 2**30),
    }
    job = json.dumps([asdict(case), effort])
    command = [sys.executable, "-m", "megabatch.benchmarking.measure", job]
    ended = subprocess.run(command, capture_output=True)
    if ended.returncode == 0:
        found = json.loads(ended.stdout.decode().splitlines()[-1])
        return Record(**{**found, "times_ms": tuple(found["times_ms"])})
    if ended.returncode == -9:  # SIGKILL, a name that Windows lacks
        return replace(case, status="out of memory", note="the operating system ended the process")
    lines = ended.stderr.decode(errors="replace").strip().splitlines()
    note = lines[-1] if lines else f"exit code {ended.returncode}"
    return replace(case, status="failed", note=note)
