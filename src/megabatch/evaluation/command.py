"""`megabatch eval RUN`, `megabatch eval --model NAME`."""

from __future__ import annotations

from contextlib import nullcontext

import tyro
from rich.console import Console

from megabatch.errors import UsageError
from megabatch.evaluation.config import EvalConfig
from megabatch.evaluation.processes import is_first, torchrun
from megabatch.evaluation.run import evaluate
from megabatch.evaluation.table import print_evaluation


def main(argv: list[str]) -> int:
    """Evaluate, print the figures, and say where the report is; returns the exit code."""
    config = tyro.cli(EvalConfig, args=argv, prog="megabatch eval")
    console = Console()
    with torchrun():
        first = is_first()
        waiting = console.status(f"evaluating {config.run or config.model}")
        try:
            with waiting if first else nullcontext():
                evaluation = evaluate(config)
        except UsageError as error:
            if first:
                raise
            return getattr(error, "exit_code", 2)  # all have met it; the first one says so
    if first:
        print_evaluation(evaluation, console)
        folder = config.output or config.run
        assert folder is not None
        pace = f"{evaluation['seconds']:.0f} s, {evaluation['images_per_second']:,.0f} images/s"
        console.print(f"{pace}; report: {folder / 'report.html'}")
    return 0
