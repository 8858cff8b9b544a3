"""Start a worker process and make a result of however it ends."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

from megabatch.benchmarking.inputs import Case
from megabatch.benchmarking.measure import Effort, Result


def run(case: Case, effort: Effort) -> Result:
    """Measure a case in a process of its own.

    So a peak of memory is that contender's alone, and one that fails or is killed is a result.
    """
    with tempfile.TemporaryDirectory() as folder:
        job, result = Path(folder, "job.json"), Path(folder, "result.json")
        job.write_text(json.dumps({"case": asdict(case), "effort": asdict(effort)}))
        command = [sys.executable, "-m", "megabatch.benchmarking.worker", str(job), str(result)]
        ended = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        if ended.returncode == 0:
            return Result(**json.loads(result.read_text()))
    if ended.returncode == -signal.SIGKILL:
        return Result("out of memory", "the operating system ended the process")
    lines = ended.stderr.decode(errors="replace").strip().splitlines()
    return Result("failed", lines[-1] if lines else f"exit code {ended.returncode}")
