"""One contender at one size, in this process.

`python -m megabatch.benchmarking.measure JOB.json RESULT.json` does so in a process of its own.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from megabatch.benchmarking import memory, step
from megabatch.benchmarking.clock import product_rate, times
from megabatch.benchmarking.contenders import LOSSES, LossFunction
from megabatch.benchmarking.inputs import Case


@dataclass(frozen=True)
class Effort:
    """The extent of a measurement."""

    seconds: float  #: of each series of repetitions, and of the matrix products around it
    repetitions: int  #: at least
    product_size: int  #: rows and columns of those products
    check_batch_size: int  #: rows of the comparison with float64, where the case has more
    max_memory: int | None  #: bytes a contender may take (CPU); None: what the machine has


@dataclass
class Result:
    """The result of one process. `status`: ok, wrong, out of memory, failed; `note`: the reason."""

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


def measure(case: Case, effort: Effort) -> Result:
    """Memory, time and errors of a case.

    The contender's first full run precedes everything else that is large: on the CPU freed memory
    may stay resident, and the contender's use of it would not be counted.
    """
    loss = LOSSES[case.loss].contenders[case.contender].load()
    # Load libraries and start threads, which are not counted.
    step.forward_backward(loss, case, step.make_inputs(case, rows=64))()
    inputs = step.make_inputs(case)
    call = step.forward_backward(loss, case, inputs)
    yardstick = functools.partial(
        product_rate, case.device, case.torch_dtype, effort.product_size, effort.seconds
    )
    try:
        with _limit(case, effort):
            extra = memory.extra_bytes(call, case.device) - inputs.gradient_bytes()
        inputs.forget()
        before = yardstick()
        with _limit(case, effort):
            taken = times(call, case.device, effort.seconds, effort.repetitions)
    except Exception as error:
        if memory.is_out_of_memory(error):
            return Result("out of memory", memory.reason(error))
        raise
    after = yardstick()
    inputs.forget()
    result = Result("ok", "", taken, (before, after), max(0, extra), seconds=effort.seconds)
    check(result, loss, case, min(case.b, effort.check_batch_size))
    return result


def check(result: Result, loss: LossFunction, case: Case, rows: int) -> None:
    """Compare value and gradients with float64; fills in the errors and the status."""
    inputs = step.make_inputs(case, rows)
    value = step.forward_backward(loss, case, inputs)()
    found = step.errors(case, inputs, value, step.exact_result(case, inputs))
    result.set_errors(case, found)


def _limit(case: Case, effort: Effort) -> contextlib.AbstractContextManager[None]:
    if case.device != "cpu":
        return contextlib.nullcontext()
    if effort.max_memory is not None:
        return memory.at_most(effort.max_memory)
    return memory.at_most(int(0.95 * psutil.virtual_memory().available))


def main(job_file: str, result_file: str) -> None:
    """Measure the case in the first file; write the `Result` to the second."""
    memory.be_killed_first()
    job = json.loads(Path(job_file).read_text())
    result = measure(Case(**job["case"]), Effort(**job["effort"]))
    Path(result_file).write_text(json.dumps(asdict(result), allow_nan=False))


if __name__ == "__main__":
    main(*sys.argv[1:])
