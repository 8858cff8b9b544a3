"""How the hosts of a group's ranks tell each other a few bytes: often, and before each transfer.

On one machine by sockets, straight from thread to thread: 17 us where Gloo's all-gather, which goes
through threads of its own and TCP, takes 690 (2 processes on 2 cores; 100 and 3,750 with 4:
benchmarks/handshake.py). Elsewhere by Gloo.
"""

from __future__ import annotations

import contextlib
import socket
import sys
import uuid
from datetime import timedelta
from typing import Any, Protocol
from weakref import WeakKeyDictionary, finalize

import torch
import torch.distributed as dist
from torch import Tensor

from megabatch import torch_internals
from megabatch.similarity.distributed.watchdog import Watch

_lines: WeakKeyDictionary[dist.ProcessGroup, Line] = WeakKeyDictionary()


class Line(Protocol):
    """What connects the hosts of a group."""

    def gather(self, mine: bytes) -> list[bytes]:
        """Every rank's bytes, by rank; all come with as many. It waits for the other ranks.

        Raises:
            RuntimeError: a rank is gone or does not come in the group's time.
        """
        ...


def line(group: dist.ProcessGroup, device: torch.device) -> Line:
    """The group's, made when it is first asked for; `device`: where its tensors are.

    It is no device's: what it gathers need not wait for what a GPU has queued.
    """
    if group not in _lines:
        on_cpu = torch_internals.has_cpu_backend(group)
        own = torch_internals.group_backend(group, torch.device("cpu")) if on_cpu else None
        backend = torch_internals.group_backend(group, device) if own is None else own
        store = torch_internals.group_store(group)
        place = group.rank(), group.size(), torch_internals.backend_timeout(backend)
        made: Line | None = sockets(dist.PrefixStore("megabatch hosts", store), *place)
        if made is None:
            # It bypasses `new_group`, whose counter of groups must be the same on all ranks of the
            # world, members or not.
            own = own or dist.ProcessGroupGloo(dist.PrefixStore("megabatch", store), *place)
            made = GlooLine(own, group.size())
        _lines[group] = made
    return _lines[group]


def note(group: dist.ProcessGroup, like: Tensor, what: str) -> None:
    """If `like` is on a GPU: its stream waits for other ranks of the group now, in `what`."""
    if like.is_cuda and isinstance(known := _lines.get(group), SocketLine):
        known.watch.note(what)


class GlooLine:
    """By a group's collectives on the CPU."""

    def __init__(self, backend: Any, size: int) -> None:
        self.backend, self.size = backend, size

    def gather(self, mine: bytes) -> list[bytes]:
        """See `Line`."""
        own = torch.frombuffer(bytearray(mine), dtype=torch.uint8)
        table = [torch.empty_like(own) for _ in range(self.size)]
        self.backend.allgather([table], [own]).wait()
        return [bytes(row.numpy()) for row in table]


class SocketLine:
    """By a socket to each other rank; None in this rank's own place."""

    def __init__(self, peers: list[socket.socket | None], timeout: timedelta) -> None:
        self.peers = peers
        self.seconds = timeout.total_seconds()
        self.broken = False
        self.watch = Watch(peers)
        # With the group, not with the program: one that leaves its group behind may have failed.
        finalize(self, self.watch.end).atexit = False
        for peer in filter(None, peers):
            peer.settimeout(self.seconds)

    def gather(self, mine: bytes) -> list[bytes]:
        """See `Line`."""
        if self.broken:
            raise RuntimeError("an earlier exchange with the group's ranks was broken off")
        try:
            for peer in filter(None, self.peers):
                # One that is gone is found below, when all the others have been told.
                with contextlib.suppress(OSError):
                    peer.sendall(mine)
            return [
                mine if peer is None else self._received(rank, peer, len(mine))
                for rank, peer in enumerate(self.peers)
            ]
        except BaseException:
            # What is still to come would be taken for the next call's.
            self.end()
            raise

    def _received(self, rank: int, peer: socket.socket, size: int) -> bytes:
        found = b""
        with _failures_of(rank, self.seconds):
            while len(found) < size:
                more = peer.recv(size - len(found))
                if not more:
                    raise ConnectionResetError("it closed the connection")
                found += more
        return found

    def end(self) -> None:
        """Any later call is an error, here and on the other ranks, who read what was said so far.

        (Closed, a socket with something unread takes that from the other side as well, and ranks
        would name one another instead of the one that went first.)
        """
        self.broken = True
        for peer in filter(None, self.peers):
            with contextlib.suppress(OSError):
                peer.shutdown(socket.SHUT_WR)


def sockets(store: dist.Store, rank: int, size: int, timeout: timedelta) -> SocketLine | None:
    """Between the ranks of one machine; on every rank None where one of them cannot be reached.

    Addresses are names without a file, which end with the processes (Linux has them).
    """
    if sys.platform != "linux":
        return None
    # A store may outlive a group and hold what its ranks said: keys are of this group's turn.
    turn = (store.add("arrivals", 1) - 1) // size
    peers: list[socket.socket | None] = [None] * size

    def told(what: str, other: int) -> str:
        key = f"{turn} {what} {other}"
        store.wait([key], timeout)
        return store.get(key).decode()

    with socket.socket(socket.AF_UNIX) as listener:
        listener.settimeout(timeout.total_seconds())
        name = f"megabatch-{uuid.uuid4()}"
        listener.bind(f"\0{name}")
        listener.listen(size)
        store.set(f"{turn} name {rank}", name)
        names = [told("name", other) for other in range(rank)]
        try:
            for other, its_name in enumerate(names):
                peers[other] = _connected(its_name, rank)
            reached = "yes"
        except OSError:
            reached = "no"
        store.set(f"{turn} reached {rank}", reached)
        if any(told("reached", other) != "yes" for other in range(size)):
            for peer in filter(None, peers):
                peer.close()
            return None
        for _ in range(rank + 1, size):  # these are waiting already
            peer, _ = listener.accept()
            peers[int.from_bytes(peer.recv(8, socket.MSG_WAITALL), "little")] = peer
    return SocketLine(peers, timeout)


def _connected(name: str, rank: int) -> socket.socket:
    peer = socket.socket(socket.AF_UNIX)
    peer.connect(f"\0{name}")
    peer.sendall(rank.to_bytes(8, "little"))
    return peer


@contextlib.contextmanager
def _failures_of(rank: int, seconds: float) -> Any:
    try:
        yield
    except TimeoutError as error:
        raise RuntimeError(f"rank {rank} of the group said nothing for {seconds:g} s") from error
    except OSError as error:
        raise RuntimeError(f"rank {rank} of the group is gone: {error}") from error
