"""The control channel of a group: its ranks' hosts exchange a few bytes before each transfer.

On one machine it is a socket to each other rank, read in the calling thread: 17 us, where Gloo's
all-gather, with threads of its own and TCP, takes 690 (2 processes on 2 cores: docs/distributed).
Between machines it is Gloo. Either names the ranks that are gone or do not come.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading
import time
import uuid
from collections.abc import Sequence
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary, finalize

import torch
import torch.distributed as dist

from megabatch import torch_internals

_channels: WeakKeyDictionary[dist.ProcessGroup, Channel] = WeakKeyDictionary()


def has_cpu_backend(group: dist.ProcessGroup) -> bool:
    """Whether a group takes tensors on the CPU."""
    return "cpu:" in dist.get_backend_config(group)


def channel(group: dist.ProcessGroup, device: torch.device) -> Channel:
    """The group's channel, made on first use. `device`: of the group's tensors.

    The channel itself uses no device, so an exchange need not wait for work queued on a GPU.
    """
    if group not in _channels:
        on_cpu = has_cpu_backend(group)
        backend = torch_internals.group_backend(group, torch.device("cpu") if on_cpu else device)
        place = group.rank(), group.size(), torch_internals.backend_timeout(backend)
        board = Board(torch_internals.group_store(group), *place)
        hosts = board.exchange("host", _host())
        made: Channel
        if len(set(hosts)) == 1 and sys.platform == "linux":
            made = sockets(board)
        else:
            if not on_cpu:  # not by `new_group`, which all ranks of the world must call
                backend = dist.ProcessGroupGloo(dist.PrefixStore("gloo", board.store), *place)
            made = GlooChannel(backend, board)
        made.hosts = hosts
        _channels[group] = made
    return _channels[group]


def _host() -> str:
    """A name that processes share if they are on one host, in one network namespace."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as boot:
            return f"{boot.read().strip()} {os.stat('/proc/self/ns/net').st_ino}"
    except OSError:  # no Linux
        return socket.gethostname()


class Board:
    """The values that a group's ranks leave for one another in its store."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        self.rank, self.size, self.timeout = rank, size, timeout
        store = dist.PrefixStore("megabatch", store)
        # A store may outlive a group and hold its ranks' keys, so each group has a number.
        number = (store.add("arrivals", 1) - 1) // size
        self.store = dist.PrefixStore(str(number), store)
        self.store.set(f"came {rank}", "0")  # for `GlooChannel`

    def exchange(self, what: str, mine: str) -> list[str]:
        """Every rank's value of this name, by rank; waits for the other ranks."""
        self.store.set(f"{what} {self.rank}", mine)
        keys = [f"{what} {rank}" for rank in range(self.size)]
        self.store.wait(keys, self.timeout)
        return [self.store.get(key).decode() for key in keys]


# --- between machines -----------------------------------------------------------------------------

#: A wait that fails within these seconds, or an eighth of the group's timeout, failed at once.
AT_ONCE = 1.0
#: Seconds that the store may take to answer.
ANSWER = 2.0


class GlooChannel:
    """A channel over the group's collectives on the CPU.

    Gloo's timeout names no rank: in a collective each rank waits for its neighbour, which may
    itself be waiting. Each rank therefore writes to the group's store how often it has come. After
    a timeout, those that have come less often are missing.
    """

    hosts: Sequence[str] = ()  #: the name of each rank's host

    def __init__(self, backend: Any, board: Board) -> None:
        self.backend, self._rank, self._size = backend, board.rank, board.size
        self._store = board.store.clone()  # a connection of its own, which no other thread occupies
        self._at_once = min(AT_ONCE, board.timeout.total_seconds() / 8)
        self._count = 0

    def gather(self, mine: bytes) -> list[bytes]:
        """Return every rank's bytes, by rank; all send the same number. Waits for the other ranks.

        Raises:
            RuntimeError: a rank is gone, or sends nothing within the group's timeout.
        """
        self._count += 1
        with contextlib.suppress(RuntimeError):  # the store is out of reach
            self._store.set(f"came {self._rank}", str(self._count))
        own = torch.frombuffer(bytearray(mine), dtype=torch.uint8)
        table = [torch.empty_like(own) for _ in range(self._size)]
        began = time.monotonic()
        try:
            self.backend.allgather([table], [own]).wait()
        except RuntimeError as error:
            if time.monotonic() - began < self._at_once:  # Gloo says why
                raise
            raise RuntimeError(f"{error}; {self._missing()}") from error
        return [bytes(row.numpy()) for row in table]

    def _missing(self) -> str:
        found: list[int] = []

        def look_up() -> None:
            with contextlib.suppress(RuntimeError, ValueError):  # a store that ends gives b""
                for rank in range(self._size):
                    found.append(int(self._store.get(f"came {rank}")))

        # In a thread, as a store out of reach may never answer.
        task = threading.Thread(target=look_up, daemon=True)
        task.start()
        task.join(ANSWER)
        if len(found) < self._size:
            return "the group's store, which knows the ranks that came, does not answer"
        missing = [str(rank) for rank, count in enumerate(found) if count < self._count]
        if not missing:
            return "all ranks of the group came: the network between them may have failed"
        several = "s" if len(missing) > 1 else ""
        return f"missing in this call: rank{several} {', '.join(missing)} of the group"


# --- on one machine -------------------------------------------------------------------------------


class SocketChannel:
    """A channel of sockets, one to each other rank."""

    hosts: Sequence[str] = ()  #: the name of each rank's host

    def __init__(self, peers: dict[int, socket.socket], timeout: timedelta) -> None:
        """`peers`: by rank, without this one."""
        self.peers, self.seconds, self.broken = peers, timeout.total_seconds(), False
        for peer in peers.values():
            peer.settimeout(self.seconds)
            finalize(self, peer.close)  # when the group ends; a forked child's parent keeps its own

    def gather(self, mine: bytes) -> list[bytes]:
        """Return every rank's bytes, as `GlooChannel.gather`."""
        if self.broken:
            raise RuntimeError("an earlier exchange with the group's ranks was broken off")
        try:
            for peer in self.peers.values():
                # A rank that is gone is found below, after all others were sent to.
                with contextlib.suppress(OSError):
                    peer.sendall(mine)
            ranks = range(len(self.peers) + 1)
            return [self._received(r, len(mine)) if r in self.peers else mine for r in ranks]
        except BaseException:
            # Bytes still to come would be taken for the next call's.
            self.break_off()
            raise

    def _received(self, rank: int, size: int) -> bytes:
        found = b""
        try:
            while len(found) < size:
                more = self.peers[rank].recv(size - len(found))
                if not more:
                    raise ConnectionResetError("it closed the connection")
                found += more
        except TimeoutError as error:
            silent = f"rank {rank} of the group sent nothing for {self.seconds:g} s"
            raise RuntimeError(silent) from error
        except OSError as error:
            raise RuntimeError(f"rank {rank} of the group is gone: {error}") from error
        return found

    def break_off(self) -> None:
        """Make any later call an error, here and on other ranks, which still read what was sent.

        The sockets are not closed: closing one that has unread bytes discards the other side's
        as well, and ranks would name one another instead of the rank that failed first.
        """
        self.broken = True
        for peer in self.peers.values():
            with contextlib.suppress(OSError):
                peer.shutdown(socket.SHUT_WR)


Channel = GlooChannel | SocketChannel


def sockets(board: Board) -> SocketChannel:
    """A channel between ranks of one Linux machine.

    Addresses are abstract names, which need no file and end with the processes.
    """
    peers: dict[int, socket.socket] = {}
    with socket.socket(socket.AF_UNIX) as listener:
        listener.settimeout(board.timeout.total_seconds())
        name = f"megabatch-{uuid.uuid4()}"
        listener.bind(f"\0{name}")
        listener.listen(board.size)
        names = board.exchange("name", name)
        for rank in range(board.rank):
            peers[rank] = socket.socket(socket.AF_UNIX)
            peers[rank].connect(f"\0{names[rank]}")
            peers[rank].sendall(board.rank.to_bytes(8, "little"))
        for _ in range(board.rank + 1, board.size):
            peer, _ = listener.accept()
            peers[int.from_bytes(peer.recv(8, socket.MSG_WAITALL), "little")] = peer
    return SocketChannel(peers, board.timeout)
