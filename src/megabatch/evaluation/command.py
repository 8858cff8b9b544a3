"""`megabatch eval RUN`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro
from rich.console import Console

from megabatch.evaluation.run import evaluate_run
from megabatch.evaluation.table import print_evaluation


@dataclass(frozen=True)
class EvalOptions:
    """Evaluate a run: retrieval, zero-shot classification, and a report to look at."""

    run: tyro.conf.Positional[Annotated[Path, tyro.conf.arg(metavar="RUN")]]
    """The run's folder: config.toml with model.safetensors or checkpoints."""
    val_data: str | None = None
    """Held-out pairs: shards (.tar), .csv, .tsv, .parquet, a folder of them, or "glyphs", which is
    the default for a model trained on glyphs."""
    device: str = "cpu"
    """Where the encoders run: cpu, cuda, cuda:1 ..."""
    precision: Literal["fp32", "bf16"] = "fp32"
    """Of the encoders; the ranking is always in float32."""
    batch_size: int = 512
    """Images or texts in one pass through an encoder."""


def main(argv: list[str]) -> int:
    """Evaluate, print the figures, and say where the report is; returns the exit code."""
    options = tyro.cli(EvalOptions, args=argv, prog="megabatch eval")
    console = Console()
    with console.status(f"evaluating {options.run}"):
        evaluation = evaluate_run(
            options.run,
            val_data=options.val_data,
            device=options.device,
            precision=options.precision,
            batch_size=options.batch_size,
        )
    print_evaluation(evaluation, console)
    console.print(f"{evaluation['seconds']:.0f} s; report: {options.run / 'report.html'}")
    return 0
