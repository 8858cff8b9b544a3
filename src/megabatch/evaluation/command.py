"""`megabatch eval RUN`, `megabatch eval --model NAME`."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

from megabatch.errors import UsageError
from megabatch.evaluation.config import EvalConfig
from megabatch.options import parse

if TYPE_CHECKING:
    from rich.console import Console


def main(argv: list[str]) -> int:
    """Evaluate, print the figures, and say where the report is; returns the exit code."""
    description = inspect.getdoc(EvalConfig) or ""
    config = parse(EvalConfig, argv, prog="megabatch eval", description=description)
    from rich.console import Console  # as little as can be for --help

    from megabatch.evaluation.processes import is_first, torchrun
    from megabatch.evaluation.table import print_evaluation

    with torchrun():
        if not is_first():
            return _follow(config)
        console = Console()
        evaluation = _evaluate_visibly(config, console)
    print_evaluation(evaluation, console)
    folder = config.output or config.run
    assert folder is not None  # the evaluation would have refused that
    of_texts = any(task["first"] == "text" for task in evaluation["retrieval"].values())
    what = "first texts" if of_texts else "images"
    pace = f"{evaluation['seconds']:.0f} s, {evaluation['images_per_second']:,.0f} {what}/s"
    # A path that is broken over two lines cannot be opened.
    console.print(f"{pace}; report: {folder / 'report.html'}", soft_wrap=True)
    return 0


def _evaluate_visibly(config: EvalConfig, console: Console) -> dict[str, Any]:
    from megabatch.evaluation.run import evaluate

    what = f"evaluating {config.run or config.model}"
    with console.status(what) as status:
        return evaluate(
            config,
            report=lambda words: status.update(f"{what}: {words}"),
            announce=lambda line: console.print(line, soft_wrap=True, highlight=False),
        )


def _follow(config: EvalConfig) -> int:
    """A process that only helps: what is wrong, all have met, and the first one says it."""
    from megabatch.evaluation.run import evaluate

    try:
        evaluate(config)
    except UsageError as error:
        return int(getattr(error, "exit_code", 2))
    return 0
