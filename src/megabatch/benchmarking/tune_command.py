"""`megabatch tune`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from megabatch.errors import UsageError
from megabatch.hints import Interval
from megabatch.options import parse

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
    for name in ("width", "dtype", "rows"):
        if not getattr(options, name):
            raise UsageError(f"--{name}: expected at least one")
    from megabatch.benchmarking import tune  # torch, which --help does not need
    from megabatch.similarity.triton import configs

    file = options.output or configs.path()
    tune.run(options.width, options.dtype, options.rows, options.budget_seconds, file)
    return 0
