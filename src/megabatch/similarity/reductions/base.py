"""What a reduction gives to the engine: the blocks of this rank's rows against some columns.

Each reduction has two classes of tiles, one in torch operations (in its file here) and one in
Triton kernels (`backends/triton/`). The engine (`engine`) sweeps them; a schedule
(`distributed/schedule`) says which columns come.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from megabatch.similarity import backends
from megabatch.similarity.distributed import comm
from megabatch.similarity.distributed.ranks import Ranks
from megabatch.similarity.distributed.schedule import Local, Schedule
from megabatch.similarity.masks import Pairs, SortedMatrix


class Tiles(Protocol):
    """The blocks of x (m, d) against y (n, d), with the geometry and accumulators of a backend."""

    x: Tensor
    y: Tensor
    m: int  #: rows of x; a tensor's own length takes 1 us to ask for, and a step does so often
    n: int  #: rows of y
    symmetric: bool  #: y is x: only the blocks on and above the diagonal are visited

    def row_blocks(self) -> Iterator[slice]:
        """The rows in parts."""
        ...

    def col_blocks(self, i: slice) -> Iterator[slice]:
        """The columns of the blocks of rows `i`; if symmetric, those from the diagonal on."""
        ...

    def new_total(self, rows: int) -> Tensor:
        """An accumulator for the gradients of `rows` rows; zeros if no block will write to it."""
        ...

    def gradient_block(self, i: slice, j: slice, rows: Any, cols: Any) -> Tensor | None:
        """dS of a block, valid until the next call; None if no gradient of features is wanted.

        `rows`, `cols`: the upstream of each side, as `upstream` makes it; None for a side without.
        """
        ...

    def upstream(self, numbers: Tensor | None) -> Any:
        """One side's upstream as `gradient_block` takes it, from the tensor that travels."""
        ...

    def numbers(self, upstream: Any) -> Tensor | None:
        """The tensor (k, rows) of an upstream, which travels with the columns."""
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
        """Make it the state before any column was seen."""
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

    def upstream_size(self, rows: Any, cols: Any) -> Tensor | None:
        """() by which the upstream gradients fit dS's dtype when divided; None: they fit."""
        ...

    def divide_upstream(self, numbers: Tensor, size: Tensor) -> None:
        """Divide the upstream gradients among the numbers of a side, in place."""
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
    """The whole matrix in the order that its blocks want: by id for kernels; y=None: x itself."""
    other = x if y is None else y
    make = SortedMatrix.of if backends.uses_kernels(x) else SortedMatrix
    return make(x, other, pairs)


def kind_of(features: Tensor | None) -> str:
    """What ranks must agree on of further features, in words."""
    if features is None:
        return "none"
    dtype = str(features.dtype).removeprefix("torch.")
    return f"width {features.shape[1]}, {dtype}, {backends.arithmetic(features)}"


class Handshake(NamedTuple):
    """A schedule, and the numbers of rows and columns of each rank, (2, ranks) int64.

    Those are on the CPU; of a process alone (2, 0), on the features' device.
    """

    schedule: Schedule
    sizes: Tensor


def handshake(group: str, call: str, terms: str, rows: int, cols: int, x: Tensor) -> Handshake:
    """The schedule of a call over the group, after its ranks agreed on the terms of the call.

    Args:
        group: its name; "" for this process alone, which asks nobody.
        call: the public function's name and, after a comma, more that all ranks must do alike.
        terms: the same of the operator, in words. rows, cols: of this rank.
    """
    if not group:
        # On the features' device: CUDA graphs of torch.compile hold no result on the CPU.
        return Handshake(Local(), x.new_empty(2, 0, dtype=torch.int64))
    numbers = comm.agree(group, f"{call}, {terms}", [rows, cols], x.device)
    sizes = torch.tensor(numbers, device="cpu").T
    return Handshake(Ranks(group, sizes[1].tolist(), call.split(",", 1)[0]), sizes)


def new_sizes(x: Tensor, ranks: int) -> Tensor:
    """The sizes of a handshake for fake tensors; ranks: 0 alone."""
    return x.new_empty(2, ranks, dtype=torch.int64, device="cpu" if ranks else x.device)


def schedule_again(group: str, call: str, sizes: Tensor, columns: Tensor) -> Schedule:
    """The schedule of a backward pass. `columns`: those of all ranks, if they stayed."""
    if not group:
        return Local()
    ranks = Ranks(group, sizes[1].tolist(), f"{call.split(',', 1)[0]}, backward")
    if columns.numel() and len(set(ranks.sizes)) == 1:
        ranks.gathered = columns
    return ranks
