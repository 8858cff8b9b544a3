"""The division of a group's ranks into a grid."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from megabatch import torch_internals
from megabatch.similarity import settings
from megabatch.similarity.distributed import comm, control


class GridGroups(NamedTuple):
    """The groups of rank (r, c) of a grid."""

    rows: dist.ProcessGroup  #: the ranks (r, *), which share rows
    cols: dist.ProcessGroup  #: the ranks (*, c), which share columns


#: The groups made of a group, by the order of its ranks and the number of columns.
_grids: WeakKeyDictionary[dist.ProcessGroup, dict[tuple[bool, int], GridGroups]] = (
    WeakKeyDictionary()
)


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
    columns, order = settings.current().grid, list(range(group.size()))
    by_hosts = columns < 0
    if by_hosts:
        order, each = host_by_host(tuple(control.channel(group, device).hosts))
        columns = columns_for(len(order) // each, each, most) if each else 0
    if columns == 0 or len(order) % columns or columns > most:
        return None
    known = _grids.setdefault(group, {})
    if (by_hosts, columns) not in known:
        known[by_hosts, columns] = _new_grid(group, device, order, columns)
    return known[by_hosts, columns]


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
def host_by_host(names: tuple[str, ...]) -> tuple[list[int], int]:
    """The ranks host by host, and the number of ranks of each host; 0 if they differ in it."""
    counts = [names.count(name) for name in names]
    order = sorted(range(len(names)), key=lambda rank: names.index(names[rank]))
    return order, counts[0] if len(set(counts)) == 1 else 0


def _new_grid(
    group: dist.ProcessGroup, device: torch.device, order: Sequence[int], columns: int
) -> GridGroups:
    table = [order[i : i + columns] for i in range(0, len(order), columns)]
    # Not as a DeviceMesh, whose groups have torch's default timeout and not this group's.
    timeout = torch_internals.backend_timeout(torch_internals.group_backend(group, device))
    made: list[Any] = [
        dist.new_subgroups_by_enumeration(parts, timeout)[0]
        for parts in (table, [list(column) for column in zip(*table, strict=True)])
    ]
    for part in made:
        control.watch_with(part, group)
    return GridGroups(*made)
