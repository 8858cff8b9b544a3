"""The process in which one contender is measured: `python -m ... JOB.json RESULT.json`."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path

from megabatch.benchmarking import memory
from megabatch.benchmarking.inputs import Case
from megabatch.benchmarking.measure import Effort, measure


def main(job_file: str, result_file: str) -> None:
    """Measure what the first file describes; the second gets the `Result`."""
    memory.be_killed_first()
    job = json.loads(Path(job_file).read_text())
    result = measure(Case(**job["case"]), Effort(**job["effort"]))
    Path(result_file).write_text(json.dumps(asdict(result), allow_nan=False))


if __name__ == "__main__":
    main(*sys.argv[1:])
