"""One forward and backward pass of a contender, and its errors."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from machinery import truth
from machinery.contenders import LossFunction
from machinery.family import LOSSES
from machinery.inputs import Case, features
from megabatch.benchmarking.measure import LOSS_SCALE, SANE


class Inputs(NamedTuple):
    """The inputs of a loss."""

    x: Tensor  #: (b, d)
    y: Tensor  #: (n, d)
    scalars: tuple[Tensor, ...]  #: scale (), and for some losses bias ()

    def forget(self) -> None:
        """Drop the gradients."""
        for tensor in (self.x, self.y, *self.scalars):
            tensor.grad = None

    def gradient_bytes(self) -> int:
        """Bytes of the gradients."""
        return sum(t.grad.nbytes for t in (self.x, self.y, *self.scalars) if t.grad is not None)


class Errors(NamedTuple):
    """Relative errors against float64; None if there is no such result."""

    row: float | None  #: the largest of a row of dx or dy
    loss: float
    scale: float | None  #: of the scale's gradient and the bias's


def make_inputs(case: Case, rows: int | None = None) -> Inputs:
    """The case's inputs, or their first `rows` rows."""
    b = case.b if rows is None else min(rows, case.b)
    n = case.n if case.n is None or rows is None else min(rows, case.n)
    x, y = features(b, case.d, case.torch_dtype, case.device, case.features, n)
    wide = torch.float64 if case.torch_dtype == torch.float64 else torch.float32
    bias = LOSSES[case.loss].bias
    numbers = (case.scale,) if bias is None else (case.scale, bias)
    scalars = tuple(torch.tensor(number, dtype=wide, device=case.device) for number in numbers)
    if case.backward:
        for tensor in (x, y, *scalars):
            tensor.requires_grad_()
    return Inputs(x, y, scalars)


def forward_backward(loss: LossFunction, case: Case, inputs: Inputs) -> Callable[[], Tensor]:
    """A function that computes the loss and, if the case has them, its gradients."""
    # Half precision runs under autocast, as in training, so a dense softmax is in float32.
    half = case.torch_dtype in (torch.bfloat16, torch.float16)

    def call() -> Tensor:
        inputs.forget()
        with torch.autocast(case.device, case.torch_dtype if half else None, enabled=half):
            value = loss(inputs.x, inputs.y, *inputs.scalars)
        if case.backward:
            value.backward(torch.full_like(value, LOSS_SCALE.get(case.dtype, 1.0)))
        return value.detach()

    return call


def exact_result(case: Case, inputs: Inputs) -> truth.Truth:
    """The loss and gradients of these inputs in float64."""
    numbers = [scalar.item() for scalar in inputs.scalars]
    return LOSSES[case.loss].truth(inputs.x.detach(), inputs.y.detach(), *numbers)


def errors(case: Case, inputs: Inputs, value: Tensor, exact: truth.Truth) -> Errors:
    """The errors of the call that computed `value`."""
    factor = LOSS_SCALE.get(case.dtype, 1.0)
    loss = truth.relative_error(value, exact.loss)
    x, y, (scale, *bias) = inputs.x.grad, inputs.y.grad, (t.grad for t in inputs.scalars)
    if x is None or y is None:
        return Errors(None, loss, None)
    row = max(
        truth.row_error(x, factor * exact.dx),
        truth.row_error(y, factor * exact.dy),
    )
    if scale is None:
        return Errors(row, loss, None)
    of_scale = truth.relative_error(scale, factor * exact.dscale)
    for gradient in bias:
        assert gradient is not None
        assert exact.dbias is not None
        of_scale = max(of_scale, truth.relative_error(gradient, factor * exact.dbias))
    return Errors(row, loss, of_scale)


def verdict(case: Case, found: Errors) -> tuple[str, str]:
    """Status and note: whether these errors are rounding or a wrong loss."""
    if not all(math.isfinite(error) for error in found if error is not None):
        return "wrong", "the loss or a gradient is not finite"
    if found.row is not None and found.row > SANE[case.dtype]:
        return "wrong", f"a row's gradient is off by {found.row:.2g}"
    if found.loss > SANE[case.dtype]:
        return "wrong", f"the loss is off by {found.loss:.2g}"
    if found.row is not None and found.scale is None:
        return "ok", "no gradient of the scale"
    return "ok", ""
