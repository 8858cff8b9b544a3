"""`megabatch report RUN`, `megabatch report RUN RUN ... --output FILE`."""

from __future__ import annotations

from pathlib import Path

from pydantic.dataclasses import dataclass

from megabatch.errors import UsageError
from megabatch.options import CONFIG, parse


@dataclass(frozen=True, config=CONFIG)
class ReportConfig:
    """Write the report of a run, or a page that compares several runs.

    It needs the files of the runs' folders alone, neither the models nor the data: config.toml and
    metrics.jsonl of megabatch train, evaluation.json and report.json of megabatch eval. Any of them
    may be missing: the report of a run that is still training has its curves.
    """

    runs: tuple[Path, ...]
    """Folders of runs, or folders that megabatch eval --output wrote."""
    output: Path | None = None
    """HTML file to write. Default for one run: report.html in its folder."""


def main(argv: list[str]) -> int:
    """Write the page and print its path; returns the exit code."""
    config = parse(ReportConfig, argv, prog="megabatch report", positional="runs")
    output = config.output or config.runs[0] / "report.html"
    if config.output is None and len(config.runs) > 1:
        raise UsageError("--output: needed to compare several runs, such as comparison.html")
    for run in config.runs:
        if not run.is_dir():
            raise UsageError(f"{run} is not a folder")
    # --help and errors import as little as possible
    from megabatch.evaluation.report.page import make_page
    from megabatch.evaluation.run_folder import write_atomically

    write_atomically(output, make_page(config.runs))
    print(f"report: {output}")
    return 0
