"""Blocks of the similarity matrix in torch operations, on any device; the reference for kernels."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from megabatch.similarity import settings
from megabatch.similarity.arguments import accumulator_dtype
from megabatch.similarity.matrix import Matrix
from megabatch.similarity.slices import strips

#: Buffers of a block's size that live at once in the worst case (ids with a ceiling).
BUFFERS = 6

#: Rows that are widened at a time outside of the products.
STRIP = 4096

# --- products -------------------------------------------------------------------------------------


def logits(x: Tensor, y: Tensor, scale: Tensor, out: Tensor | None = None) -> Tensor:
    """scale * x @ y.T, with products and sums as accurate as the dtype's accumulator.

    Raw logits are never rounded to half precision (at 16-32 a bf16 step is 0.125: probabilities
    off by 6%). The CPU has no half-precision product with a wider result, so it multiplies in
    float32, in which products of halves are exact.
    """
    if x.dtype == accumulator_dtype(x.dtype):
        return products(x * scale, y, out)
    if x.device.type == "cuda":
        return products(x, y, out).mul_(scale)
    return products(x.float().mul_(scale), y.float(), out)


def products(x: Tensor, y: Tensor, out: Tensor | None = None) -> Tensor:
    """x @ y.T, with products and sums as accurate as the dtype's accumulator.

    The result is written to `out` if it is given, except for half precisions on a GPU.
    """
    if x.dtype == accumulator_dtype(x.dtype):
        return torch.mm(x, y.T, out=out)
    if x.device.type == "cuda":
        return torch.mm(x, y.T, out_dtype=torch.float32)
    return torch.mm(x.float(), y.float().T, out=out)


def rounds_left(features: Tensor) -> bool:
    """Whether `add_product` rounds the left factor to the dtype of these, the right one."""
    return features.dtype != accumulator_dtype(features.dtype) and features.device.type == "cuda"


def add_product(total: Tensor, left: Tensor, right: Tensor, overwrite: bool = False) -> None:
    """total += left @ right in total's dtype; with `overwrite`, total = left @ right."""
    beta = 0 if overwrite else 1
    if rounds_left(right):
        half = left.to(right.dtype)
        torch.addmm(total, half, right, beta=beta, out_dtype=torch.float32, out=total)
    else:
        total.addmm_(left.to(total.dtype), right.to(total.dtype), beta=beta)


def row_dots(features: Tensor, gradient: Tensor, dtype: torch.dtype) -> Tensor:
    """<features, gradient>, a scalar of `dtype`, without a wider copy of the features."""
    total = gradient.new_zeros((), dtype=dtype)
    for i in strips(len(features), STRIP):
        total += (features[i].to(gradient.dtype) * gradient[i]).sum()
    return total


# --- blocks ---------------------------------------------------------------------------------------


def block_shape(
    like: Tensor, limit: int | None = None, on_cpu: bool | None = None
) -> tuple[int, int]:
    """Rows and columns of a block for features like `like` (m, d) in a workspace of `limit`."""
    on_cpu = like.device.type == "cpu" if on_cpu is None else on_cpu
    # The CPU is fastest if a block stays in its last-level cache: 512 × 1,024 float32 does
    # (measured: 1,024 × 2,048 is 8% slower on a busy machine). A GPU wants large products.
    rows, cols = (512, 1024) if on_cpu else (8192, 8192)
    limit = settings.workspace(like) if limit is None else limit
    while block_bytes(rows, cols, like) > limit and (rows > 16 or cols > 16):
        rows, cols = max(16, rows // 2), max(16, cols // 2)
    return rows, cols


def block_bytes(rows: int, cols: int, like: Tensor) -> int:
    """Bytes of a block of features like `like` (m, d): its buffers, and wider copies of halves."""
    dtype = accumulator_dtype(like.dtype)
    width = 0 if like.dtype == dtype else like.shape[1]
    return dtype.itemsize * (BUFFERS * rows * cols + width * (rows + cols))


class EagerTiles:
    """The blocks of a matrix in torch operations; see `sweep.Tiles`."""

    def __init__(self, matrix: Matrix) -> None:
        self.matrix, self.symmetric = matrix, matrix.symmetric
        self.x, self.y = matrix.rows.features, matrix.cols.features
        self.m, self.n = matrix.shape
        self.dtype = accumulator_dtype(self.x.dtype)
        self.block_rows, self.block_cols = block_shape(self.x)
        if self.symmetric:  # square blocks, so that each is on the diagonal, above it, or below it
            self.block_rows = self.block_cols = min(self.block_rows, self.block_cols)

    def row_blocks(self) -> Iterator[slice]:
        """Slices of the rows, one for each row of blocks."""
        return strips(self.m, self.block_rows)

    def col_blocks(self, i: slice) -> Iterator[slice]:
        """The columns of the blocks of rows `i`; if symmetric, those from the diagonal on."""
        for j in strips(self.n, self.block_cols):
            if not self.symmetric or j.start >= i.start:
                yield j

    def new_total(self, rows: int) -> Tensor:
        """An accumulator for the gradients of `rows` rows; zeros if no block will write to it."""
        shape = rows, self.x.shape[1]
        if self.m == 0 or self.n == 0:
            return self.x.new_zeros(shape, dtype=self.dtype)
        return self.x.new_empty(shape, dtype=self.dtype)

    def write_grad(
        self,
        total: Tensor,
        side: str,
        rows: slice,
        factor: Tensor,
        scale_grad_part: bool,
        out: Tensor | None,
    ) -> Tensor | None:
        """out = factor * total in out's dtype; <features, total> if `scale_grad_part`.

        `total` belongs to these `rows` of the features of `side`, "x" or "y".
        """
        features = (self.x if side == "x" else self.y)[rows]
        part = row_dots(features, total, total.dtype) if scale_grad_part else None
        if out is not None:
            out.copy_(total.mul_(factor))
        return part

    def _buffers(self, count: int) -> Tensor:
        """(count, elements of the largest block), uninitialised."""
        size = min(self.block_rows, self.m) * min(self.block_cols, self.n)
        return self.x.new_empty(count, size, dtype=self.dtype)


def buffer_views(buffers: Tensor, i: slice, j: slice) -> list[Tensor]:
    """The first elements of each buffer as a block of rows `i` and columns `j`."""
    m, n = i.stop - i.start, j.stop - j.start
    return [buffer[: m * n].view(m, n) for buffer in buffers]
