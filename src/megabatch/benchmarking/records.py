"""Records of measurements as JSON, with everything needed to repeat them."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import platform
import shlex
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
    "nvidia-cutlass-dsl",
    "sentence-transformers",
    "transformers",
)


def command_line(output: Path) -> str:
    """This script's command line, without the folder of the output."""
    words = [word.replace(f"{output.parent}/", "") for word in sys.argv]
    return shlex.join(["python", *words])


def write(path: Path, command: str, records: Sequence[Any], **more: Any) -> None:
    """Write records (dataclasses or dicts) with command, date, machine, versions, sources and more.

    The file is replaced as a whole.
    """
    content = {
        "command": command,
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        **environment(),
        **more,
        "records": [one if isinstance(one, dict) else asdict(one) for one in records],
    }
    files.write_text(path, json.dumps(content, indent=1, allow_nan=False) + "\n")


def environment() -> dict[str, Any]:
    """The fields of every record: the machine, versions of packages, hashes of the sources."""
    return {"machine": machine(), "versions": versions(), "sources": sources()}


def sources() -> dict[str, str]:
    """A hash of each package of megabatch that this process has imported, and of the losses'."""
    root = Path(megabatch.__file__).parent
    imported = {name.split(".")[1] for name in sys.modules if name.startswith("megabatch.")}
    packages = sorted(imported | {"losses", "similarity"})
    return {name: digest(root / name) for name in packages if (root / name).is_dir()}


def digest(package: Path) -> str:
    """A hash of the Python files of a package: it changes with any of them."""
    found = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        found.update(str(path.relative_to(package)).encode() + b"\0" + path.read_bytes() + b"\0")
    return found.hexdigest()[:12]


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
