"""The result of one measurement, and its record."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from machinery import step
from machinery.inputs import Case

#: Times that a record has; of more repetitions it has quantiles.
_TIMES = 21


@dataclass
class Result:
    """The result of a case. `status`: ok, wrong, out of memory, failed; `note`: the reason."""

    status: str
    note: str = ""
    times_ms: Sequence[float] = ()
    product_rates: Sequence[float] = ()
    extra_bytes: int | None = None
    max_row_error: float | None = None
    loss_error: float | None = None
    scale_gradient_error: float | None = None
    seconds: float | None = None  #: requested, of each series
    queued_ms: float | None = None  #: of a short call while the GPU has earlier work

    def set_errors(self, case: Case, found: step.Errors) -> None:
        """Set the status and, if they are finite, the errors."""
        self.status, self.note = step.verdict(case, found)
        if all(error is None or math.isfinite(error) for error in found):
            self.max_row_error, self.loss_error, self.scale_gradient_error = found


@dataclass(frozen=True)
class Record:
    """One contender at one size. See benchmarks/README.md for the fields."""

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


def record(case: Case, result: Result, work: int, n_devices: int = 1) -> Record:
    """The record of a case: the median time, the mean product rate.

    Args:
        case, result: what was measured.
        work: operations that no implementation avoids, in units of b²d; the forward pass takes 2.
        n_devices: that shared the work, each with the product rate of the result.
    """
    measured = bool(result.times_ms) and result.status in ("ok", "wrong")
    ms = statistics.median(result.times_ms) if measured else None
    rate = statistics.fmean(result.product_rates) if measured else None
    fraction = None
    if ms is not None and rate is not None:
        operations = (work if case.backward else 2) * case.b * (case.n or case.b) * case.d
        fraction = operations / n_devices / (ms / 1e3) / rate
    return Record(
        **asdict(case),
        n_devices=n_devices,
        status=result.status,
        note=result.note,
        ms=ms,
        fraction=fraction,
        extra_bytes=result.extra_bytes if measured else None,
        max_row_error=result.max_row_error,
        loss_error=result.loss_error,
        scale_gradient_error=result.scale_gradient_error,
        product_tflops=None if rate is None else rate / 1e12,
        queued_ms=result.queued_ms if measured else None,
        seconds=result.seconds,
        repetitions=len(result.times_ms),
        times_ms=_few(tuple(result.times_ms)),
    )


def _few(times: tuple[float, ...]) -> tuple[float, ...]:
    if len(times) <= _TIMES:
        return times
    ordered = sorted(times)
    return tuple(ordered[round(i * (len(times) - 1) / (_TIMES - 1))] for i in range(_TIMES))
