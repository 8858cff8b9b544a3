"""CLIP's loss of each pair from both sides' log-sum-exps."""

from __future__ import annotations

import torch
from torch import Tensor

from megabatch.losses.terms import minus_log_probability
from megabatch.similarity import backends
from megabatch.similarity.ops import operator


def paired_losses(rows: Tensor, columns: Tensor) -> Tensor:
    """Mean of -log p of each pair along its row and along its column, (m,).

    Args:
        rows, columns: (4, m), the numbers of a `Split` for either side; each pair has one positive,
            its own.
    """
    if torch.compiler.is_compiling():  # which makes one kernel of it by itself
        return _expression(rows, columns)
    return _paired_losses(rows, columns)


def _expression(rows: Tensor, columns: Tensor) -> Tensor:
    of_rows, of_columns = (minus_log_probability(side[2], side[0]) for side in (rows, columns))
    return (of_rows + of_columns) / 2


@operator("paired_losses")
def _paired_losses(rows: Tensor, columns: Tensor) -> Tensor:
    """One launch, and one for the gradient; torch operations would take 5 and 10."""
    if not _by_kernel(rows):
        return _expression(rows, columns)
    from megabatch.similarity.triton import paired  # Triton, where it is needed

    out = rows.new_empty(rows.shape[1])
    with torch.cuda.device_of(rows):
        paired.paired_losses(rows, columns, out)
    return out


@_paired_losses.register_fake
def _(rows: Tensor, columns: Tensor) -> Tensor:
    return rows.new_empty(rows.shape[1])


@operator("paired_losses_backward")
def _paired_losses_backward(
    rows: Tensor, columns: Tensor, gradient: Tensor
) -> tuple[Tensor, Tensor]:
    drows, dcolumns = rows.new_empty(rows.shape), columns.new_empty(columns.shape)
    if _by_kernel(rows):
        from megabatch.similarity.triton import paired

        with torch.cuda.device_of(rows):
            paired.paired_gradients(rows, columns, gradient, drows, dcolumns)
        return drows, dcolumns
    for out, stack in ((drows, rows), (dcolumns, columns)):
        torch.mul(gradient / 2, torch.sigmoid(stack[0] - stack[2]), out=out[0])
        torch.neg(out[0], out=out[2])
        out[1::2] = 0
    return drows, dcolumns


@_paired_losses_backward.register_fake
def _(rows: Tensor, columns: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor]:
    return rows.new_empty(rows.shape), columns.new_empty(columns.shape)


def _by_kernel(rows: Tensor) -> bool:
    return rows.dtype == torch.float32 and rows.shape[1] > 0 and backends.kernels_available(rows)


def _setup_context(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    ctx.save_for_backward(*inputs)


def _backward(ctx, gradient):  # type: ignore[no-untyped-def]
    return _paired_losses_backward(*ctx.saved_tensors, gradient)


_paired_losses.register_autograd(_backward, setup_context=_setup_context)
