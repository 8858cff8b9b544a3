"""Contenders side by side in one process, on the same inputs, with matrix products in between."""

from __future__ import annotations

import contextlib
import functools
import gc
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from machinery import step
from machinery.exact import of_copies
from machinery.family import LOSSES
from machinery.inputs import PERIOD, Case
from machinery.results import Result
from machinery.truth import Truth
from megabatch.benchmarking import memory
from megabatch.benchmarking.clock import product_rate, timed_calls, times

#: Milliseconds; shorter calls may be bound by launch overhead.
HOST_MATTERS = 20.0


@dataclass(frozen=True)
class Group:
    """Cases that differ only in their contender."""

    cases: tuple[Case, ...]
    seconds: float  #: of repetitions, and of the matrix products before and after
    product_size: int = 8192
    once: bool = False  #: the first call is the only one
    cost: float = 0.0  #: estimated seconds of the first call and the check

    @property
    def case(self) -> Case:
        """The first case, which has what all of them share."""
        return self.cases[0]


#: A contender about to be measured (None), or its result.
Event = tuple[Case, "Result | None"]


@dataclass
class _Ready:
    """A contender that has run once."""

    case: Case
    call: Callable[[], Tensor]
    result: Result
    ms: float  #: of one call


def run(group: Group, deadline: float) -> Iterator[Event]:
    """Measure a group; skip whatever would not end before `deadline` (of time.time()).

    First memory and errors of each contender in turn, which includes compilation; then times:
    products, contender, products, contender, products. So matrix products run right before and
    right after each contender, on a GPU that is equally warm for all.
    """
    if time.time() + group.cost > deadline:
        yield from ((case, Result("skipped", "no time left")) for case in group.cases)
        return
    with _float32_products(group.case.tf32):
        inputs = step.make_inputs(group.case)
        ready = []
        for case in group.cases:
            yield case, None
            if time.time() + 2 * group.seconds > deadline:
                contender: _Ready | Result = Result("skipped", "no time left")
            else:
                contender = _prepare(case, inputs, group)
            inputs.forget()
            _release(case)
            if isinstance(contender, Result):
                yield case, contender
            else:
                ready.append(contender)
        yield from _time(ready, inputs, group, deadline)
        del inputs, ready
        _release(group.case)


def queued_ms(call: Callable[[], object], calls: int = 8) -> float:
    """Milliseconds of a call on a GPU whose queue is full, so that launches cost no time.

    As in a training step, where the encoders' kernels are still queued: it is the call's time on
    the GPU, without launch overhead.
    """
    a = torch.ones(8192, 8192, device="cuda", dtype=torch.bfloat16)
    out = torch.empty_like(a)
    for _ in range(64):  # 0.1 s on an H200; launching 8 calls takes a sixth of it
        torch.mm(a, a, out=out)
    return statistics.median(timed_calls([call] * calls, "cuda"))


def warm_up(device: str) -> None:
    """Initialise the libraries' workspaces, so that no contender is charged for them."""
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        a = torch.ones(256, 256, device=device, dtype=dtype, requires_grad=True)
        (a @ a).sum().backward()


def _prepare(case: Case, inputs: step.Inputs, group: Group) -> _Ready | Result:
    """Call a contender twice; memory and errors come from the second call."""
    result = Result("ok", seconds=group.seconds)
    try:
        # First, as it makes what all contenders share: ids, a teacher's features.
        exact = _exact(replace(case, contender=""))
        before = _allocated(case)
        loss = LOSSES[case.loss].contenders[case.contender].load()
        call = step.forward_backward(loss, case, inputs)
        if group.once:  # compile at a smaller size
            step.forward_backward(loss, case, step.make_inputs(case, 2 * PERIOD))()
            result.product_rates = (_products(group),)
        else:
            call()
        inputs.forget()
        taken: list[float] = []
        value: list[Tensor] = []

        def timed() -> None:
            taken.extend(timed_calls([lambda: value.append(call())], case.device))

        # Include memory that the first call allocated for good.
        grown = _allocated(case) - before
        result.extra_bytes = grown + memory.extra_bytes(timed, case.device)
        result.extra_bytes = max(0, result.extra_bytes - inputs.gradient_bytes())
        result.set_errors(case, step.errors(case, inputs, value[0], exact))
        return _Ready(case, call, result, taken[0])
    except Exception as error:
        return _failure(error, case)


def _time(
    ready: list[_Ready], inputs: step.Inputs, group: Group, deadline: float
) -> Iterator[Event]:
    before: float | None = None
    for contender in ready:
        case, result = contender.case, contender.result
        yield case, None
        needed = 2 * group.seconds + max(group.seconds, 2e-3 * contender.ms)
        try:
            if group.once:
                result.times_ms = (contender.ms,)
                result.product_rates = (*result.product_rates, _products(group))
            elif time.time() + needed > deadline:
                result = Result("skipped", "no time left")
            else:
                before = before or _products(group)
                result.times_ms = times(contender.call, case.device, group.seconds, repetitions=2)
                after = _products(group)
                result.product_rates, before = (before, after), after
                if case.device == "cuda" and contender.ms < HOST_MATTERS:
                    result.queued_ms = queued_ms(contender.call)
        except Exception as error:
            result, before = _failure(error, case), None
        inputs.forget()
        yield case, result


def _products(group: Group) -> float:
    case = group.case
    return product_rate(case.device, case.torch_dtype, group.product_size, group.seconds)


@functools.lru_cache(maxsize=4)
def _exact(case: Case) -> Truth:
    """Exact result, cached for contenders and for any number of repetitions of the rows."""
    copies, rest = divmod(case.b, PERIOD)
    if case.loss == "clip" and copies > 1 and not rest:
        return of_copies(_exact(replace(case, b=PERIOD, backward=True)), copies)
    return step.exact_result(case, step.make_inputs(case))


def _failure(error: Exception, case: Case) -> Result:
    if memory.is_out_of_memory(error):
        return Result("out of memory", memory.reason(error))
    if case.device == "cuda":
        torch.cuda.synchronize()  # raises, and ends the process, if the CUDA context is broken
    first = str(error).strip().split("\n")[0]
    return Result("failed", f"{type(error).__name__}: {first}"[:300])


@contextlib.contextmanager
def _float32_products(tf32: bool) -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if tf32 else "highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def _allocated(case: Case) -> int:
    return torch.cuda.memory_allocated() if case.device == "cuda" else 0


def _release(case: Case) -> None:
    gc.collect()
    if case.device == "cuda":
        torch.cuda.empty_cache()
