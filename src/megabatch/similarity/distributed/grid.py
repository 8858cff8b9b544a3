"""The hosts of a group's ranks, and its division into a grid of ranks."""

from __future__ import annotations

import functools
import os
import socket
from collections.abc import Sequence
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from megabatch import torch_internals
from megabatch.similarity import settings
from megabatch.similarity.distributed import comm, control
from megabatch.similarity.distributed.comm import failures_of

#: Bytes of a host's name in the exchange.
LENGTH = 128


class GridGroups(NamedTuple):
    """The groups of this rank (r, c) of a grid of R x C."""

    rows: dist.ProcessGroup  #: the ranks (r, *), which share rows
    cols: dist.ProcessGroup  #: the ranks (*, c), which share columns


_hosts: WeakKeyDictionary[dist.ProcessGroup, list[str]] = WeakKeyDictionary()
#: Grids of a group by the setting and the number of columns; None: it is no grid.
_grids: WeakKeyDictionary[dist.ProcessGroup, dict[tuple[int, int], GridGroups | None]] = (
    WeakKeyDictionary()
)


def grid_groups(
    name: str, sizes: Sequence[Sequence[int]], row: int, device: torch.device
) -> GridGroups | None:
    """The grid of a call: a mesh's, or as the setting and the hosts decide; None: no grid.

    A grid takes no empty shard, and no rows that do not fit into memory at once.

    Args:
        name: of the group. sizes: (rows by rank, columns by rank). row: bytes of a row's features.
        device: of the group's tensors.

    Raises:
        CommunicationError: a rank is gone or does not come in time.
    """
    if min(map(min, sizes)) == 0:
        return None
    group, mesh = comm.resolve(name), comm.mesh_groups(name)
    most = most_sharing(max(sizes[0]), row)
    found = None
    if mesh:
        found = GridGroups(*mesh)
    elif group is dist.group.WORLD:  # all ranks of the world have to help make its groups
        found = _of_all(group, device, most)
    if found is None or found.rows.size() > most:
        return None
    for part in found:
        control.watch_with(part, group)
    return found


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


def by_rank(group: dist.ProcessGroup, device: torch.device) -> list[str]:
    """The name of each rank's host; the ranks exchange it once, on first use.

    Args:
        device: of the group's tensors.

    Raises:
        CommunicationError: a rank is gone or sends nothing in time.
    """
    if group not in _hosts:
        channel = control.channel(group, device)
        if isinstance(channel, control.SocketChannel):  # these reach one host alone
            _hosts[group] = [""] * group.size()
        else:
            with failures_of(f"hosts of a group, rank {dist.get_rank()}"):
                rows = channel.gather(_host().encode()[:LENGTH].ljust(LENGTH))
            _hosts[group] = [row.decode(errors="replace").strip() for row in rows]
    return _hosts[group]


@functools.lru_cache(maxsize=8)
def host_by_host(names: tuple[str, ...]) -> tuple[list[int], int]:
    """The ranks host by host, and the number of ranks of each host; 0 if they differ in it."""
    ranks: dict[str, list[int]] = {}
    for rank, name in enumerate(names):
        ranks.setdefault(name, []).append(rank)
    sizes = {len(some) for some in ranks.values()}
    return [rank for some in ranks.values() for rank in some], sizes.pop() if len(sizes) == 1 else 0


def _of_all(group: dist.ProcessGroup, device: torch.device, most: int) -> GridGroups | None:
    """The grid of all ranks; its groups are made on first use."""
    setting = columns = settings.current().grid
    order = list(range(group.size()))
    if setting < 0:
        order, on_each = host_by_host(tuple(by_rank(group, device)))
        columns = columns_for(len(order) // on_each, on_each, most) if on_each else 0
    known, key = _grids.setdefault(group, {}), (setting, columns)
    if key not in known and (columns == 0 or len(order) % columns):
        known[key] = None
    elif key not in known:
        table = [order[i : i + columns] for i in range(0, len(order), columns)]
        # Not as a DeviceMesh, whose groups have torch's default timeout and not this group's.
        timeout = torch_internals.backend_timeout(torch_internals.group_backend(group, device))
        rows, _ = dist.new_subgroups_by_enumeration(table, timeout)
        turned = [list(column) for column in zip(*table, strict=True)]
        cols, _ = dist.new_subgroups_by_enumeration(turned, timeout)
        assert isinstance(rows, dist.ProcessGroup)
        assert isinstance(cols, dist.ProcessGroup)
        known[key] = GridGroups(rows, cols)
    return known[key]


def _host() -> str:
    """A name that processes share if they are on one host, in one network namespace."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as boot:
            return f"{boot.read().strip()} {os.stat('/proc/self/ns/net').st_ino}"
    except OSError:  # no Linux
        return socket.gethostname()
