"""The rows of several ranks as one matrix side, and the transfers that gather and return them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from megabatch.similarity.distributed.comm import Pending, all_gather, all_to_all, reduce_scatter
from megabatch.similarity.matrix import Side

#: The dimensions of a `Side`'s tensors along which its rows lie.
DIMS = (0, 0, 0, 0, 0, 1, 0)


class Layout:
    """The rows of some ranks, or of this rank alone, one rank after another.

    A transfer takes as many rows of each rank, so shorter shards are padded.
    """

    def __init__(
        self, group: dist.ProcessGroup | None, sizes: Sequence[int], operation: str
    ) -> None:
        """`group`: None for this rank alone. `sizes`: rows by rank. `operation`: for errors."""
        self.group = None if len(sizes) == 1 else group
        self.sizes, self.operation = list(sizes), operation
        self.rank = 0 if group is None else group.rank()
        self.starts = list(accumulate(sizes, initial=0))  #: of each rank's rows; the end of all
        self.size = self.starts[-1]  #: number of rows
        self.own = slice(*self.starts[self.rank : self.rank + 2])  #: this rank's rows
        self.padded = max(sizes)
        self._even = min(sizes) == self.padded
        self._padded_rows: Tensor | None = None

    def gather(self, side: Side, saved: Tensor | None = None, filled: bool = False) -> Gathering:
        """Begin to gather all ranks' tensors.

        Args:
            side: this rank's. saved: (size, d) a place for the features; None: a new one. filled:
                it has them already.
        """
        arriving: dict[int, Pending] = {}
        if self.group is not None and self.size:
            if filled and saved is not None:
                side = side._replace(features=saved)
            missing = self.padded - self.sizes[self.rank]
            for k, (tensor, dim) in enumerate(zip(side, DIMS, strict=True)):
                if tensor is None or tensor is saved:
                    continue
                if missing:
                    tensor = F.pad(tensor, [0, 0] * (tensor.dim() - dim - 1) + [0, missing])
                place = saved if k == 0 else None
                arriving[k] = all_gather(tensor, self.group, self.operation, place)
        return Gathering(self, side, arriving)

    def exchange(self, states: Tensor) -> Tensor:
        """Every rank's states of this rank's rows, (ranks, k, own); each gives states (k, size)."""
        if self.group is None:
            return states[None]
        if self.size == 0:
            return states.new_empty(len(self.sizes), *states.shape)
        by_rank = self._pad(states, 1).unflatten(1, (-1, self.padded)).movedim(1, 0)
        found = all_to_all(by_rank.contiguous(), self.group, self.operation)
        return found if self._even else found[..., : self.sizes[self.rank]].contiguous()

    def sum(self, totals: Tensor) -> Pending:
        """Begin to sum all ranks' totals (size, ...), in place; the result: this rank's rows."""
        if self.group is None or self.size == 0:
            return Pending(totals)
        pending = reduce_scatter(self._pad(totals, 0), self.group, self.operation)
        pending.result = pending.result[: self.sizes[self.rank]]
        return pending

    def join(self, gathered: Tensor, dim: int) -> Tensor:
        """All rows along `dim`, without padding, from those by rank (ranks, ...)."""
        joined = gathered.movedim(0, dim).flatten(dim, dim + 1)
        return joined if self._even else joined.index_select(dim, self._rows(joined))

    def _pad(self, joined: Tensor, dim: int) -> Tensor:
        """The inverse of `join`'s removal of padding, which is left uninitialised."""
        if self._even:
            return joined
        shape = list(joined.shape)
        shape[dim] = len(self.sizes) * self.padded
        return joined.new_empty(shape).index_copy_(dim, self._rows(joined), joined)

    def _rows(self, like: Tensor) -> Tensor:
        """The index of each row among the padded ones."""
        if self._padded_rows is None:
            shift = [rank * self.padded - start for rank, start in enumerate(self.starts[:-1])]
            # Few numbers leave the host, which therefore waits for no device.
            table = torch.tensor([shift, self.sizes], device="cpu").to(like.device)
            by_row = torch.repeat_interleave(table[0], table[1], output_size=self.size)
            self._padded_rows = by_row + torch.arange(self.size, device=like.device)
        return self._padded_rows


class Gathering:
    """A transfer that gathers all ranks' sides."""

    def __init__(self, layout: Layout, side: Side, arriving: dict[int, Pending]) -> None:
        """`arriving`: by index in a `Side`; the side's other tensors are there already."""
        self._layout, self._side, self._arriving = layout, side, arriving

    @property
    def under_way(self) -> bool:
        """Whether something is still to be waited for."""
        return bool(self._arriving)

    def wait(self) -> Side:
        """The sides of all ranks, one rank after another."""
        if self._arriving:
            tensors = list(self._side)
            for k, pending in self._arriving.items():
                tensors[k] = self._layout.join(pending.wait(), DIMS[k])
            self._side, self._arriving = Side(*tensors), {}  # type: ignore[arg-type]
        return self._side
