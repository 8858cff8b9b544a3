"""Runs of pytest in processes of their own, under load where wanted, and the record of them."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]

#: What `make test` gives to pytest.
ARGUMENTS = (
    *("-q", "-n", "auto", "--maxprocesses", "4"),
    *("--dist", "loadfile", "--no-loadscope-reorder"),
)
#: and its environment: many small tests, a process for each core, bytecode that is kept.
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": ""}
#: Characters of each failure's message that are kept.
MESSAGE = 2000

_DESCRIBE = """
import json
from megabatch.benchmarking.records import machine, versions
print(json.dumps({"machine": machine(), "versions": versions()}))
"""
#: Ends with the process that started it, however that ends.
_BUSY = """
import os, sys
core, parent = map(int, sys.argv[1:])
os.sched_setaffinity(0, {core})
while os.getppid() == parent:
    for _ in range(1_000_000):
        pass
"""


@dataclass(frozen=True)
class Place:
    """Where tests run: an interpreter, and the root of the sources."""

    python: str = sys.executable
    root: Path = ROOT

    @property
    def environment(self) -> dict[str, str]:
        """The environment of its processes."""
        path = os.pathsep.join([str(self.root / "src"), *filter(None, [os.getenv("PYTHONPATH")])])
        return {**os.environ, **ENVIRONMENT, "PYTHONPATH": path}

    def describe(self) -> dict[str, Any]:
        """Its machine and versions, as records of measurements have them."""
        command = [self.python, "-c", _DESCRIBE]
        said = subprocess.run(
            command, cwd=self.root, env=self.environment, stdout=subprocess.PIPE, check=True
        )
        described: dict[str, Any] = json.loads(said.stdout.splitlines()[-1])
        return described


def run(place: Place, arguments: Sequence[str], limit: float) -> dict[str, Any]:
    """Run pytest once; what came of it.

    Args:
        limit: seconds after which it is ended.
    """
    command = [place.python, "-m", "pytest", *arguments]
    with tempfile.TemporaryDirectory() as folder:
        report, output = Path(folder, "report.xml"), Path(folder, "output.txt")
        begun, date = time.monotonic(), _now()
        with output.open("wb") as file:
            process = subprocess.Popen(
                [*command, f"--junitxml={report}", "-p", "no:cacheprovider"],
                cwd=place.root, env=place.environment, stdout=file, stderr=subprocess.STDOUT,
                start_new_session=True,
            )  # fmt: skip
            try:
                code: int | str = process.wait(limit)
            except subprocess.TimeoutExpired:
                code = f"ended after {limit:g} s"
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        found = {
            "command": shlex.join(["python", *command[1:]]),
            "date": date,
            "cores": sorted(os.sched_getaffinity(0)),
            "seconds": round(time.monotonic() - begun, 1),
            "exit_code": code,
            **_counted(report),
        }
        if code != 0 and not found["failures"]:
            found["output"] = output.read_text(errors="replace")[-MESSAGE:]
        return found


def green(record: dict[str, Any]) -> bool:
    """Whether all of a run's tests passed, of which there were some."""
    return record["exit_code"] == 0 and record["passed"] > 0


@contextlib.contextmanager
def load() -> Iterator[list[subprocess.Popen[bytes]]]:
    """A busy loop on each core that this process may use."""
    cores = sorted(os.sched_getaffinity(0))
    command = [sys.executable, "-c", _BUSY]
    loops = [subprocess.Popen([*command, str(core), str(os.getpid())]) for core in cores]
    try:
        yield loops
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def append(path: Path, about: dict[str, Any], record: dict[str, Any]) -> None:
    """Add a record to a file, which several commands may write to at once.

    Args:
        about: what a new file says of all its records; an old one must say the same, but for the
            command and the date.

    Raises:
        ValueError: the file's records are of another machine or other versions.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path.with_name(f".{path.name}.lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        content: dict[str, Any] = {"date": _now(), **about, "records": []}
        if path.exists():
            content = json.loads(path.read_text())
            check_same(path, content, about)
        content["records"].append(record)
        partial = path.with_name(path.name + ".partial")
        partial.write_text(json.dumps(content, indent=1, allow_nan=False) + "\n")
        os.replace(partial, path)


def check_same(path: Path, content: dict[str, Any], about: dict[str, Any]) -> None:
    """Raise a ValueError if a file's records are of another machine or other versions."""
    for key in {"machine", "versions"} & about.keys():
        there = content.get(key)
        if there != about[key]:
            raise ValueError(
                f"{path}: expected records of the same {key}, {about[key]}, got {there}; "
                "choose another file"
            )


def _counted(report: Path) -> dict[str, Any]:
    """Numbers and failures of a run, from pytest's own report."""
    counts = {"passed": 0, "failed": 0, "skipped": 0}
    failures = []
    cases = ElementTree.parse(report).iter("testcase") if report.exists() else ()
    for case in cases:
        bad = [child for child in case if child.tag in ("failure", "error")]
        if bad:
            counts["failed"] += 1
            name = f"{case.get('classname')}::{case.get('name')}"
            failures.append({"test": name, "message": _shortened(bad[0].text or "")})
        elif case.find("skipped") is not None:
            counts["skipped"] += 1
        else:
            counts["passed"] += 1
    return {**counts, "failures": failures}


def _shortened(message: str) -> str:
    """The beginning and the end, without the list of modules of a process that crashed."""
    lines = [line for line in message.splitlines() if not line.startswith("Extension modules:")]
    text = "\n".join(lines)
    half = MESSAGE // 2
    return text if len(text) <= MESSAGE else f"{text[:half]}\n...\n{text[-half:]}"


def _now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")
