"""The sides of a grid of ranks: its shape, and the groups of ranks that share rows or columns."""

from __future__ import annotations

from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from megabatch import torch_internals
from megabatch.similarity import settings
from megabatch.similarity.distributed import comm, control, hosts


class Sides(NamedTuple):
    """The groups of this rank (r, c) of a grid of R x C."""

    rows: dist.ProcessGroup  #: the ranks (r, *), which share rows
    cols: dist.ProcessGroup  #: the ranks (*, c), which share columns


#: By the setting under which they were made; None: the group is no grid.
_known: WeakKeyDictionary[dist.ProcessGroup, dict[int, Sides | None]] = WeakKeyDictionary()


def of(name: str, device: torch.device) -> Sides | None:
    """The sides of a group that is a grid: a mesh, or as the setting and its hosts decide.

    Args:
        name: of the group. device: of its tensors.

    Raises:
        CommunicationError: a rank is gone or does not come in time.
    """
    group, of_mesh = comm.resolve(name), comm.sides(name)
    if of_mesh is not None:
        found: Sides | None = Sides(*of_mesh)
    else:
        known, setting = _known.setdefault(group, {}), settings.grid()
        if setting not in known:
            known[setting] = _new_sides(group, setting, device)
        found = known[setting]
    for side in found or ():
        control.watch_with(side, group)
    return found


def _new_sides(group: dist.ProcessGroup, columns: int, device: torch.device) -> Sides | None:
    """The sides of a grid with so many columns; -1: as the hosts suggest.

    Only the default group, of all ranks, becomes a grid: torch makes new groups on all ranks.
    """
    if group is not dist.group.WORLD:
        return None
    order = list(range(group.size()))
    if columns < 0:
        order, on_each = hosts.in_order(hosts.by_rank(group, device))
        columns = hosts.columns_for(len(order) // on_each, on_each) if on_each else 0
    if columns == 0 or len(order) % columns:
        return None
    table = [order[i : i + columns] for i in range(0, len(order), columns)]
    # Not as a DeviceMesh, whose groups have torch's default timeout and not this group's.
    timeout = torch_internals.backend_timeout(torch_internals.group_backend(group, device))
    rows, _ = dist.new_subgroups_by_enumeration(table, timeout)
    cols, _ = dist.new_subgroups_by_enumeration(
        [list(c) for c in zip(*table, strict=True)], timeout
    )
    return Sides(rows, cols)
