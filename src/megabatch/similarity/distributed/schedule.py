"""The schedule of a group of ranks: who computes which block, and what travels when.

Rank (r, c) of a grid of R x C ranks gathers the rows of the ranks (r, *) and, in rounds, the
columns of the ranks (*, c), and computes the former against the latter. An all-to-all returns
states of the columns to their ranks, a reduce-scatter their gradients; states and gradients of the
rows are exchanged along (r, *). Without a grid, R is the number of ranks and C is 1: each rank
computes its own rows against all columns. A grid receives R - 1 + C - 1 shards instead of R C - 1,
which counts between hosts (docs/distributed.md).

Rounds bound the memory of transfers for any shard size: while one is computed, the next one's
columns arrive and the gradients of the previous one are summed. A collective per round is faster
than a ring of ranks, where each waits for the slowest at each step (docs/design/transfers.md).

The matrix of x against itself is symmetric, so one of two ranks computes the block of their shards
(`half`). It takes no grid.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from megabatch import torch_internals
from megabatch.similarity import settings
from megabatch.similarity.distributed import comm, control
from megabatch.similarity.distributed.layout import Gathering, Layout
from megabatch.similarity.matrix import Side, strips

#: With at least this many rows of a rank in a round, its own columns come first, while the others'
#: arrive. With fewer, launches by the host decide the time.
LARGE = 16_384
#: Shards above the bound are gathered in rounds of this part of it: features of three rounds and
#: gradients of two are in memory at once, and smaller rounds are as fast where there are many.
ROUND = 4
#: Rows of a round are a multiple of this, as the rows of a GPU's tiles are.
TILE = 128


class Part(NamedTuple):
    """A block that a rank computes."""

    rows: slice  #: among the rows that this rank computes
    cols: slice  #: among the round's columns
    row_start: int  #: index of the first row among all ranks' rows, as in `Matrix`
    col_start: int  #: of the first column; behind all rows if the block holds no pair (i, i)
    side: Side  #: the columns


class Ranks:
    """The ranks of one call over a group, and this rank's place among them."""

    def __init__(
        self,
        name: str,
        sizes: Sequence[Sequence[int]],
        operation: str,
        features: Tensor,
        symmetric: bool = False,
        grid: bool = True,
    ) -> None:
        """The same schedule on all ranks.

        Args:
            name: of the group. sizes: (rows by rank, columns by rank). operation: its name in
                errors. features: this rank's, (m, ...). symmetric: x against itself. grid: whether
                ranks may share rows.
        """
        self.name, self.operation, self.symmetric = name, operation, symmetric
        group, (row_sizes, col_sizes) = comm.resolve(name), sizes
        self.rank, self.n = group.rank(), group.size()
        self._even = len(set(col_sizes)) == len(set(row_sizes)) == 1
        row_bytes, groups = math.prod(features.shape[1:]) * features.element_size(), None
        if grid and not symmetric:
            groups = grid_groups(name, sizes, row_bytes, features.device)
        self.is_grid = groups is not None
        if groups is None:
            self.rows = Layout(None, [row_sizes[self.rank]], operation)
            self.cols = Layout(group, col_sizes, operation)
        else:  # of all ranks, so that a rank is an index
            self.rows, self.cols = (
                Layout(part, [own[k] for k in dist.get_process_group_ranks(part)], operation)
                for part, own in zip(groups, sizes, strict=True)
            )
        #: index of this rank's first column, and row, among all ranks'
        self.start = sum(col_sizes[: self.rank])
        self.row_start = self.start - self.rows.own.start
        self._step = round_rows(self.cols.padded, len(self.cols.sizes) * row_bytes)
        self._row_place: Tensor | None = None  #: for gathered features, see `keep`
        self._col_place: Tensor | None = None
        self._filled = False

    @property
    def one_round(self) -> bool:
        """Whether all columns are gathered at once."""
        return self._step >= self.cols.padded

    def keep(self, features: Tensor, filled: bool) -> None:
        """Keep what is gathered in `features`, if there is room; `filled`: it is there already.

        The forward pass fills them, the backward pass need not gather again.
        """
        n, m = self.cols.size, self.rows.size if self.rows.group is not None else 0
        if self.one_round and self._even and 0 < n + m <= len(features):
            self._row_place, self._col_place = features[n : n + m] if m else None, features[:n]
            self._filled = filled

    def gather_rows(self, side: Side) -> Gathering:
        """Begin to gather the rows that this rank computes."""
        return self.rows.gather(side, self._row_place, self._filled)

    def rounds(self, side: Side) -> Iterator[Round]:
        """Gather this rank's columns and the others' in rounds.

        The first round is on its way at once, each other one while the round before is computed.
        """
        parts = list(strips(self.cols.padded, self._step)) or [slice(0, 0)]
        first = Round(self, parts[0], side, self._col_place, self._filled)
        return self._rounds(first, parts[1:], side)

    def _rounds(self, now: Round, others: Sequence[slice], side: Side) -> Iterator[Round]:
        for part in others:
            coming = Round(self, part, side)
            yield now
            now = coming
        yield now


class Round:
    """The columns of one round: these rows of every rank's shard."""

    def __init__(
        self,
        ranks: Ranks,
        part: slice,
        side: Side,
        saved: Tensor | None = None,
        filled: bool = False,
    ) -> None:
        self.ranks, self._part = ranks, part
        pieces = [slice(min(part.start, s), min(part.stop, s)) for s in ranks.cols.sizes]
        self.layout = Layout(ranks.cols.group, [p.stop - p.start for p in pieces], ranks.operation)
        self.own = pieces[ranks.cols.rank]  #: of this rank's shard
        self._side = side.narrow(self.own)
        self._coming = self.layout.gather(self._side, saved, filled)

    def parts(self) -> Iterator[Part]:
        """The blocks to compute; own columns come first if the others' are on their way."""
        if self.ranks.symmetric:
            yield from self._half()
            return
        ranks, own, size = self.ranks, self.layout.own, self.layout.size
        rows, row_start = slice(0, ranks.rows.size), ranks.row_start
        hides = self._coming.under_way and own.stop - own.start >= LARGE
        if ranks.one_round and not ranks.is_grid and not hides:
            yield Part(rows, slice(0, size), row_start, 0, self._coming.wait())
            return
        yield Part(rows, own, row_start, ranks.start + self.own.start, self._side)
        everyone, behind = self._coming.wait(), row_start + rows.stop
        for cols in (slice(own.stop, size), slice(0, own.start)):
            if cols.start < cols.stop:
                yield Part(rows, cols, row_start, behind, everyone.narrow(cols))

    def _half(self) -> Iterator[Part]:
        """x against itself, apart from this rank's own triangle."""
        ranks, layout, columns = self.ranks, self.layout, self._coming.wait()
        behind = ranks.row_start + ranks.rows.size
        for owner, rows, skipped in half(ranks.rank, ranks.cols.sizes):
            first, last = layout.starts[owner : owner + 2]
            cols = slice(first + max(0, skipped - self._part.start), last)
            if rows and cols.start < cols.stop:
                side = columns.narrow(cols)
                yield Part(slice(0, rows), cols, ranks.row_start, behind, side)

    def by_rank(self) -> Iterator[tuple[int, Side]]:
        """Consecutive columns of all ranks, and the index of the first; without a grid."""
        columns, starts = self._coming.wait(), self.layout.starts
        if self.ranks.one_round:
            yield 0, columns
            return
        for start, first, last in zip(self.ranks.cols.starts, starts, starts[1:], strict=False):
            yield start + self._part.start, columns.narrow(slice(first, last))


def half(rank: int, sizes: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """The blocks of x against itself that a rank computes, apart from its own triangle.

    They are all its rows against the ranks that are less than half of the way before it; of the
    block of two opposite ranks, each computes a half.

    Yields the rank of the columns, how many of the own rows to take, and how many columns to skip.
    """
    n, own = len(sizes), sizes[rank]
    for step in range(1, (n + 1) // 2):
        yield (rank - step) % n, own, 0
    if n % 2 == 0:
        other = (rank + n // 2) % n
        yield (other, own // 2, 0) if rank < other else (other, own, sizes[other] // 2)


def round_rows(size: int, row: int) -> int:
    """Rows of each rank's shard of up to `size` rows that are gathered at a time.

    row: bytes of features of one row of each rank.
    """
    limit = settings.current().gather
    if size * row <= limit:
        return max(1, size)
    most = max(1, limit // ROUND // row)
    # Rows of whole tiles, or of many ranks a power of two of each.
    unit = TILE if most >= TILE else 1 << (most.bit_length() - 1)
    rounds = -(-size // (most // unit * unit))
    return -(-size // (rounds * unit)) * unit  # even rounds


def saved_rows(features: Tensor, ranks: int, limit: int) -> int:
    """Number of rows of features that are saved for the backward pass: all ranks' or none.

    They are saved if they take up to `limit` bytes, as the features of a round do, and if kernels
    take them without padding.
    """
    whole_lines = features.shape[1] * features.element_size() % 16 == 0
    return ranks * len(features) if whole_lines and ranks * features.nbytes <= limit else 0


# --- grids ----------------------------------------------------------------------------------------


class GridGroups(NamedTuple):
    """The groups of rank (r, c) of a grid."""

    rows: dist.ProcessGroup  #: the ranks (r, *), which share rows
    cols: dist.ProcessGroup  #: the ranks (*, c), which share columns


#: The groups made of a group, by the number of columns.
_grids: WeakKeyDictionary[dist.ProcessGroup, dict[int, GridGroups]] = WeakKeyDictionary()


def grid_groups(
    name: str, sizes: Sequence[Sequence[int]], row: int, device: torch.device
) -> GridGroups | None:
    """The grid of a call, as the setting and the hosts decide; None: no grid.

    A grid takes no empty shard, and no rows that do not fit into memory at once.

    Args:
        name: of the group. sizes: (rows by rank, columns by rank). row: bytes of a row's features.
        device: of the group's tensors.
    """
    group, most = comm.resolve(name), most_sharing(max(sizes[0]), row)
    # All ranks of the world have to help make groups.
    if group is not dist.group.WORLD or min(map(min, sizes)) == 0:
        return None
    columns = settings.current().grid
    if columns < 0:
        each = ranks_per_host(tuple(control.channel(group, device).hosts))
        columns = columns_for(group.size() // each, each, most) if each else 0
    if columns == 0 or group.size() % columns or columns > most:
        return None
    known = _grids.setdefault(group, {})
    if columns not in known:
        known[columns] = _new_grid(group, device, columns)
    return known[columns]


def most_sharing(rows: int, row: int) -> int:
    """The number of ranks whose shards of `rows` rows, of `row` bytes each, fit into memory."""
    return settings.current().gather // max(1, rows * row)


def columns_for(hosts: int, ranks: int, most: int) -> int:
    """Columns of the grid of so many hosts with `ranks` ranks each; 0: no grid.

    A row of the grid is whole hosts, up to `most` ranks. Of the divisions that leave several rows
    and columns, it is the one with which a host receives the fewest shards from others.
    """
    widths = [w for w in range(1, hosts) if hosts % w == 0 and 1 < w * ranks <= most]
    received = {w: w * ranks - ranks + ranks * (hosts // w - 1) for w in widths}
    return min(widths, key=received.__getitem__) * ranks if widths else 0


@functools.lru_cache(maxsize=8)
def ranks_per_host(names: tuple[str, ...]) -> int:
    """The number of ranks of each host, from the name of each rank's host.

    0: hosts differ in it, or the ranks of one are not consecutive.
    """
    hosts = [len(list(ranks)) for _, ranks in itertools.groupby(names)]
    return hosts[0] if len(set(names)) == len(hosts) and len(set(hosts)) == 1 else 0


def _new_grid(group: dist.ProcessGroup, device: torch.device, columns: int) -> GridGroups:
    table = torch.arange(group.size(), device="cpu").view(-1, columns)
    # Not as a DeviceMesh, whose groups have torch's default timeout and not this group's.
    timeout = torch_internals.backend_timeout(torch_internals.group_backend(group, device))
    made: list[Any] = [
        dist.new_subgroups_by_enumeration(parts, timeout)[0]
        for parts in (table.tolist(), table.T.tolist())
    ]
    return GridGroups(*made)


# --- the handshake --------------------------------------------------------------------------------


def terms() -> str:
    """Description of the schedule's settings, on which all ranks must agree."""
    chosen = settings.current()
    columns = {-1: "by hosts", 0: "never"}.get(chosen.grid, f"{chosen.grid} columns")
    return f"gathered up to {chosen.gather} bytes, grid: {columns}"


def agree(
    group: str, call: str, description: str, sizes: tuple[int, int], x: Tensor, symmetric: bool
) -> tuple[Ranks | None, Tensor]:
    """Let the ranks of a group agree on a call, before anything is sent.

    Args:
        group: its name; "" for this process alone, without communication.
        call: the public function's name and, after a comma, more on which ranks must agree.
        description: of the call's arguments, likewise. sizes: this rank's numbers of rows and
            columns. symmetric: x against itself.

    Returns:
        The ranks, None for this process alone, and their sizes, as of `new_sizes`.

    Raises:
        ValueError: the ranks disagree; the message says what each had.
        CommunicationError: a rank is gone or sends nothing in time.
    """
    if not group:
        return None, new_sizes(group, x)
    common = f"{call}, {description}, {terms()}"
    table = torch.tensor(comm.agree(group, common, sizes, x.device), device="cpu").T
    return ranks_again(group, call, table, x, symmetric, ""), table


def ranks_again(
    group: str, call: str, sizes: Tensor, x: Tensor, symmetric: bool, suffix: str = ", backward"
) -> Ranks | None:
    """The ranks of a call whose sizes are known: of its backward pass."""
    if not group:
        return None
    return Ranks(group, sizes.tolist(), call.split(",", 1)[0] + suffix, x, symmetric)


def new_sizes(group: str, x: Tensor) -> Tensor:
    """Numbers of rows and columns of each rank, (2, ranks) int64, uninitialised, also fake ones.

    They are on the CPU; for one process they are (2, 0) on the features' device, as CUDA graphs of
    torch.compile hold no result on the CPU.
    """
    ranks = comm.resolve(group).size() if group else 0
    return x.new_empty(2, ranks, dtype=torch.int64, device="cpu" if ranks else x.device)
