"""Records of measurements as JSON, with what is needed to repeat them."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import psutil
import torch

from megabatch.benchmarking.inputs import Case
from megabatch.benchmarking.measure import Result

_PACKAGES = ("megabatch", "torch", "triton", "numpy", "open_clip_torch")


@dataclass(frozen=True)
class Record:
    """One contender at one size, all rounds together. See benchmarks/README.md for the fields."""

    contender: str
    loss: str
    device: str
    n_devices: int
    dtype: str
    b: int
    d: int
    scale: float
    status: str
    note: str
    ms: float | None
    fraction: float | None
    extra_bytes: int | None
    max_row_error: float | None
    loss_error: float | None
    scale_gradient_error: float | None
    product_tflops: float | None
    times_ms: tuple[float, ...]


def combine(case: Case, results: Sequence[Result], work: int) -> Record:
    """One record of the rounds of one case: median time, mean product rate, largest of the rest.

    Args:
        work: what no implementation can avoid, in units of b²d operations.
    """
    times = tuple(t for result in results for t in result.times_ms)
    rates = [rate for result in results for rate in result.product_rates]
    bad = next((result for result in results if result.status != "ok"), None)
    measured = bool(times) and (bad is None or bad.status == "wrong")
    ms = statistics.median(times) if measured else None
    rate = statistics.fmean(rates) if measured else None
    fraction = None
    if ms is not None and rate is not None:
        fraction = work * case.b**2 * case.d / (ms / 1e3) / rate
    return Record(
        **asdict(case),
        n_devices=1,
        status="ok" if bad is None else bad.status,
        note="" if bad is None else bad.note,
        ms=ms,
        fraction=fraction,
        extra_bytes=_largest(results, "extra_bytes") if measured else None,
        max_row_error=_largest(results, "max_row_error"),
        loss_error=_largest(results, "loss_error"),
        scale_gradient_error=_largest(results, "scale_gradient_error"),
        product_tflops=None if rate is None else rate / 1e12,
        times_ms=times,
    )


def _largest(results: Sequence[Result], name: str) -> Any:
    return max((v for r in results if (v := getattr(r, name)) is not None), default=None)


def write(path: Path, command: str, records: Sequence[Record]) -> None:
    """Write the records with command, date, machine and versions, atomically."""
    content = {
        "command": command,
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "machine": machine(),
        "versions": versions(),
        "records": [asdict(record) for record in records],
    }
    partial = path.with_name(path.name + ".partial")
    partial.write_text(json.dumps(content, indent=1, allow_nan=False) + "\n")
    os.replace(partial, path)


def machine() -> dict[str, Any]:
    """What the measurements ran on."""
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
    """Python and the packages that matter here, where they are installed."""
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()
