"""The division of a group's ranks into a grid."""

from __future__ import annotations

import functools
import itertools
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
    """The number of ranks of each host; 0 if they differ in it or a host's do not follow another.

    names: of the ranks' hosts.
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
    for part in made:
        control.watch_with(part, group)
    return GridGroups(*made)
