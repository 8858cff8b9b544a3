"""Records of measurements as JSON, with everything needed to repeat them."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import shlex
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import psutil
import torch

import megabatch
from megabatch import files
from megabatch.benchmarking.inputs import Case
from megabatch.benchmarking.measure import Result

_PACKAGES = (
    "megabatch",
    "torch",
    "torchvision",
    "triton",
    "numpy",
    "open_clip_torch",
    "inf-cl",
    "memeff",
    "liger-kernel",
    "cut-cross-entropy",
    "siglip-kernel",
)
#: Times that a record has; of more repetitions it has quantiles.
_TIMES = 21


@dataclass(frozen=True)
class Record:
    """One contender at one size, over all rounds. See benchmarks/README.md for the fields."""

    contender: str
    loss: str
    device: str
    n_devices: int
    dtype: str
    b: int
    d: int
    scale: float
    n: int | None
    features: str
    tf32: bool
    backward: bool
    status: str
    note: str
    ms: float | None
    fraction: float | None
    extra_bytes: int | None
    max_row_error: float | None
    loss_error: float | None
    scale_gradient_error: float | None
    product_tflops: float | None
    queued_ms: float | None
    seconds: float | None
    repetitions: int
    times_ms: tuple[float, ...]


def combine(case: Case, results: Sequence[Result], work: int, n_devices: int = 1) -> Record:
    """Combine the rounds of a case: median time, mean product rate, maximum of the rest.

    Args:
        case, results: the case and one result per round.
        work: operations that no implementation avoids, in units of b²d; the forward pass takes 2.
        n_devices: that shared the work, each with the product rate of the results.
    """
    times = tuple(t for result in results for t in result.times_ms)
    rates = [rate for result in results for rate in result.product_rates]
    bad = next((result for result in results if result.status != "ok"), None)
    measured = bool(times) and (bad is None or bad.status == "wrong")
    ms = statistics.median(times) if measured else None
    rate = statistics.fmean(rates) if measured else None
    fraction = None
    if ms is not None and rate is not None:
        operations = (work if case.backward else 2) * case.b * (case.n or case.b) * case.d
        fraction = operations / n_devices / (ms / 1e3) / rate
    return Record(
        **asdict(case),
        n_devices=n_devices,
        status="ok" if bad is None else bad.status,
        note="" if bad is None else bad.note,
        ms=ms,
        fraction=fraction,
        extra_bytes=_largest(results, "extra_bytes") if measured else None,
        max_row_error=_largest(results, "max_row_error"),
        loss_error=_largest(results, "loss_error"),
        scale_gradient_error=_largest(results, "scale_gradient_error"),
        product_tflops=None if rate is None else rate / 1e12,
        queued_ms=_largest(results, "queued_ms") if measured else None,
        seconds=_largest(results, "seconds"),
        repetitions=len(times),
        times_ms=_few(times),
    )


def _largest(results: Sequence[Result], name: str) -> Any:
    return max((v for r in results if (v := getattr(r, name)) is not None), default=None)


def _few(times: tuple[float, ...]) -> tuple[float, ...]:
    if len(times) <= _TIMES:
        return times
    ordered = sorted(times)
    return tuple(ordered[round(i * (len(times) - 1) / (_TIMES - 1))] for i in range(_TIMES))


def command_line(output: Path) -> str:
    """This script's command line, without the folder of the output."""
    words = [word.replace(f"{output.parent}/", "") for word in sys.argv]
    return shlex.join(["python", *words])


def write(path: Path, command: str, records: Sequence[Any]) -> None:
    """Write records (dataclasses) with command, commit, date, machine and versions, atomically."""
    content = {
        "command": command,
        "commit": commit(),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "machine": machine(),
        "versions": versions(),
        "records": [asdict(record) for record in records],
    }
    files.write_text(path, json.dumps(content, indent=1, allow_nan=False) + "\n")


def commit() -> str | None:
    """The commit of the sources, with "-dirty" if they differ from it; None outside a checkout."""
    root = Path(megabatch.__file__).parents[2]
    if not (root / ".git").exists():
        return None
    git = ["git", "-C", str(root)]
    try:
        head = subprocess.run(
            [*git, "rev-parse", "--short", "HEAD"], check=True, capture_output=True, text=True
        )
        changed = subprocess.run([*git, "diff", "--quiet", "HEAD", "--", "src", "benchmarks/*.py"])
    except (OSError, subprocess.CalledProcessError):  # no git, or another user's folder
        return None
    return head.stdout.strip() + ("-dirty" if changed.returncode else "")


def machine() -> dict[str, Any]:
    """The machine of the measurements."""
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {
        "cpu": _cpu_name(),
        "cores": psutil.cpu_count(logical=False) or os.cpu_count(),
        "threads": torch.get_num_threads(),
        "memory_bytes": psutil.virtual_memory().total,
        "gpus": gpus,
        "system": platform.platform(),
    }


def versions() -> dict[str, str]:
    """Versions of Python and of the relevant packages that are installed."""
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    found.setdefault("megabatch", megabatch.__version__)  # run from its sources, not installed
    return found


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()
