"""One device: blocks of rows against blocks of columns, in a workspace of bounded size."""

from __future__ import annotations

import functools
import importlib.util
import warnings
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megabatch.similarity import settings, tile_torch
from megabatch.similarity.arguments import accumulator_dtype
from megabatch.similarity.id_order import IdOrder
from megabatch.similarity.pairs import Pairs
from megabatch.similarity.settings import DEFAULT_WORKSPACE as DEFAULT_WORKSPACE
from megabatch.similarity.settings import set_workspace as set_workspace
from megabatch.similarity.states import clear_fresh, finish, merge, new_state, pull_of
from megabatch.torch_internals import constant_in_graphs

if TYPE_CHECKING:
    from megabatch.similarity.backends.triton.blocks import FusedBlocks

#: Whether `tell_of_float32` did.
_told = False


def settings_of_call(x: Tensor) -> settings.Settings:
    """The settings of a call with features like x (m, d) that is made now."""
    tell_of_float32(x)
    return settings.of_call(x)


def tell_of_float32(x: Tensor) -> None:
    """Warn, once, of features that fused kernels would take if torch's precision allowed TF32."""
    if x.dtype == torch.float32 and x.is_cuda:
        _tell_of_float32(x.device)


# As a constant for torch.compile, so that it is said when a program is compiled.
@constant_in_graphs
def _tell_of_float32(device: torch.device) -> None:
    global _told
    if _told or settings.precision(device.type) != 0 or not _kernels_on(device):
        return
    _told = True
    warnings.warn(
        "megabatch: float32 features on a GPU, at torch's default float32 matmul precision "
        "('highest'), never reach the fused kernels, which multiply float32 in TF32; torch "
        "operations compute them block by block, which takes longer. For the kernels: bfloat16 "
        "features (autocast), or torch.set_float32_matmul_precision('high')",
        stacklevel=2,
    )


def workspace(like: Tensor) -> int:
    """The bound for features like `like`, in bytes."""
    return settings.workspace(like)


def block_shape(like: Tensor, limit: int | None = None) -> tuple[int, int]:
    """Rows and columns of one block for features like `like` (m, d) in a workspace of `limit`."""
    # The CPU is fastest where a block stays in its last-level cache: 512 × 1,024 float32 does
    # (measured: 1,024 × 2,048 8% slower where the machine is busy). A GPU wants large products.
    rows, columns = (512, 1024) if like.device.type == "cpu" else (8192, 8192)
    item = accumulator_dtype(like.dtype).itemsize
    # Beside the buffers a half-precision block holds wider copies of its rows and columns.
    width = 0 if like.dtype == accumulator_dtype(like.dtype) else like.shape[1]
    limit = workspace(like) if limit is None else limit
    while _bytes(rows, columns, width, item) > limit and (rows > 16 or columns > 16):
        rows, columns = max(16, rows // 2), max(16, columns // 2)
    return rows, columns


def _bytes(rows: int, columns: int, width: int, item: int) -> int:
    return item * (tile_torch.BUFFERS * rows * columns + width * (rows + columns))


def strips(n: int, step: int) -> Iterator[slice]:
    """Slices of at most `step` that cover range(n)."""
    for start in range(0, n, step):
        yield slice(start, min(start + step, n))


def kept_size(x: Tensor, y: Tensor, limit: int) -> int:
    """How many logits the forward pass may keep for the backward pass: what the workspace leaves.

    Both passes must have this workspace, of `limit` bytes: it says which blocks the logits are of.

    On the CPU alone, where blocks take little of it; each one kept is one not computed twice.
    """
    if x.device.type != "cpu":
        return 0
    rows, columns = block_shape(x, limit)
    item = accumulator_dtype(x.dtype).itemsize
    left = limit - _bytes(rows, columns, x.shape[1] if x.element_size() < item else 0, item)
    return max(0, min(left // item, x.shape[0] * y.shape[0]))


def blocks(
    x: Tensor, y: Tensor, pairs: Pairs, symmetric: bool = False, kept: Tensor | None = None
) -> Blocks | FusedBlocks:
    """The blocks of x (m, d) against y (n, d), by fused kernels where there are some.

    With `symmetric` (y is x) only the blocks on and above the diagonal are visited. `kept` (k,)
    holds the logits of the first blocks, as many as fit: the forward pass writes it, the backward
    pass reads it. Fused kernels keep none.
    """
    if not fused_available(x):
        return Blocks(x, y, pairs, symmetric, kept)
    from megabatch.similarity.backends.triton.blocks import (
        FusedBlocks,  # Triton, where it is needed
    )

    return FusedBlocks(x, y, pairs, symmetric, workspace(x))


def ordered(x: Tensor, y: Tensor | None, pairs: Pairs) -> IdOrder:
    """The whole matrix in the order that its blocks want: by id for fused kernels."""
    other = x if y is None else y
    return IdOrder.of(x, other, pairs) if fused_available(x) else IdOrder(x, other, pairs)


def kernels_available(x: Tensor) -> bool:
    """Whether Triton's kernels run where x is."""
    return x.is_cuda and _kernels_on(x.device)


def _kernels_on(device: torch.device) -> bool:
    return device.type == "cuda" and _triton_installed() and capability(device) >= (8, 0)


@functools.cache  # asked several times a step
def _triton_installed() -> bool:
    return importlib.util.find_spec("triton") is not None


@functools.cache  # torch asks the driver each time, and a step asks ten times
def capability(device: torch.device) -> tuple[int, int]:
    """Compute capability of a GPU."""
    return torch.cuda.get_device_capability(device)


def fused_available(x: Tensor) -> bool:
    """Whether fused kernels take features like x.

    They multiply float32 in TF32, so they take it where torch would do so too.
    """
    if not kernels_available(x):
        return False
    if x.dtype == torch.float32:
        return settings.products(x) != settings.EXACT
    return x.element_size() == 2


def arithmetic(x: Tensor) -> str:
    """How features like x are computed with, in words that all ranks must agree on."""
    products = settings.products(x)
    kernels = "fused" if fused_available(x) else "torch"
    return f"{kernels} kernels" + (f", float32 products: {products}" if products else "")


class Blocks:
    """The blocks of x (m, d) against y (n, d) in torch operations, see `blocks`."""

    #: A state's reference times this is a natural logarithm.
    unit = 1.0

    def __init__(
        self,
        x: Tensor,
        y: Tensor,
        pairs: Pairs,
        symmetric: bool = False,
        kept: Tensor | None = None,
    ) -> None:
        self.x, self.y, self.pairs, self.symmetric = x, y, pairs, symmetric
        self.rows, self.columns = block_shape(x)
        if symmetric:  # square blocks, so that each is on the diagonal, above it, or below it
            self.rows = self.columns = min(self.rows, self.columns)
        size = min(self.rows, x.shape[0]) * min(self.columns, y.shape[0])
        self._buffers = x.new_empty(2, size, dtype=accumulator_dtype(x.dtype))
        self._kept = {} if kept is None else self._places(kept)

    def forward(
        self,
        scale: Tensor,
        rows: Tensor,
        columns: Tensor | None,
        fresh: tuple[bool, bool] = (False, False),
    ) -> None:
        """Merge all blocks into the states of the rows and, unless None, of the columns.

        With `symmetric` the columns' state is the rows'. `fresh`: the rows', the columns' state
        holds nothing yet.
        """
        clear_fresh(rows, columns, fresh)
        for i in strips(self.x.shape[0], self.rows):
            for j in self._columns_of(i):
                mirrored = self.symmetric and i != j
                other = rows if mirrored else columns
                tile_torch.forward(
                    self.x[i],
                    self.y[j],
                    scale,
                    self.pairs.view(i, j),
                    rows[:, i],
                    None if other is None else other[:, j],
                    self._views(i, j),
                    self._kept.get((i.start, j.start)),
                )

    def values(self, scale: Tensor, kinds: int, columns: bool) -> tuple[Tensor, Tensor | None]:
        """What the public functions return of the rows and, if wanted, of the columns."""
        row_state = new_state(self.x.shape[0], kinds, self.x)
        column_state = new_state(self.y.shape[0], kinds, self.x) if columns else None
        self.forward(scale, row_state, column_state, (True, True))
        finished = finish(row_state, self.unit)
        return finished, None if column_state is None else finish(column_state, self.unit)

    def merged(self, states: Tensor) -> Tensor:
        """Several states (k, ...) of the same rows as one."""
        return merge(states, self.unit)

    def results(self, states: Tensor, out: Tensor) -> None:
        """out = what the public functions return of several states (k, ...) of the same rows."""
        finish(states[0] if len(states) == 1 else self.merged(states), self.unit, out)

    def pull(self, values: Tensor, gradient: Tensor) -> Tensor:
        """What `backward` takes of a side whose `values` got this upstream gradient."""
        return pull_of(values, gradient)

    def side(self, pull: Tensor | None) -> Tensor | None:
        """The same of a side whose pull came from elsewhere."""
        return pull

    def strips(self) -> Iterator[slice]:
        """The rows in parts, each for one call of `backward`."""
        return strips(self.x.shape[0], self.rows)

    def backward(
        self,
        i: slice,
        scale: Tensor,
        rows: Tensor | None,
        columns: Tensor | None,
        dx: Tensor | None,
        dy: Tensor | None,
        fresh: tuple[bool, bool] = (False, False),
        later: list[Callable[[], None]] | None = None,
    ) -> None:
        """Add the gradients of one strip of rows `i`: dx holds that strip, dy all columns.

        With `symmetric`, dx and dy are views of one gradient of all rows, `columns` is `rows`.
        `fresh`: dx, dy hold nothing yet (`buffer`). `later` would get what is for the caller to
        make, before the next strip; nothing is.
        """
        for j in self._columns_of(i):
            mirrored = self.symmetric and i != j
            tile_torch.backward(
                self.x[i],
                self.y[j],
                scale,
                self.pairs.view(i, j),
                None if rows is None else rows[:, i],
                None if columns is None else columns[:, j],
                dx,
                dy[j] if dy is not None and (mirrored or not self.symmetric) else None,
                self._views(i, j),
                self._kept.get((i.start, j.start)),
                (fresh[0] and j.start == 0, fresh[1]),
            )

    def accumulator(self, rows: int) -> Tensor:
        """Zeros for the gradients of `rows` rows."""
        dtype = accumulator_dtype(self.x.dtype)
        return self.x.new_zeros((rows, self.x.shape[1]), dtype=dtype)

    def buffer(self, rows: int) -> Tensor:
        """Where the gradients of `rows` rows add up from a `fresh` start; zeros if none comes."""
        if len(self.x) == 0 or len(self.y) == 0:
            return self.accumulator(rows)
        return self.x.new_empty((rows, self.x.shape[1]), dtype=accumulator_dtype(self.x.dtype))

    def prepare(self, rows: Tensor | None, columns: Tensor | None) -> Tensor | None:
        """Bring pulls into dS's range, in place; returns what gradients are to be multiplied by."""
        return None

    def finish(
        self, total: Tensor, side: str, rows: slice, factor: Tensor, inner: bool, out: Tensor | None
    ) -> Tensor | None:
        """out = factor * total in out's dtype; <features, total> if `inner` is wanted.

        `total` belongs to these `rows` of the features of `side`, "x" or "y".
        """
        features = (self.x if side == "x" else self.y)[rows]
        product = None
        if inner:
            product = total.new_zeros(())
            for i in strips(len(features), 4096):
                product += (features[i].to(total.dtype) * total[i]).sum()
        if out is not None:
            out.copy_(total.mul_(factor))
        return product

    def _columns_of(self, i: slice) -> Iterator[slice]:
        for j in strips(self.y.shape[0], self.columns):
            if not self.symmetric or j.start >= i.start:
                yield j

    def _places(self, kept: Tensor) -> dict[tuple[int, int], Tensor]:
        """Where the logits of the blocks that fit into `kept` stay, by their first pair."""
        places: dict[tuple[int, int], Tensor] = {}
        used = 0
        for i in strips(self.x.shape[0], self.rows):
            for j in self._columns_of(i):
                m, n = i.stop - i.start, j.stop - j.start
                if used + m * n > kept.numel():
                    return places
                places[i.start, j.start] = kept[used : used + m * n].view(m, n)
                used += m * n
        return places

    def _views(self, i: slice, j: slice) -> tuple[Tensor, Tensor]:
        m, n = i.stop - i.start, j.stop - j.start
        first, second = self._buffers[:, : m * n]
        return first.view(m, n), second.view(m, n)
