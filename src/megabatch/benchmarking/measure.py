"""One contender at one size, in this process."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import psutil
import torch
from torch import Tensor

from megabatch.benchmarking import memory, truth
from megabatch.benchmarking.clock import product_rate, times
from megabatch.benchmarking.contenders import LOSSES, LossFunction
from megabatch.benchmarking.inputs import Case, features

#: A relative error of a gradient's row above this is not rounding but another loss. Dense losses
#: round their logits to the features' dtype, and stay below.
SANE = {"float64": 1e-8, "float32": 2e-2, "bfloat16": 0.3, "float16": 0.1}


@dataclass(frozen=True)
class Effort:
    """How long to measure."""

    seconds: float  #: of each series of repetitions, and of the matrix products around it
    repetitions: int  #: at least
    product_size: int  #: rows and columns of those products
    check_batch_size: int  #: rows of the comparison with float64, where the case has more
    max_memory: int | None  #: bytes a contender may take (CPU); None: what the machine has


@dataclass
class Result:
    """What one process found. `status`: ok, wrong, out of memory, failed; `note`: why not ok."""

    status: str
    note: str = ""
    times_ms: Sequence[float] = ()
    product_rates: Sequence[float] = ()
    extra_bytes: int | None = None
    max_row_error: float | None = None
    loss_error: float | None = None
    scale_gradient_error: float | None = None


def measure(case: Case, effort: Effort) -> Result:
    """Memory, time and errors of a case.

    The contender's first full run comes before anything else that is large: on the CPU, memory
    that was given back may stay resident, and the contender would take it unseen.
    """
    loss = LOSSES[case.loss].contenders[case.contender].load()
    _run_once(loss, case, rows=64)  # libraries and threads are loaded now, and not counted
    x, y, scale = _inputs(case, case.b)
    call = _forward_backward(loss, case, x, y, scale)
    yardstick = functools.partial(
        product_rate, case.device, case.torch_dtype, effort.product_size, effort.seconds
    )
    try:
        with _limit(case, effort):
            extra = memory.extra_bytes(call, case.device)
        _forget(x, y, scale)
        before = yardstick()
        with _limit(case, effort):
            taken = times(call, case.device, effort.seconds, effort.repetitions)
    except Exception as error:
        if memory.is_out_of_memory(error):
            return Result("out of memory", _reason(error))
        raise
    after = yardstick()
    _forget(x, y, scale)
    result = Result("ok", "", taken, (before, after), extra)
    _check(result, loss, case, min(case.b, effort.check_batch_size))
    return result


def _inputs(case: Case, rows: int) -> tuple[Tensor, Tensor, Tensor]:
    x, y = features(rows, case.d, case.torch_dtype, case.device)
    wide = torch.float64 if case.torch_dtype == torch.float64 else torch.float32
    scale = torch.tensor(case.scale, dtype=wide, device=case.device)
    return x.requires_grad_(), y.requires_grad_(), scale.requires_grad_()


def _forward_backward(
    loss: LossFunction, case: Case, x: Tensor, y: Tensor, scale: Tensor
) -> Callable[[], Tensor]:
    # Half precision runs under autocast, as in training: a dense softmax is then in float32.
    half = case.torch_dtype in (torch.bfloat16, torch.float16)

    def call() -> Tensor:
        _forget(x, y, scale)
        with torch.autocast(case.device, case.torch_dtype if half else None, enabled=half):
            value = loss(x, y, scale)
        value.backward()
        return value.detach()

    return call


def _forget(*inputs: Tensor) -> None:
    for tensor in inputs:
        tensor.grad = None


def _run_once(loss: LossFunction, case: Case, rows: int) -> None:
    _forward_backward(loss, case, *_inputs(case, min(rows, case.b)))()


def _limit(case: Case, effort: Effort) -> contextlib.AbstractContextManager[None]:
    if case.device != "cpu":
        return contextlib.nullcontext()
    if effort.max_memory is not None:
        return memory.at_most(effort.max_memory)
    return memory.at_most(int(0.95 * psutil.virtual_memory().available))


def _check(result: Result, loss: LossFunction, case: Case, rows: int) -> None:
    """Compare value and gradients with float64; fills the errors, and the status where wrong."""
    x, y, scale = _inputs(case, rows)
    value = _forward_backward(loss, case, x, y, scale)()
    exact = LOSSES[case.loss].truth(x.detach(), y.detach(), scale.item())
    assert x.grad is not None
    assert y.grad is not None
    assert scale.grad is not None
    errors = (
        max(truth.row_error(x.grad, exact.dx), truth.row_error(y.grad, exact.dy)),
        truth.relative_error(value, exact.loss),
        truth.relative_error(scale.grad, exact.dscale),
    )
    if not all(math.isfinite(error) for error in errors):
        result.status, result.note = "wrong", "the loss or a gradient is not finite"
        return
    result.max_row_error, result.loss_error, result.scale_gradient_error = errors
    if errors[0] > SANE[case.dtype]:
        result.status, result.note = "wrong", f"a row's gradient is off by {errors[0]:.2g}"


def _reason(error: BaseException) -> str:
    text = str(error).strip().split("\n")[0] or type(error).__name__
    return text[max(0, text.find("tried to allocate")) :]
