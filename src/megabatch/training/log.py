"""What a run tells its files: metrics.jsonl and TensorBoard."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import psutil
import torch
from torch.utils.tensorboard import SummaryWriter

from megabatch import files

_NO_CURVE = ("step", "epoch", "samples", "seconds")  # what a curve is drawn against


class MetricsLog:
    """Appends one record a logged step to RUN/metrics.jsonl and its numbers to RUN/tensorboard.

    Records of steps after `resumed_step` come from a process that was killed: they are cut off
    first, since those steps are done again.
    """

    def __init__(self, run: Path, resumed_step: int) -> None:
        self._told = False
        path = run / "metrics.jsonl"
        if path.exists():
            _cut_back(path, resumed_step)
        self._file = path.open("a", encoding="utf-8")
        self._board = SummaryWriter(str(run / "tensorboard"), purge_step=resumed_step + 1)

    def write(self, record: dict[str, Any]) -> str:
        """Log one step; on the disk when this returns, as far as another process can see.

        Returns:
            "", or once an outage why it could not be written. The records that were not are kept
            in memory and written when there is room again.
        """
        try:
            self._file.write(json.dumps(record) + "\n")
            self._file.flush()
            for name, value in record.items():
                if name not in _NO_CURVE:
                    self._board.add_scalar(f"train/{name}", value, record["step"])
        except OSError as error:
            told, self._told = self._told, True
            return "" if told else f"the log cannot be written: {error.strerror or error}"
        self._told = False
        return ""

    def close(self) -> None:
        """Flush and close both.

        Raises:
            OSError: what was logged last cannot be written.
        """
        try:
            self._file.close()
        finally:
            self._board.close()


class Meter:
    """Measures speed and the share of time spent waiting for data, a step at a time.

    seconds: of training so far, those before a resume included. waited: of these, for data.
    """

    def __init__(self, seconds: float, waited: float) -> None:
        self.seconds, self.waited = seconds, waited
        self._now = time.perf_counter()
        self._since = seconds, waited

    def data_came(self) -> None:
        """Count the time since the last mark as waiting."""
        before = self.seconds
        self.mark()
        self.waited += self.seconds - before

    def mark(self) -> None:
        """Count the time since the last mark as work."""
        before, self._now = self._now, time.perf_counter()
        self.seconds += self._now - before

    def lap(self, pairs: int) -> dict[str, float]:
        """Pairs a second and share of waiting, since the last lap."""
        seconds, waited = self.seconds - self._since[0], self.waited - self._since[1]
        self._since = self.seconds, self.waited
        return {"pairs_per_second": pairs / seconds, "data_wait": waited / seconds}


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
    files.write_text(path, "".join(kept))
