"""A transformer's MLP with GELU, whose kernels are Triton's and whose products are torch's.

torch's kernels of GELU are bound by the instructions of the error function, and another kernel
reads GELU's gradient again for the first bias. Here a Gaussian's tail takes eight, so that memory
is the bound, and the backward pass sums the bias's gradient on its way. Of the hidden layer only
GELU's input waits for it: 148 MiB of activations a pair of ViT-L/14 in compiled blocks, with
torch's GELU 200 (throughput.json and graphs.json in benchmarks/results).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from megabatch.similarity.ops import operator
from megabatch.similarity.triton.launch import kernel

#: Hidden widths are multiples of this number of columns, which a program has.
COLUMNS = 128
#: Rows at a time, and rows of a program of the backward pass: the fastest of 13 forms on an
#: H100 and of 5 on an H200. Between products, as in a step, the H200 takes 0.50 ms forward and 1.08
#: backward for 131,584 rows of 4,096, and 0.51 for a copy (benchmarks/results/gelu.json).
_ROWS, _SUMMED = 16, 256


def mlp(x: Tensor, first: tuple[Tensor, Tensor], last: tuple[Tensor, Tensor]) -> Tensor:
    """GELU between two products, like x (..., width).

    Args:
        x: float16 or bfloat16, as are
        first, last: weights (hidden, width) and (width, hidden), each with its bias.
    """
    out: Tensor = _MLP.apply(x.flatten(0, -2), *first, *last)
    return out.unflatten(0, x.shape[:-1])


class _MLP(torch.autograd.Function):
    """See above; x is (rows, width)."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, last_weight: Tensor, last_bias: Tensor
    ) -> Tensor:
        hidden = F.linear(x, weight, bias)
        ctx.save_for_backward(x, hidden, weight, last_weight)
        return F.linear(gelu(hidden), last_weight, last_bias)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor, ...]:
        x, hidden, weight, last_weight = ctx.saved_tensors
        dout = upstream[0]
        value, dhidden, sums = gelu_gradient(hidden, dout @ last_weight)
        dbias = sums.sum(0).to(x.dtype)
        return dhidden @ weight, dhidden.T @ x, dbias, dout.T @ value, dout.sum(0)


@operator("gelu")
def gelu(x: Tensor) -> Tensor:
    """GELU of (rows, columns) without approximation (Hendrycks and Gimpel 2016, 1606.08415)."""
    x = x.contiguous()
    out = torch.empty_like(x)
    _launch(_ROWS, 4, gelu_values, x, out=out)
    return out


@operator("gelu_backward")
def gelu_gradient(x: Tensor, dout: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """GELU again, the gradient of x, and the latter's sums over parts of the rows, in float32."""
    x, dout = x.contiguous(), dout.contiguous()
    results = _results(x, dout)
    names = "out", "dx", "sums"
    _launch(_SUMMED, 8, gelu_gradients, x, dout=dout, **dict(zip(names, results, strict=True)))
    return results


def _results(x: Tensor, dout: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    rows, columns = x.shape
    sums = x.new_empty(-(-rows // _SUMMED), columns, dtype=torch.float32)
    return x.new_empty(rows, columns), x.new_empty(rows, columns), sums


gelu.register_fake(lambda x: x.new_empty(*x.shape))
gelu_gradient.register_fake(_results)


def _launch(rows: int, warps: int, kernel: Any, x: Tensor, **tensors: Tensor) -> None:
    size, columns = x.shape
    with torch.cuda.device_of(x):
        kernel.launch(
            -(-size // rows) * (columns // COLUMNS), x=x, **tensors, size=size, WIDTH=columns,
            COLUMNS=COLUMNS, ROWS=_ROWS, SUMMED=rows, num_warps=warps,
        )  # fmt: skip


@kernel
def gelu_values(
    x, out, size,
    WIDTH: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr, SUMMED: tl.constexpr,
):  # fmt: skip
    """GELU of a block of rows and columns."""
    start, _, columns = _place(WIDTH, COLUMNS, SUMMED)
    places, inside = _block(start, columns, size, WIDTH, ROWS)
    wide = tl.load(x + places, inside, 0.0).to(tl.float32)
    tl.store(out + places, _gelu(wide)[0].to(out.dtype.element_ty), inside)


@kernel
def gelu_gradients(
    x, dout, out, dx, sums, size,
    WIDTH: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr, SUMMED: tl.constexpr,
):  # fmt: skip
    """The same and the gradient of x in the rows of a part, and the gradient's sums."""
    start, part, columns = _place(WIDTH, COLUMNS, SUMMED)
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for at in tl.range(0, SUMMED, ROWS, num_stages=1):
        places, inside = _block(start + at, columns, size, WIDTH, ROWS)
        wide = tl.load(x + places, inside, 0.0).to(tl.float32)
        upstream = tl.load(dout + places, inside, 0.0).to(tl.float32)
        value, tail = _gelu(wide)
        tl.store(out + places, value.to(out.dtype.element_ty), inside)
        # exp(-x^2 / 2) / sqrt(2 pi), the density.
        density = tl.exp2(-0.7213475204444817 * wide * wide) * 0.3989422804014327
        slope = tail - tl.abs(wide) * density
        gradient = upstream * tl.where(wide > 0, 1.0 - slope, slope)
        tl.store(dx + places, gradient.to(dx.dtype.element_ty), inside)
        total += gradient
    tl.store(sums + part * WIDTH + columns, tl.sum(total, 0))


@triton.jit
def _place(WIDTH: tl.constexpr, COLUMNS: tl.constexpr, SUMMED: tl.constexpr):
    """A program's first row, the number of its part, and its columns."""
    part = tl.program_id(0) // (WIDTH // COLUMNS)
    columns = tl.program_id(0) % (WIDTH // COLUMNS) * COLUMNS + tl.arange(0, COLUMNS)
    return part * SUMMED, part, columns


@triton.jit
def _block(start, columns, size, WIDTH: tl.constexpr, ROWS: tl.constexpr):
    """The offsets of a block's elements, and whether they exist."""
    rows = start + tl.arange(0, ROWS)
    return rows[:, None].to(tl.int64) * WIDTH + columns[None, :], (rows < size)[:, None]


@triton.jit
def _gelu(x):
    """GELU of x in float32, and the standard normal distribution's tail beyond |x|.

    The tail is 2 to a polynomial in |x|. It is within 2e-5 of its value for every |x| < 7, also
    where that is small, as 1 + erf is not; beyond, GELU is within 1e-14. Forms of the error
    function in the literature need a division or another exponential, so that on an H200 their
    instructions take longer than the memory: a step of ViT-L/14 takes 1.4% longer.
    """
    size = tl.abs(x)
    power = size * -1.5882182e-06 + 5.61534e-05
    power = power * size - 0.0008832158
    power = power * size + 0.00830322
    power = power * size - 0.053501323
    power = power * size - 0.45896432
    power = power * size - 1.1510357
    power = power * size - 1.000014
    tail = tl.exp2(power)
    return tl.maximum(x, 0.0) - size * tail, tail
