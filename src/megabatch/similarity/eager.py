"""Blocks of the similarity matrix in torch operations, on any device; the reference for kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from megabatch.similarity import settings
from megabatch.similarity.arguments import accumulator_dtype
from megabatch.similarity.matrix import Matrix
from megabatch.similarity.tiles import Tiles, rounds_left

#: Buffers of a block's size that live at once in the worst case (ids with a ceiling).
BUFFERS = 6


# --- products -------------------------------------------------------------------------------------


def logits(x: Tensor, y: Tensor, scale: Tensor | None = None, out: Tensor | None = None) -> Tensor:
    """scale * x @ y.T, with products and sums as accurate as the dtype's accumulator.

    Raw logits are never rounded to half precision (at 16-32 a bf16 step is 0.125: probabilities
    off by 6%). The CPU has no half-precision product with a wider result, so it multiplies in
    float32, in which products of halves are exact. The result is written to `out` if it is given,
    except for half precisions on a GPU.
    """
    wide = accumulator_dtype(x.dtype)
    if x.dtype != wide and x.device.type == "cuda":
        s = torch.mm(x, y.T, out_dtype=torch.float32)
        return s if scale is None else s.mul_(scale)
    if scale is not None:
        x = x * scale if x.dtype == wide else x.to(wide).mul_(scale)
    return torch.mm(x.to(wide), y.to(wide).T, out=out)


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


class EagerTiles(Tiles):
    """The blocks of a matrix in torch operations."""

    def __init__(self, matrix: Matrix) -> None:
        self.matrix, self.symmetric = matrix, matrix.symmetric
        self.x, self.y = matrix.rows.features, matrix.cols.features
        self.m, self.n = matrix.shape
        self.block_rows, self.block_cols = block_shape(self.x)
        if self.symmetric:  # square blocks, so that each is on the diagonal, above it, or below it
            self.block_rows = self.block_cols = min(self.block_rows, self.block_cols)
        # On the CPU dS stays in float32; a GPU's products take float16.
        self.half_ds = self.x.dtype == torch.float16 and rounds_left(self.x)

    def _buffers(self, count: int) -> Tensor:
        """(count, elements of the largest block), uninitialised."""
        size = min(self.block_rows, self.m) * min(self.block_cols, self.n)
        return self.x.new_empty(count, size, dtype=accumulator_dtype(self.x.dtype))


def buffer_views(buffers: Tensor, i: slice, j: slice) -> list[Tensor]:
    """The first elements of each buffer as a block of rows `i` and columns `j`."""
    m, n = i.stop - i.start, j.stop - j.start
    return [buffer[: m * n].view(m, n) for buffer in buffers]
