"""What a run tells its files: metrics.jsonl and TensorBoard."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import psutil
import torch
from torch.utils.tensorboard import SummaryWriter

_NO_CURVE = ("step", "epoch", "samples", "seconds")  # what a curve is drawn against


class MetricsLog:
    """Appends one record a logged step to RUN/metrics.jsonl and its numbers to RUN/tensorboard.

    Records of steps after `resumed_step` come from a process that was killed: they are cut off
    first, since those steps are done again.
    """

    def __init__(self, run: Path, resumed_step: int) -> None:
        path = run / "metrics.jsonl"
        if path.exists():
            _cut_back(path, resumed_step)
        self._file = path.open("a", encoding="utf-8")
        self._board = SummaryWriter(str(run / "tensorboard"), purge_step=resumed_step + 1)

    def write(self, record: dict[str, Any]) -> None:
        """Log one step; on the disk when this returns, as far as another process can see."""
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()
        for name, value in record.items():
            if name not in _NO_CURVE:
                self._board.add_scalar(f"train/{name}", value, record["step"])

    def close(self) -> None:
        """Flush and close both."""
        self._file.close()
        self._board.close()


def memory_bytes(device: torch.device) -> int:
    """Bytes in use: on a GPU the most that tensors have taken so far, else the process's now."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    return int(psutil.Process().memory_info().rss)


def _cut_back(path: Path, last_step: int) -> None:
    """Keep the records up to `last_step`; a half-written last line goes too."""
    kept = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            if json.loads(line)["step"] <= last_step:
                kept.append(line + "\n")
        except (ValueError, KeyError, TypeError):
            continue
    partial = path.with_name(path.name + ".partial")
    with partial.open("w", encoding="utf-8") as file:
        file.writelines(kept)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)
