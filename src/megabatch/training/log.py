"""Progress of a run: metrics.jsonl, the trackers and the terminal."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil
import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from megabatch import files
from megabatch.config.settings import TrainConfig
from megabatch.training.trackers import Trackers

_LINE_EVERY = 10.0  # seconds, if the output is a file
_VALIDATION = "validation.jsonl"
_NO_CURVE = ("step", "epoch", "samples", "seconds")  # the x axes of curves


class MetricsLog:
    """Appends a record per logged step to RUN/metrics.jsonl, and gives its numbers to trackers.

    Records of steps after `resumed_step`, left by a process that was killed, are removed first, as
    these steps are repeated.
    """

    def __init__(self, run: Path, resumed_step: int, trackers: Trackers) -> None:
        self._reported = False
        path = run / "metrics.jsonl"
        for records in (path, run / _VALIDATION):
            if records.exists():
                _truncate(records, resumed_step)
        self._file = path.open("a", encoding="utf-8")
        self._trackers = trackers

    def write(self, record: dict[str, Any]) -> str:
        """Log one step; other processes see the record when this returns.

        Returns:
            "", or the reason for a failure, once per outage. Records that could not be written stay
            in memory and are written when there is room again.
        """
        curves = {f"train/{name}": v for name, v in record.items() if name not in _NO_CURVE}
        self._trackers.scalars(curves, record["step"])
        try:
            self._file.write(json.dumps(record) + "\n")
            self._file.flush()
        except OSError as error:
            reported, self._reported = self._reported, True
            return "" if reported else f"the log cannot be written: {error.strerror or error}"
        self._reported = False
        return ""

    def __enter__(self) -> MetricsLog:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            self.close()
        except OSError:
            if error is None:  # else it says more: the same disk's, at the last checkpoint
                raise

    def close(self) -> None:
        """Flush and close the file.

        Raises:
            OSError: the last records cannot be written.
        """
        self._file.close()


def log_validation(
    run: Path, trackers: Trackers, step: int, val_data: str | None, figures: dict[str, float]
) -> None:
    """Append a record to RUN/validation.jsonl, and give the figures to the trackers.

    The record names the data, since `val_data` may change when a run is resumed.

    Raises:
        OSError: the file cannot be written.
    """
    trackers.scalars({f"val/{name}": value for name, value in figures.items()}, step)
    with (run / _VALIDATION).open("a", encoding="utf-8") as file:
        file.write(json.dumps({"step": step, "val_data": val_data, **figures}) + "\n")


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


def waiting_advice(meter: Meter, config: TrainConfig, processes: int, *, images: bool) -> str:
    """Advice that would shorten a run's wait for data; "" if there is none or it was short.

    Args:
        meter: at the run's end. In its first minute the first batch counts most.
        config: its settings.
        processes: workers that fetched; 0 if a thread only copied samples.
        images: whether these are images, in pairs.
    """
    copied = config.workers and not processes
    if meter.seconds < 60 or meter.waited < 0.05 * meter.seconds or copied:
        return ""
    ways = [f"--workers above {config.workers}"]
    if images and config.image_resize == "pillow":
        ways.append("with an OpenCLIP model --image-resize torch")
    return f"to wait less: {'; '.join(ways)}"


def collapse_advice(records: Sequence[Mapping[str, float]], config: TrainConfig) -> str:
    """A line on a run whose loss says that all features are the same; "" for any other run.

    Args:
        records: the run's, of metrics.jsonl.
        config: its settings.
    """
    if config.loss not in ("clip", "infonce") or config.matryoshka_dims:
        return ""  # their loss of equal features is another one
    if config.duplicates == "ignored":
        return ""  # each row has candidates of its own
    candidates = config.global_batch_size * (1 + config.hard_negatives)
    collapsed = math.log(candidates)
    # Equal features have the loss ln(candidates), and no gradient. A healthy run may begin near
    # this loss, but with gradients that are among its largest. So a run has collapsed if, in the
    # later half of its records, at least ten, the loss is within 0.5% of that of equal features
    # and the gradient's norm below 1% of the run's largest.
    later = records[len(records) // 2 :]
    largest = max((record.get("grad_norm", math.inf) for record in records), default=0.0)
    flat = all(
        abs(record.get("loss", math.inf) - collapsed) < 0.005 * collapsed
        and record.get("grad_norm", math.inf) < 0.01 * largest < math.inf
        for record in later
    )
    if len(later) < 10 or not flat:
        return ""
    return (
        f"the run has collapsed: its loss stays at ln({candidates:,}) = {collapsed:.2f}, that of "
        "equal features (a lower --lr, a longer --warmup or --grad-clip-norm may help)"
    )


def memory_bytes(device: torch.device) -> int:
    """Bytes in use: on a GPU the peak of allocated tensors, else the process's current RSS."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    return int(psutil.Process().memory_info().rss)


class Display:
    """A progress bar on a terminal; otherwise a line every ten seconds."""

    def __init__(self, console: Console, total_steps: int, done: int) -> None:
        self._console = console
        self._total = total_steps
        self._done = done
        self._started_at = done
        self._start = self._last_line = time.monotonic()
        # Bar and memory would take the place of the steps and of the time left.
        self._narrow = console.is_terminal and console.width < 80
        self._bar = Progress(
            TextColumn("step"),
            MofNCompleteColumn(),
            *([] if self._narrow else [BarColumn(bar_width=None)]),
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
        if not self._bar.disable:  # older versions of rich end it with an empty line all the same
            self._bar.stop()

    def update(self, step: int, record: dict[str, float]) -> None:
        """Show a record of the log, of step `step`."""
        loss = f"{record['loss']:.3f}" if "loss" in record else "not finite"
        speed, memory = record["pairs_per_second"], record["memory_bytes"]
        text = f"loss {loss}  {speed:,.0f} pairs/s"
        if not self._narrow:
            text += f"  {memory / 2**30:.1f} GiB"
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


def _truncate(path: Path, last_step: int) -> None:
    """Keep the records up to `last_step`; an incomplete last line is removed too."""
    kept = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            if json.loads(line)["step"] <= last_step:
                kept.append(line + "\n")
        except (ValueError, KeyError, TypeError):
            continue
    files.write_text(path, "".join(kept))
