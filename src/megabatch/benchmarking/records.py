"""Records of measurements as JSON, with everything needed to repeat them."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import psutil
import torch

import megabatch
from megabatch import files

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


def command_line(output: Path) -> str:
    """This script's command line, without the folder of the output."""
    words = [word.replace(f"{output.parent}/", "") for word in sys.argv]
    return shlex.join(["python", *words])


def write(path: Path, command: str, records: Sequence[Any], **more: Any) -> None:
    """Write records (dataclasses or dicts) with command, commit, date, machine, versions and more.

    The file is replaced as a whole.
    """
    content = {
        "command": command,
        "commit": commit(),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "machine": machine(),
        "versions": versions(),
        **more,
        "records": [one if isinstance(one, dict) else asdict(one) for one in records],
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
