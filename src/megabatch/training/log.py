"""Progress of a run on the terminal, and what it measures."""

from __future__ import annotations

import time
from datetime import timedelta

import psutil
import torch
from rich.console import Console

#: Seconds between two lines.
LINE_EVERY = 10.0


class Meter:
    """Measures the time of training and the part of it spent waiting for data.

    Attributes:
        seconds: of training so far, including before a resume.
        waited: seconds of these spent waiting for data.
    """

    def __init__(self, seconds: float, waited: float) -> None:
        self.seconds, self.waited = seconds, waited
        self._now = time.perf_counter()
        self._since = seconds, waited

    def mark(self, *, waited: bool = False) -> None:
        """Count the time since the last mark, as waiting for data or as work."""
        before, self._now = self._now, time.perf_counter()
        self.seconds += self._now - before
        self.waited += (self._now - before) * waited

    def leave_out(self) -> None:
        """Do not count the time since the last mark."""
        self._now = time.perf_counter()

    def lap(self, pairs: int) -> dict[str, float]:
        """Pairs per second and share of time spent waiting, since the last lap."""
        seconds, waited = self.seconds - self._since[0], self.waited - self._since[1]
        self._since = self.seconds, self.waited
        return {"pairs_per_second": pairs / seconds, "data_wait": waited / seconds}


def memory_bytes(device: torch.device) -> int:
    """Bytes in use: on a GPU the peak of allocated tensors, else the process's current RSS."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    return int(psutil.Process().memory_info().rss)


class Progress:
    """Prints a line every ten seconds, and one for the last step."""

    def __init__(self, console: Console, total_steps: int, done: int) -> None:
        self._console, self._total, self._done = console, total_steps, done
        self._start = self._last = time.monotonic()

    def update(self, step: int, record: dict[str, float]) -> None:
        """Show a record of the log, of step `step`."""
        now = time.monotonic()
        if step < self._total and now - self._last < LINE_EVERY:
            return
        self._last = now
        loss = f"{record['loss']:.3f}" if "loss" in record else "not finite"
        left = (now - self._start) / (step - self._done) * (self._total - step)
        self._console.print(
            f"step {step}/{self._total}  loss {loss}  {record['pairs_per_second']:,.0f} pairs/s  "
            f"{record['memory_bytes'] / 2**30:.1f} GiB  {duration(left)} left"
        )


def duration(seconds: float) -> str:
    """Format seconds as 0:02:05."""
    return str(timedelta(seconds=round(seconds)))
