"""Records of trials over several processes, and how they compare with one device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from megabatch.benchmarking import records
from megabatch.benchmarking.contenders import LOSSES
from megabatch.benchmarking.scaling import ScalingResult, Trial


@dataclass(frozen=True)
class ScalingRecord(records.Record):
    """A record with the fields that only several devices have."""

    host_ms: float | None  #: that the host takes to give out a step's work
    error_b: int | None  #: global batch at which the errors were found
    device_ms: tuple[float, ...]  #: of each device, a call's mean; on one, of each alone
    of_ideal: float | None  #: time on one device / (n_devices * this time), same b
    of_ideal_at_rate: float | None  #: the same, each time in units of its devices' product rate
    of_ideal_weak: float | None  #: n_devices * time on one device with as many rows / this time


def record(trial: Trial, result: ScalingResult) -> ScalingRecord:
    """The record of one trial; what compares it with others comes with `compare`."""
    one = records.combine(trial.case, [result], LOSSES[trial.case.loss].work, trial.n)
    return ScalingRecord(
        **asdict(one),
        host_ms=result.host_ms,
        error_b=result.error_b,
        device_ms=tuple(result.device_ms),
        of_ideal=None,
        of_ideal_at_rate=None,
        of_ideal_weak=None,
    )


def compare(found: Sequence[ScalingRecord]) -> list[ScalingRecord]:
    """Each held against one device in the same run; itself where there is no such record."""
    alone = {(r.loss, r.b): r for r in found if r.n_devices == 1 and r.contender == "megabatch"}
    return [_compared(r, alone) for r in found]


def _compared(r: ScalingRecord, alone: dict[tuple[str, int], ScalingRecord]) -> ScalingRecord:
    if r.ms is None or not r.contender.startswith("megabatch"):
        return r
    ms = r.ms
    changes: dict[str, Any] = {}
    strong, weak = alone.get((r.loss, r.b)), alone.get((r.loss, r.b // r.n_devices))
    if strong is not None and strong.ms is not None:
        changes["of_ideal"] = strong.ms / (r.n_devices * ms)
        if strong.fraction and r.fraction:
            changes["of_ideal_at_rate"] = r.fraction / strong.fraction
    if weak is not None and weak.ms is not None:
        changes["of_ideal_weak"] = r.n_devices * weak.ms / ms
    return replace(r, **changes)
