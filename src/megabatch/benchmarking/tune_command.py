"""`megabatch tune`."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from megabatch.errors import UsageError
from megabatch.hints import Interval
from megabatch.options import parse

if TYPE_CHECKING:
    from rich.console import Console

    from megabatch.benchmarking.tune import Candidate, Target
    from megabatch.similarity.triton.configs import Config, Key

# Libraries are imported by the functions that use them, as --help needs none.

_DESCRIPTION = """Find the fastest launch configurations of the fused kernels on this machine's GPU
for features of these widths, and store them in the user's cache, where later runs find them."""


@dataclass(frozen=True)
class TuneOptions:
    """The kernels to tune."""

    width: Annotated[tuple[int, ...], Interval(at_least=1)] = (512, 768, 1024)
    """Widths of the features; each is tuned on its own."""
    dtype: tuple[Literal["bfloat16", "float16", "float32"], ...] = ("bfloat16",)
    """Dtypes of the features; float32 as TF32."""
    rows: tuple[Literal["few", "many"], ...] = ("many",)
    """few: fewer than 8,192 rows on one GPU."""
    budget_seconds: Annotated[float, Interval(above=0)] = 150.0
    """Time for each kernel, width and dtype; a candidate takes seconds, mostly to compile."""
    output: Path | None = None
    """A file to write instead of the cache, to inspect or to copy elsewhere."""


def main(argv: list[str]) -> int:
    """Run `megabatch tune ...`; returns the exit code."""
    options = parse(TuneOptions, argv, prog="megabatch tune", description=_DESCRIPTION)
    targets = _targets(options)
    from megabatch.similarity.triton import configs
    from megabatch.terminal import plain_console

    file = options.output or configs.path()
    console = plain_console()
    for target in targets:
        # Each is stored as it is found, so an interrupted run loses only one.
        _keep(file, {target.key(): _tune(target, options.budget_seconds, console)})
    console.print(f"kept in {file}")
    return 0


def _targets(options: TuneOptions) -> list[Target]:
    for name, values in (
        ("width", options.width),
        ("dtype", options.dtype),
        ("rows", options.rows),
    ):
        if not values:
            raise UsageError(f"--{name}: expected at least one")
    import torch

    from megabatch.benchmarking.tune import Target
    from megabatch.similarity import backends

    if not torch.cuda.is_available():
        raise UsageError("this machine has no CUDA device that torch can use: nothing to tune")
    if "float32" in options.dtype:
        torch.set_float32_matmul_precision("high")
    if not backends.uses_kernels(torch.empty(1, 1, device="cuda", dtype=torch.bfloat16)):
        raise UsageError("there are no fused kernels for this machine: nothing to tune")
    return [
        Target(kernel, getattr(torch, dtype), width, rows == "few")
        for width in options.width
        for dtype in options.dtype
        for rows in options.rows
        for kernel in ("forward", "backward")
    ]


def _tune(target: Target, seconds: float, console: Console) -> Config:
    from megabatch.benchmarking import tune

    name = str(target.dtype).removeprefix("torch.")
    console.print(
        f"{target.kernel}, {name}, width {target.width}, {'few' if target.few else 'many'} rows",
        style="bold",
    )
    found: list[Candidate] = []
    deadline = time.time() + seconds
    measure = target.measurer()
    for candidate in tune.search(target.packaged(), target.options(), measure, deadline):
        found.append(candidate)
        console.print(f"  {_words(candidate)}")
    chosen = tune.best(found)
    gain = (found[0].ms or 0.0) / (chosen.ms or 1.0)
    words = f"  best: {_words(chosen)}: {gain:.3f} times as fast as before"
    console.print(words)
    return chosen.config


def _words(candidate: Candidate) -> str:
    fields = " ".join(f"{name} {value}" for name, value in vars(candidate.config).items())
    result = candidate.note if candidate.ms is None else f"{candidate.ms:.3f} ms"
    return f"{fields}: {result}"


def _keep(file: Path, found: dict[Key, Config]) -> None:
    from megabatch.similarity.triton import configs

    try:
        configs.write(file, found)
    except OSError as error:
        raise UsageError(f"{file}: cannot be written: {error.strerror}") from error
