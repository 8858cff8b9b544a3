"""The hosts of a group's ranks."""

from __future__ import annotations

import functools
import os
import socket
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from megabatch.similarity.distributed import control
from megabatch.similarity.distributed.comm import failures_of

#: Bytes of a host's name in the exchange.
LENGTH = 128

_known: WeakKeyDictionary[dist.ProcessGroup, list[str]] = WeakKeyDictionary()


def by_rank(group: dist.ProcessGroup, device: torch.device) -> list[str]:
    """The name of each rank's host; the ranks exchange it once, on first use.

    Args:
        device: of the group's tensors.

    Raises:
        CommunicationError: a rank is gone or sends nothing in time.
    """
    if group not in _known:
        channel = control.channel(group, device)
        if isinstance(channel, control.SocketChannel):  # these reach one host alone
            _known[group] = [""] * group.size()
        else:
            with failures_of(f"hosts of a group, rank {dist.get_rank()}"):
                rows = channel.gather(_own().encode()[:LENGTH].ljust(LENGTH))
            _known[group] = [row.decode(errors="replace").strip() for row in rows]
    return _known[group]


def several(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Whether the group's ranks are on more than one host."""
    return len(set(by_rank(group, device))) > 1


@functools.lru_cache(maxsize=8)
def in_order(names: tuple[str, ...]) -> tuple[list[int], int]:
    """The ranks host by host, and the number of ranks of each host; 0 if they differ in it."""
    ranks: dict[str, list[int]] = {}
    for rank, name in enumerate(names):
        ranks.setdefault(name, []).append(rank)
    sizes = {len(own) for own in ranks.values()}
    return [rank for own in ranks.values() for rank in own], sizes.pop() if len(sizes) == 1 else 0


def columns_for(number: int, ranks: int, most: int, symmetric: bool = False) -> int:
    """Ranks of a row of the grid for so many hosts of `ranks` ranks each; 0: no grid.

    A row is whole hosts, up to `most` ranks, whose rows fit into memory. Of the divisions that
    leave several rows and columns, it is the one with which a host receives the fewest shards from
    others; if symmetric (x against itself), columns reach half of the rows of the grid.
    """

    def received(width: int) -> int:
        columns, rows = width * ranks, number // width
        return columns - ranks + ranks * (rows // 2 if symmetric else rows - 1)

    widths = [w for w in range(1, number) if number % w == 0 and 1 < w * ranks <= most]
    return min(widths, key=received) * ranks if widths else 0


def _own() -> str:
    """A name that processes share if they are on one host, in one network namespace."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as boot:
            return f"{boot.read().strip()} {os.stat('/proc/self/ns/net').st_ino}"
    except OSError:  # no Linux
        return socket.gethostname()
