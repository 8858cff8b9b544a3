"""CLIP's loss of each pair and its gradient, in one launch each: see `losses.paired`."""

from __future__ import annotations

from torch import Tensor

from megabatch.similarity.fused.cuts import cdiv
from megabatch.similarity.fused.softplus import gradients, losses

#: Pairs a program.
BLOCK = 256


def paired_losses(rows: Tensor, columns: Tensor, out: Tensor) -> None:
    """out (m,) = both sides' losses of their stacks (4, m)."""
    losses[(cdiv(len(out), BLOCK),)](
        rows, rows.stride(0), columns, columns.stride(0), out, len(out), B=BLOCK
    )


def paired_gradients(
    rows: Tensor, columns: Tensor, gradient: Tensor, drows: Tensor, dcolumns: Tensor
) -> None:
    """Gradients of the stacks (4, m), contiguous, for that of the losses, (m,) of any stride."""
    size = rows.shape[1]
    gradients[(cdiv(size, BLOCK),)](
        rows, rows.stride(0), columns, columns.stride(0), gradient, gradient.stride(0),
        drows, dcolumns, size, B=BLOCK,
    )  # fmt: skip
