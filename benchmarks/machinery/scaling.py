"""Trials over several processes: one contender, one global batch, one number of processes each.

Their records compare several devices with one.
"""

from __future__ import annotations

import gc
import json
import math
import os
import statistics
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from machinery import group, results, step
from machinery.contenders import LossFunction
from machinery.family import LOSSES
from machinery.group import HOST_MATTERS, queued_ms
from machinery.inputs import PERIOD, Case
from machinery.parallel import PARALLEL, Contender, shard
from machinery.ranks import Team
from machinery.results import Result
from machinery.truth import Truth
from megabatch.benchmarking import memory
from megabatch.benchmarking.clock import product_rate, timed_calls

#: Rows per process in the first check of every contender.
CHECK_ROWS = 320
#: FLOP/s per GPU that a trial reaches at least, to estimate its time.
EXPECTED = 4e14
#: Seconds for which a measured product rate is reused.
RECENT = 3.0
#: Calls timed by the host's clock alone.
HOST_CALLS = 5
#: Duration of the warm-up calls, in units of a trial's seconds. After a pause a GPU at its power
#: limit is unsteady for a second: of calls that take 364 ms on 2 H200s the second takes 385, and
#: with another number of GPUs another call would.
WARM = 1.5


@dataclass(frozen=True)
class Trial:
    """One measurement; `case.b` is the global batch."""

    case: Case
    n: int  #: processes
    seconds: float = 1.0  #: of repetitions, and of the matrix products before and after
    product_size: int = 8192
    once: bool = False  #: too long to repeat: time the first call at this size

    @property
    def contender(self) -> Contender:
        """The implementation to measure."""
        return PARALLEL[self.case.loss][self.case.contender]

    @property
    def cost(self) -> float:
        """Estimated seconds, including compilation."""
        work = LOSSES[self.case.loss].work * self.case.b**2 * self.case.d
        calls = 1 if self.once else 3
        call = 0.0 if self.case.device == "cpu" else work / self.n / EXPECTED
        return calls * call + max(call if not self.once else 0.0, self.seconds) + 5 * self.seconds


@dataclass
class ScalingResult(Result):
    """The combined result of all processes."""

    host_ms: float | None = None  #: launch overhead of a step on the host
    error_b: int | None = None  #: global batch at which the errors were found
    device_ms: tuple[float, ...] = ()  #: mean of a call on each device


def work(
    trials: Sequence[Trial],
    teams: dict[int, Team],
    skip: Collection[int],
    deadline: float,
    say: Callable[[dict[str, Any]], None],
) -> None:
    """Run the trials in order, on every process, except those to skip.

    Rank 0 decides whether there is time for one, and reports its start and its result.
    """
    everyone = teams[max(teams)]
    runner = _Runner(teams)
    for i, trial in enumerate(trials):
        if i in skip:
            continue
        late = time.time() + trial.cost > deadline
        late, _ = everyone.broadcast((late, i))
        say({"case": i})
        result: ScalingResult | None = ScalingResult("skipped", "no time left")
        if not late:
            result = runner.run(trial) if trial.n in teams else None
            everyone.barrier()
        if trial.n == 1:
            result = alone(everyone.all_gather(result))
        if everyone.rank == 0:
            assert result is not None
            say({"case": i, "result": asdict(result)})


def alone(results: Sequence[ScalingResult]) -> ScalingResult:
    """Combine devices that each did all the work at the same time, at their mean rate.

    Devices of one host differ by some per cent, so what one of them takes says little of what
    several could reach together.
    """
    bad = next((r for r in results if r.status != "ok"), None)
    if bad is not None or len(results) == 1:
        return bad or results[0]
    queued = [r.queued_ms for r in results if r.queued_ms is not None]
    return replace(
        results[0],
        # The number of repetitions may differ.
        times_ms=[
            statistics.harmonic_mean(t) for t in zip(*(r.times_ms for r in results), strict=False)
        ],
        device_ms=tuple(ms for r in results for ms in r.device_ms),
        product_rates=[rate for r in results for rate in r.product_rates],
        extra_bytes=max(r.extra_bytes or 0 for r in results),
        queued_ms=statistics.harmonic_mean(queued) if queued else None,
        host_ms=max((r.host_ms for r in results if r.host_ms is not None), default=None),
    )


class _Runner:
    """Runs trials; caches checks and the last product rate."""

    def __init__(self, teams: dict[int, Team]) -> None:
        self.teams = teams
        self.checked: dict[tuple[str, str, int], ScalingResult] = {}
        self.last_rate: tuple[int, float, float] | None = None  #: team, when, rate

    def run(self, trial: Trial) -> ScalingResult:
        """The result, which the processes of the team share."""
        team, case = self.teams[trial.n], trial.case
        result = ScalingResult("ok", seconds=trial.seconds)
        failure: tuple[str, str] | None = None
        try:
            with trial.contender.around():
                self._measure(trial, team, result)
        except Exception as error:
            failure = _failure(error, case)
        gc.collect()
        if case.device == "cuda":
            torch.cuda.empty_cache()
        failures = [other for other in team.all_gather(failure) if other is not None]
        return ScalingResult(*failures[0]) if failures else result

    def _measure(self, trial: Trial, team: Team, result: ScalingResult) -> None:
        case = trial.case
        loss = trial.contender.load(team)
        if trial.contender.checked:
            _take_errors(self._check_small(trial, team, loss), result)
        rows = case.b // team.size
        inputs = shard_inputs(case, team)
        call = step.forward_backward(loss, case, inputs)
        before = _allocated(case)
        if trial.once:  # compile at a smaller size
            less = replace(case, b=min(rows, 2 * 16_384) * team.size)
            step.forward_backward(loss, less, shard_inputs(less, team))()
        else:
            call()
        inputs.forget()
        taken: list[float] = []
        values: list[Tensor] = []
        rates = []
        if trial.once:
            rates.append(self._rate(trial, team))
        team.barrier()

        def once() -> None:
            taken.extend(timed_calls([lambda: values.append(call())], case.device))

        extra = _allocated(case) - before + memory.extra_bytes(once, case.device)
        extra -= inputs.gradient_bytes()
        result.extra_bytes = max(0, max(team.all_gather(extra)))
        if trial.contender.checked and _exact_is_known(case):
            exact = group._exact(replace(case, contender=""))
            _set_errors(case, team, inputs, values[0], exact, result)
        inputs.forget()
        if trial.once:
            each = team.all_gather(taken)
        else:
            rates.append(self._rate(trial, team, reuse=True))
            each = _times(call, trial, team, taken[0])
        # Not the maximum of each call: ranks start and end a call at different times, so the maxima
        # would add up to more than the elapsed time.
        result.times_ms = max(each, key=sum)
        result.device_ms = tuple(statistics.fmean(times) for times in each)
        rates.append(self._rate(trial, team))
        result.product_rates = rates
        if not trial.once:
            result.host_ms = _host_ms(call, case, team)
            if case.device == "cuda" and result.times_ms[0] < HOST_MATTERS:
                team.barrier()
                result.queued_ms = max(team.all_gather(queued_ms(call)))
        inputs.forget()

    def _rate(self, trial: Trial, team: Team, reuse: bool = False) -> float:
        """Mean product rate of all the team's devices at once; with `reuse`, a recent one."""
        size, when, recent = team.broadcast(self.last_rate or (0, 0.0, 0.0))
        if reuse and size == team.size and team.broadcast(time.time() - when < RECENT):
            return float(recent)
        team.barrier()
        case = trial.case
        rate = product_rate(case.device, case.torch_dtype, trial.product_size, trial.seconds)
        rates = team.all_gather(rate)
        mean = sum(rates) / len(rates)
        self.last_rate = (team.size, time.time(), mean)
        return mean

    def _check_small(self, trial: Trial, team: Team, loss: LossFunction) -> ScalingResult:
        """Compare with float64 at a small size, once for each contender and team."""
        key = (trial.case.loss, trial.case.contender, trial.n)
        if key not in self.checked:
            case = replace(trial.case, b=min(trial.case.b, CHECK_ROWS * team.size))
            inputs = shard_inputs(case, team)
            value = step.forward_backward(loss, case, inputs)()
            self.checked[key] = ScalingResult("ok")
            exact = step.exact_result(case, step.make_inputs(case))
            _set_errors(case, team, inputs, value, exact, self.checked[key])
        return self.checked[key]


def shard_inputs(case: Case, team: Team) -> step.Inputs:
    """This rank's rows of the case's features, and the scalars."""
    x, y = shard(case, team)
    scalars = step.make_inputs(case, rows=1).scalars
    return step.Inputs(x.requires_grad_(), y.requires_grad_(), scalars)


def _set_errors(
    case: Case,
    team: Team,
    inputs: step.Inputs,
    value: Tensor,
    exact: Truth,
    result: ScalingResult,
) -> None:
    """The largest errors of all ranks, after averaging over the team as DDP does."""
    rows = case.b // team.size
    place = torch.arange(team.rank * rows, (team.rank + 1) * rows, device=exact.dx.device)
    place %= len(exact.dx)
    own = exact._replace(dx=exact.dx[place], dy=exact.dy[place])
    values = [value, *(t.grad for t in inputs.scalars if t.grad is not None)]
    shared = torch.tensor(team.all_gather([v.item() for v in values]), dtype=torch.float64).mean(0)
    for tensor in (inputs.x, inputs.y):
        if tensor.grad is not None:
            tensor.grad /= team.size
    for tensor, mean in zip(
        (t for t in inputs.scalars if t.grad is not None), shared[1:], strict=True
    ):
        tensor.grad = mean.to(tensor)
    found = step.errors(case, inputs, shared[0].to(exact.loss), own)
    row, of_loss, of_scale = (
        _worst(each) for each in zip(*team.all_gather(tuple(found)), strict=True)
    )
    assert of_loss is not None
    worst = step.Errors(row, of_loss, of_scale)
    wrong = None if result.status == "ok" else result.note  # wrong at a smaller size already
    result.set_errors(case, worst)
    result.error_b = case.b
    if result.status == "ok" and (worst.scale or 0) > step.SANE[case.dtype]:
        result.status, result.note = "wrong", f"the scale's gradient is off by {worst.scale:.2g}"
    if wrong is not None:
        result.status, result.note = "wrong", wrong


def _take_errors(source: ScalingResult, result: ScalingResult) -> None:
    result.status, result.note, result.error_b = source.status, source.note, source.error_b
    result.max_row_error, result.loss_error = source.max_row_error, source.loss_error
    result.scale_gradient_error = source.scale_gradient_error


def _exact_is_known(case: Case) -> bool:
    """Whether float64 takes seconds at most: up to a period, or CLIP's loss of whole periods."""
    return case.b <= PERIOD or (case.loss == "clip" and case.b % PERIOD == 0)


def _worst(errors: Sequence[float | None]) -> float | None:
    numbers = [error for error in errors if error is not None]
    if any(math.isnan(error) for error in numbers):
        return math.nan
    return max(numbers, default=None)


def _times(
    call: Callable[[], Tensor], trial: Trial, team: Team, once_ms: float
) -> list[list[float]]:
    """Times of every rank as by `clock.times`, with the same number of calls on each."""
    calls = 1e3 * trial.seconds / max(team.all_gather(once_ms))
    first, count = team.broadcast((max(1, math.ceil(WARM * calls)), max(2, math.ceil(calls))))
    team.barrier()
    taken = team.all_gather(timed_calls([call] * (first + count), trial.case.device))
    return [each[first:] for each in taken]


def _host_ms(call: Callable[[], Tensor], case: Case, team: Team) -> float:
    if case.device == "cuda":
        torch.cuda.synchronize()
    team.barrier()
    begin = time.perf_counter()
    for _ in range(HOST_CALLS):
        call()
    taken = 1e3 * (time.perf_counter() - begin) / HOST_CALLS
    if case.device == "cuda":
        torch.cuda.synchronize()
    return max(team.all_gather(taken))


def _failure(error: Exception, case: Case) -> tuple[str, str]:
    result = group._failure(error, case)
    return result.status, result.note


def _allocated(case: Case) -> int:
    return torch.cuda.memory_allocated() if case.device == "cuda" else 0


@dataclass(frozen=True)
class ScalingRecord(results.Record):
    """A record with further fields for several devices."""

    host_ms: float | None  #: launch overhead of a step on the host
    error_b: int | None  #: global batch at which the errors were found
    device_ms: tuple[float, ...]  #: mean of a call on each device; with n = 1, of each one alone
    of_ideal: float | None  #: time on one device / (n_devices * this time), same b
    of_ideal_at_rate: float | None  #: the same, with times in units of the devices' product rates
    of_ideal_weak: float | None  #: n_devices * time on one device with as many rows / this time


def record(trial: Trial, result: ScalingResult) -> ScalingRecord:
    """The record of one trial, without the comparisons of `compare`."""
    one = results.record(trial.case, result, LOSSES[trial.case.loss].work, trial.n)
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
    """Compare each record with one device in the same run, if there is such a record."""
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


def speaker(rank: int) -> Callable[[dict[str, Any]], None]:
    """A function that prints rank 0's messages to stdout; libraries' output goes to stderr."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def say(words: dict[str, Any]) -> None:
        if rank == 0:
            print(json.dumps(words), file=out, flush=True)

    return say
