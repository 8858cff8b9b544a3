"""One measurement of a contender of `megabatch bench`, in a process of its own.

`python -m megabatch.benchmarking.measure '[CASE, EFFORT]'` prints the record.
"""

from __future__ import annotations

import contextlib
import json
import math
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TypeAlias

import psutil
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, normalize

from megabatch import ClipLoss
from megabatch.benchmarking import memory
from megabatch.benchmarking.clock import product_rate, times

#: (x (b, d), y (b, d), scale ()) -> loss ()
Loss: TypeAlias = Callable[..., Tensor]


@dataclass(frozen=True)
class Record:
    """One contender at one size, over all rounds. See benchmarks/README.md for the fields."""

    contender: str
    device: str
    dtype: str
    b: int
    d: int
    scale: float
    loss: str = "clip"
    n_devices: int = 1
    status: str = "ok"  #: or wrong, out of memory, failed
    note: str = ""  #: the reason
    ms: float | None = None
    fraction: float | None = None  #: of the product's rate
    extra_bytes: int | None = None
    max_row_error: float | None = None
    loss_error: float | None = None
    scale_gradient_error: float | None = None
    product_tflops: float | None = None
    times_ms: tuple[float, ...] = ()


def _openclip() -> Loss:
    import open_clip

    return open_clip.ClipLoss()


def dense_clip_loss(x: Tensor, y: Tensor, scale: float | Tensor = 1.0) -> Tensor:
    """Two cross-entropies over one matrix of logits, as most training code writes it."""
    logits = scale * (x @ y.T)
    labels = torch.arange(len(logits), device=logits.device)
    return (cross_entropy(logits, labels) + cross_entropy(logits.T, labels)) / 2


#: Functions that load the losses of (x (b, d), y (b, d), scale ()).
CONTENDERS: dict[str, Callable[[], Loss]] = {
    "megabatch": ClipLoss,
    "megabatch-compiled": lambda: torch.compile(ClipLoss(), dynamic=False),  # for one size
    "dense": lambda: dense_clip_loss,
    "dense-compiled": lambda: torch.compile(dense_clip_loss, dynamic=False),
    "openclip": _openclip,
}

#: Rows of the comparison with float64, by device.
CHECKED = {"cpu": 4096, "cuda": 16_384}
#: A larger relative error of a gradient's row cannot be rounding: it is another loss. Dense losses,
#: which round their logits to the features' dtype, stay below.
SANE = {"float64": 1e-8, "float32": 2e-2, "bfloat16": 0.3, "float16": 0.1}
#: Loss scale, as gradients would underflow in float16; GradScaler's initial value.
LOSS_SCALE = {"float16": 65_536.0}


def measure(case: Record, seconds: float, repetitions: int, max_memory: int | None) -> Record:
    """Memory, time and errors of a case.

    The contender's first full run precedes everything else that is large: on the CPU freed memory
    may stay resident, and the contender's use of it would not be counted.
    """
    loss, dtype = CONTENDERS[case.contender](), getattr(torch, case.dtype)
    forward_backward(loss, case, inputs(case, 64))()  # load libraries and start threads
    given = inputs(case, case.b)
    call = forward_backward(loss, case, given)
    limit: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
    size = max(256, min(case.b, 8192 if case.device == "cuda" else 4096))
    try:
        if case.device == "cpu":
            free = int(0.95 * psutil.virtual_memory().available)
            limit = memory.at_most(free if max_memory is None else max_memory)
        with limit:
            extra = memory.extra_bytes(call, case.device)
            extra -= sum(t.grad.nbytes for t in given if t.grad is not None)
            before = product_rate(case.device, dtype, size, seconds)
            taken = times(call, case.device, seconds, repetitions)
    except Exception as error:
        if memory.is_out_of_memory(error):
            return replace(case, status="out of memory", note=memory.reason(error))
        raise
    after = product_rate(case.device, dtype, size, seconds)
    rate = (before + after) / 2e12
    case = replace(case, times_ms=tuple(taken), product_tflops=rate, extra_bytes=max(0, extra))
    case = replace(case, ms=statistics.median(taken))
    return checked(case, loss, inputs(case, min(case.b, CHECKED[case.device])))


def inputs(case: Record, rows: int) -> list[Tensor]:
    """Features with pairs at a cosine of 0.5 and all others around 0, and the scale.

    With independent features all probabilities are 1/b, and a loss that misses some of its logits
    would go unnoticed.
    """
    generator = torch.Generator(case.device).manual_seed(0)
    shape = rows, case.d
    x, noise = (
        normalize(torch.randn(shape, generator=generator, device=case.device), dim=1)
        for _ in range(2)
    )
    dtype = getattr(torch, case.dtype)
    y = normalize(x + 3**0.5 * noise, dim=1).to(dtype)
    scale = torch.tensor(case.scale, dtype=torch.promote_types(dtype, torch.float32))
    return [t.requires_grad_() for t in (x.to(dtype), y, scale.to(case.device))]


def forward_backward(loss: Loss, case: Record, given: Sequence[Tensor]) -> Callable[[], Tensor]:
    """A function that computes the loss and its gradients."""
    # Half precision runs under autocast, as in training, so a dense softmax is in float32.
    dtype, half = getattr(torch, case.dtype), case.dtype in ("bfloat16", "float16")

    def call() -> Tensor:
        for tensor in given:
            tensor.grad = None
        with torch.autocast(case.device, dtype if half else None, enabled=half):
            value = loss(*given)
        value.backward(torch.full_like(value, LOSS_SCALE.get(case.dtype, 1.0)))
        return value.detach()

    return call


def checked(case: Record, loss: Loss, given: Sequence[Tensor]) -> Record:
    """The case with the errors of value and gradients against float64, and what they mean."""
    value = forward_backward(loss, case, given)()
    exact = [t.detach().double().requires_grad_() for t in given]
    truth = dense_clip_loss(*exact)
    gradients = torch.autograd.grad(truth, exact)
    found = [(value.double() - truth).abs() / truth.abs()]
    for tensor, true in zip(given, gradients, strict=True):
        assert tensor.grad is not None
        error = tensor.grad.double() / LOSS_SCALE.get(case.dtype, 1.0) - true
        lengths = true.norm(dim=-1) if true.dim() else true.abs()
        found.append((error.norm(dim=-1) if true.dim() else error.abs()).div(lengths).amax())
    of_loss, of_x, of_y, of_scale = (error.item() for error in found)
    if not all(map(math.isfinite, (of_loss, of_x, of_y, of_scale))):
        return replace(case, status="wrong", note="the loss or a gradient is not finite")
    row = max(of_x, of_y)
    case = replace(case, max_row_error=row, loss_error=of_loss, scale_gradient_error=of_scale)
    for found_error, name in ((row, "a row's gradient"), (of_loss, "the loss")):
        if found_error > SANE[case.dtype]:
            return replace(case, status="wrong", note=f"{name} is off by {found_error:.2g}")
    return case


if __name__ == "__main__":
    memory.be_killed_first()
    _case, _effort = json.loads(sys.argv[1])
    print(json.dumps(asdict(measure(Record(**_case), **_effort)), allow_nan=False))
