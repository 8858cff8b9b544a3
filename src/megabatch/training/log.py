"""Progress of a run on the terminal, and what it measures."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager

import psutil
import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

_LINE_EVERY = 10.0  # seconds, if the output is a file


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

    def data_came(self) -> None:
        """Count the time since the last mark as waiting."""
        before = self.seconds
        self.mark()
        self.waited += self.seconds - before

    def mark(self) -> None:
        """Count the time since the last mark as work."""
        before, self._now = self._now, time.perf_counter()
        self.seconds += self._now - before

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


class Display(AbstractContextManager["Display"]):
    """A progress bar on a terminal; otherwise a line every ten seconds."""

    def __init__(self, console: Console, total_steps: int, done: int) -> None:
        self._console = console
        self._total = total_steps
        self._done = done
        self._started_at = done
        self._start = self._last_line = time.monotonic()
        self._bar = Progress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(bar_width=None),
            TextColumn("{task.fields[text]}"),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=console,
            disable=console.quiet or not console.is_terminal,
        )
        self._task = self._bar.add_task("train", total=total_steps, completed=done, text="")

    def __enter__(self) -> Display:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if not self._bar.disable:  # older versions of rich end it with an empty line all the same
            self._bar.stop()

    def update(self, step: int, record: dict[str, float]) -> None:
        """Show a record of the log, of step `step`."""
        loss = f"{record['loss']:.3f}" if "loss" in record else "not finite"
        speed, memory = record["pairs_per_second"], record["memory_bytes"]
        text = f"loss {loss}  {speed:,.0f} pairs/s  {memory / 2**30:.1f} GiB"
        self._bar.update(self._task, completed=step, text=text)
        now = time.monotonic()
        last = step == self._total
        if not self._console.is_terminal and (last or now - self._last_line >= _LINE_EVERY):
            self._last_line = now
            left = (now - self._start) / (step - self._started_at) * (self._total - step)
            self._console.print(
                f"step {step}/{self._total}  {text}  {duration(left)} left",
                soft_wrap=True,
                highlight=False,
            )


def duration(seconds: float) -> str:
    """Format seconds: 9s, 2m 05s, 3h 07m."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m {whole % 60:02d}s"
    return f"{whole // 3600}h {whole % 3600 // 60:02d}m"
