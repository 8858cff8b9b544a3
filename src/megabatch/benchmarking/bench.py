"""Contenders side by side, each in a process of its own, and their records as a table."""

from __future__ import annotations

import json
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.table import Table
from rich.text import Text

from megabatch.benchmarking.contenders import Contender, Loss
from megabatch.benchmarking.inputs import Case
from megabatch.benchmarking.measure import Effort, Result
from megabatch.benchmarking.records import Record, combine


@dataclass(frozen=True)
class Plan:
    """The cases to measure."""

    loss: Loss
    contenders: Sequence[Contender]
    batch_sizes: Sequence[int]
    width: int
    dtype: str
    device: str
    scale: float
    rounds: int  #: processes for each contender
    effort: Effort

    def cases(self, b: int) -> list[Case]:
        """Every contender at one batch size."""
        return [
            Case(self.loss.name, c.name, self.device, self.dtype, b, self.width, self.scale)
            for c in self.contenders
        ]


def run(
    plan: Plan, starts: Callable[[str], None], ends: Callable[[str], None]
) -> Iterator[list[Record]]:
    """Measure one batch size after another; yields the records of each.

    Contenders take turns, A B A B, so that a machine that slows down affects all of them. One that
    fails in its first round is not tried again. Before each measurement `starts` is called with its
    description, and afterwards `ends` with its result, a line of text each.
    """
    for b in plan.batch_sizes:
        cases = plan.cases(b)
        results: dict[Case, list[Result]] = {case: [] for case in cases}
        for turn in range(plan.rounds):
            for case in cases:
                if any(result.status != "ok" for result in results[case]):
                    continue
                name = f"{case.contender}, b = {b:,}, round {turn + 1} of {plan.rounds}"
                starts(name)
                started = time.monotonic()
                result = in_process(case, plan.effort)
                results[case].append(result)
                ends(f"{name}: {_outcome(result)}, measured in {time.monotonic() - started:.0f} s")
        yield [combine(case, results[case], plan.loss.work) for case in cases]


def _outcome(result: Result) -> str:
    if result.status != "ok":
        return result.status
    return f"{statistics.median(result.times_ms):,.1f} ms a call"


def in_process(case: Case, effort: Effort) -> Result:
    """Measure a case in a process of its own.

    So the peak of memory is that contender's, and a contender that fails or is killed is a result.
    """
    with tempfile.TemporaryDirectory() as folder:
        job, result = Path(folder, "job.json"), Path(folder, "result.json")
        job.write_text(json.dumps({"case": asdict(case), "effort": asdict(effort)}))
        command = [sys.executable, "-m", "megabatch.benchmarking.measure", str(job), str(result)]
        ended = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        if ended.returncode == 0:
            return Result(**json.loads(result.read_text()))
    if ended.returncode == -signal.SIGKILL:
        return Result("out of memory", "the operating system ended the process")
    lines = ended.stderr.decode(errors="replace").strip().splitlines()
    return Result("failed", lines[-1] if lines else f"exit code {ended.returncode}")


def table(records: Sequence[Record]) -> Table:
    """A row per record, with time and memory relative to the first contender of the same size.

    It fits into 80 columns for every contender up to a million pairs.
    """
    made = Table(
        box=None, padding=(0, 1), collapse_padding=True, pad_edge=False, header_style="bold"
    )
    for column in ("b", "contender", "ms", "×", "of\nproduct", "extra\nmemory", "×", "row\nerror"):
        left = column == "contender"
        made.add_column(
            column, justify="left" if left else "right", vertical="bottom", no_wrap=True
        )
    for record in records:
        first = next(r for r in records if r.b == record.b)
        made.add_row(f"{record.b:,}", record.contender, *_cells(record, first))
    return made


def _cells(record: Record, first: Record) -> tuple[str | Text, ...]:
    if record.ms is None or record.fraction is None or record.extra_bytes is None:
        return (Text(record.status, "red"), "", "", "", "", "")
    wrong = Text("wrong", "red")
    error = wrong if record.status == "wrong" else f"{record.max_row_error:.1e}"
    return (
        f"{record.ms:,.1f}",
        _times(record.ms, first.ms),
        f"{record.fraction:.0%}",
        size(record.extra_bytes),
        _times(record.extra_bytes, first.extra_bytes),
        error,
    )


def _times(value: float, first: float | None) -> str:
    return f"{value / first:.1f}" if first else ""


def size(value: float) -> str:
    """Format bytes in MiB or GiB."""
    return f"{value / 2**30:,.2f} GiB" if value >= 2**30 else f"{value / 2**20:,.1f} MiB"
