"""The shape of a grid of ranks, and its groups of ranks that share rows or columns."""

from __future__ import annotations

from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from megabatch import torch_internals
from megabatch.similarity import settings
from megabatch.similarity.distributed import comm, control, hosts


class GridGroups(NamedTuple):
    """The groups of this rank (r, c) of a grid of R x C."""

    rows: dist.ProcessGroup  #: the ranks (r, *), which share rows
    cols: dist.ProcessGroup  #: the ranks (*, c), which share columns


#: Grids of a group by the setting and the number of columns; None: it is no grid.
_known: WeakKeyDictionary[dist.ProcessGroup, dict[tuple[int, int], GridGroups | None]] = (
    WeakKeyDictionary()
)


def find(name: str, device: torch.device, most: int, symmetric: bool = False) -> GridGroups | None:
    """The grid of a group, if it is one: a mesh, or as the setting and its hosts decide.

    Args:
        name: of the group. device: of its tensors.
        most: ranks whose rows fit into memory at once, the same on all ranks.
        symmetric: x against itself, whose columns reach half of the ranks.

    Raises:
        CommunicationError: a rank is gone or does not come in time.
    """
    group, of_mesh = comm.resolve(name), comm.mesh_groups(name)
    if of_mesh is not None:
        found: GridGroups | None = GridGroups(*of_mesh)
    elif group is dist.group.WORLD:
        found = _of_all(group, settings.grid(), device, most, symmetric)
    else:  # the ranks of the world would all have to help make its groups
        found = None
    for part in found or ():
        control.watch_with(part, group)
    return found


def _of_all(
    group: dist.ProcessGroup, columns: int, device: torch.device, most: int, symmetric: bool
) -> GridGroups | None:
    """The grid of all ranks with so many columns; -1: as the hosts suggest."""
    setting, order = columns, list(range(group.size()))
    if setting < 0:
        order, on_each = hosts.in_order(tuple(hosts.by_rank(group, device)))
        columns = 0
        if on_each:
            columns = hosts.columns_for(len(order) // on_each, on_each, most, symmetric)
    known = _known.setdefault(group, {})
    if (setting, columns) not in known:
        grid = columns > 0 and len(order) % columns == 0
        known[setting, columns] = _new_groups(group, columns, order, device) if grid else None
    return known[setting, columns]


def _new_groups(
    group: dist.ProcessGroup, columns: int, order: list[int], device: torch.device
) -> GridGroups:
    """New groups of the ranks in this order, row by row."""
    table = [order[i : i + columns] for i in range(0, len(order), columns)]
    # Not as a DeviceMesh, whose groups have torch's default timeout and not this group's.
    timeout = torch_internals.backend_timeout(torch_internals.group_backend(group, device))
    rows, _ = dist.new_subgroups_by_enumeration(table, timeout)
    cols, _ = dist.new_subgroups_by_enumeration(
        [list(c) for c in zip(*table, strict=True)], timeout
    )
    assert isinstance(rows, dist.ProcessGroup)
    assert isinstance(cols, dist.ProcessGroup)
    return GridGroups(rows, cols)
