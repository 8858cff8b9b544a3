"""What a run tells its user while it trains."""

from __future__ import annotations

import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

_LINE_EVERY = 10.0  # seconds, where the output is a file


class Display:
    """A progress bar on a terminal; elsewhere a line every ten seconds."""

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

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._bar.stop()

    def update(self, step: int, record: dict[str, float]) -> None:
        """Show the state after `step` steps: a record of the log."""
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
    """Seconds in words: 9s, 2m 05s, 3h 07m."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m {whole % 60:02d}s"
    return f"{whole // 3600}h {whole % 3600 // 60:02d}m"
