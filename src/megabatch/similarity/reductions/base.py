"""The interface of a reduction's tiles: the blocks of this rank's rows against some columns.

Each reduction has two classes of tiles, one in torch operations (in this folder) and one in Triton
kernels (`backends/triton/`). The engine (`engine`) loops over their blocks; a schedule
(`distributed/schedule`) brings the columns.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from megabatch.similarity import backends
from megabatch.similarity.distributed import comm, grid
from megabatch.similarity.distributed.schedule import Local, Schedule
from megabatch.similarity.masks import Pairs, SortedMatrix


class Tiles(Protocol):
    """The blocks of x (m, d) against y (n, d), with the geometry and accumulators of a backend."""

    x: Tensor
    y: Tensor
    m: int  #: rows of x; len(x) takes 1 us, and a step needs it often
    n: int  #: rows of y
    symmetric: bool  #: y is x: only the blocks on and above the diagonal are computed

    def row_blocks(self) -> Iterator[slice]:
        """Slices of the rows, one for each row of blocks."""
        ...

    def col_blocks(self, i: slice) -> Iterator[slice]:
        """The columns of the blocks of rows `i`; if symmetric, those from the diagonal on."""
        ...

    def new_total(self, rows: int) -> Tensor:
        """An accumulator for the gradients of `rows` rows; zeros if no block will write to it."""
        ...

    def gradient_block(self, i: slice, j: slice, rows: Any, cols: Any) -> Tensor | None:
        """dS of a block, valid until the next call; None if no gradient of features is wanted.

        `rows`, `cols`: the upstream of each side, as `unpack_upstream` makes it; None if there is
        none.
        """
        ...

    def unpack_upstream(self, packed: Tensor | None) -> Any:
        """The upstream of a side as `gradient_block` takes it, from the tensor that was sent."""
        ...

    def pack_upstream(self, upstream: Any) -> Tensor | None:
        """An upstream as one tensor (k, rows), which is sent with the columns."""
        ...


class StateTiles(Tiles, Protocol):
    """Tiles of a reduction that keeps a running state for each row and each column."""

    def reduce(self, cols: bool) -> tuple[Tensor, Tensor | None]:
        """The results of all rows and, if wanted, of all columns, of this matrix alone."""
        ...

    def new_state(self, size: int) -> Tensor:
        """A state for `size` rows, (numbers, size), uninitialised."""
        ...

    def clear(self, state: Tensor) -> Tensor:
        """Set it to the state before any column; returns it."""
        ...

    def forward(
        self, rows: Tensor, cols: Tensor | None, overwrite: tuple[bool, bool] = (False, False)
    ) -> None:
        """Merge all blocks into the states of the rows and, unless None, of the columns.

        If symmetric, the columns' state is the rows'. `overwrite`: the rows', the columns' state is
        uninitialised.
        """
        ...

    def merge(self, states: Tensor) -> Tensor:
        """Several states (k, ...) of the same rows as one."""
        ...

    def new_results(self, size: int) -> Tensor:
        """The results of `size` rows, (numbers, size), uninitialised."""
        ...

    def write_results(self, states: Tensor, out: Tensor) -> None:
        """Write the results of several states (k, ...) of the same rows to `out`."""
        ...

    def make_upstream(self, results: Tensor, gradient: Tensor) -> Any:
        """A side's upstream from its results and their upstream gradients."""
        ...

    def upstream_divisor(self, rows: Any, cols: Any) -> Tensor | None:
        """() divisor with which the upstream gradients fit dS's dtype; None: they fit without."""
        ...

    def divide_upstream(self, packed: Tensor, divisor: Tensor) -> None:
        """Divide the upstream gradients in a packed upstream, in place."""
        ...

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
        ...


def sort_by_id(x: Tensor, y: Tensor | None, pairs: Pairs) -> SortedMatrix:
    """The whole matrix, sorted by id if kernels compute it; y=None: x against itself."""
    other = x if y is None else y
    make = SortedMatrix.of if backends.uses_kernels(x) else SortedMatrix
    return make(x, other, pairs)


def kind_of(features: Tensor | None) -> str:
    """Description of further features, on which ranks must agree."""
    if features is None:
        return "none"
    dtype = str(features.dtype).removeprefix("torch.")
    return f"width {features.shape[1]}, {dtype}, {backends.arithmetic(features)}"


class Handshake(NamedTuple):
    """A schedule, and the numbers of rows and columns of each rank, (2, ranks) int64.

    The sizes are on the CPU; for one process they are (2, 0), on the features' device.
    """

    schedule: Schedule
    sizes: Tensor


def handshake(
    group: str, call: str, terms: str, rows: int, cols: int, x: Tensor, symmetric: bool = False
) -> Handshake:
    """The schedule of a call over the group, after its ranks agreed on the terms of the call.

    Args:
        group: its name; "" for this process alone, without communication.
        call: the public function's name and, after a comma, more on which ranks must agree.
        terms: a description of the operator's arguments, on which they must agree. rows, cols: of
            this rank. symmetric: x against itself.
    """
    if not group:
        # On the features' device: CUDA graphs of torch.compile hold no result on the CPU.
        return Handshake(Local(), x.new_empty(2, 0, dtype=torch.int64))
    numbers = comm.agree(group, f"{call}, {terms}{comm.shape(group)}", [rows, cols], x.device)
    sizes = torch.tensor(numbers, device="cpu").T
    schedule = grid.choose(group, sizes.tolist(), call.split(",", 1)[0], x, symmetric)
    return Handshake(schedule, sizes)


def new_sizes(x: Tensor, ranks: int) -> Tensor:
    """The sizes of a handshake for fake tensors; ranks: 0 alone."""
    return x.new_empty(2, ranks, dtype=torch.int64, device="cpu" if ranks else x.device)


def schedule_again(
    group: str, call: str, sizes: Tensor, x: Tensor, columns: Tensor, symmetric: bool = False
) -> Schedule:
    """The schedule of a backward pass. `columns`: those of all ranks, if they were saved."""
    if not group:
        return Local()
    operation = f"{call.split(',', 1)[0]}, backward"
    schedule = grid.choose(group, sizes.tolist(), operation, x, symmetric)
    if columns.numel() and symmetric:
        schedule.use_buffer(columns, filled=True)
    elif columns.numel() and len(set(schedule.sizes)) == 1:
        schedule.gathered = columns
    return schedule
