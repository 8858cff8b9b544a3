"""The control channel of a group: its ranks' hosts exchange a few bytes before each transfer.

On one machine it is a socket to each other rank, read in the calling thread: 17 us, where Gloo's
all-gather, with threads of its own and TCP, takes 690 (2 processes on 2 cores; 100 and 3,750 us
with 4: benchmarks/handshake.py). Between machines it is Gloo.
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
from megabatch.similarity.distributed.waiting import WaitingRanks
from megabatch.similarity.distributed.watchdog import Watch

_channels: WeakKeyDictionary[dist.ProcessGroup, Channel] = WeakKeyDictionary()
#: The group whose channel watches the transfers of another one, of some of its ranks.
_watched_with: WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup] = WeakKeyDictionary()


class Channel(Protocol):
    """A control channel."""

    def gather(self, mine: bytes) -> list[bytes]:
        """Return every rank's bytes, by rank; all send the same number. Waits for the other ranks.

        Raises:
            RuntimeError: a rank is gone, or sends nothing within the group's timeout.
        """
        ...


def has_cpu_backend(group: dist.ProcessGroup) -> bool:
    """Whether a group takes tensors on the CPU."""
    return "cpu:" in dist.get_backend_config(group)


def channel(group: dist.ProcessGroup, device: torch.device) -> Channel:
    """The group's channel, made on first use. `device`: of the group's tensors.

    The channel itself uses no device, so an exchange need not wait for work queued on a GPU.
    """
    if group not in _channels:
        on_cpu = has_cpu_backend(group)
        own = torch_internals.group_backend(group, torch.device("cpu")) if on_cpu else None
        backend = torch_internals.group_backend(group, device) if own is None else own
        store = torch_internals.group_store(group)
        place = group.rank(), group.size(), torch_internals.backend_timeout(backend)
        made: Channel | None = sockets(dist.PrefixStore("megabatch hosts", store), *place)
        if made is None:
            # Not by `new_group`, which all ranks of the world must call, members or not.
            own = own or dist.ProcessGroupGloo(dist.PrefixStore("megabatch", store), *place)
            made = GlooChannel(own, store, *place)
        _channels[group] = made
    return _channels[group]


def track(group: dist.ProcessGroup, like: Tensor, what: str) -> None:
    """Tell the watchdog that the stream of `like`, if on a GPU, waits for other ranks in `what`."""
    known = _channels.get(_watched_with.get(group, group))
    if like.is_cuda and isinstance(known, SocketChannel):
        known.watch.track(what)


def wait(work: dist.Work, group: dist.ProcessGroup, like: Tensor) -> None:
    """Wait for a collective of tensors like `like`: on the CPU here, on a GPU in its stream.

    Raises:
        RuntimeError: it failed; between machines, on the CPU, a timeout names the missing ranks.
    """
    known = _channels.get(_watched_with.get(group, group))
    if isinstance(known, GlooChannel) and not like.is_cuda:
        known.waiting.wait(work)
    else:
        work.wait()


def watch_with(part: dist.ProcessGroup, whole: dist.ProcessGroup) -> None:
    """Let the channel of a group watch the transfers of a part of it, which has none."""
    _watched_with[part] = whole


class GlooChannel:
    """A channel over the group's collectives on the CPU."""

    def __init__(
        self, backend: Any, store: dist.Store, rank: int, size: int, timeout: timedelta
    ) -> None:
        self.backend, self.size = backend, size
        own_store = dist.PrefixStore("megabatch waiting", store)
        self.waiting = WaitingRanks(own_store, rank, size, timeout)

    def gather(self, mine: bytes) -> list[bytes]:
        """See `Channel`."""
        own = torch.frombuffer(bytearray(mine), dtype=torch.uint8)
        table = [torch.empty_like(own) for _ in range(self.size)]
        self.waiting.next_call()
        self.waiting.wait(self.backend.allgather([table], [own]))
        return [bytes(row.numpy()) for row in table]


class SocketChannel:
    """A channel of sockets, one to each other rank; None in this rank's own place."""

    def __init__(self, peers: list[socket.socket | None], timeout: timedelta) -> None:
        self.peers = peers
        self.seconds = timeout.total_seconds()
        self.broken = False
        self.watch = Watch(peers)
        # When the group ends, not the program: one that leaves its group may have failed.
        finalize(self, self.watch.end).atexit = False
        for peer in filter(None, peers):
            peer.settimeout(self.seconds)

    def gather(self, mine: bytes) -> list[bytes]:
        """See `Channel`."""
        if self.broken:
            raise RuntimeError("an earlier exchange with the group's ranks was broken off")
        try:
            for peer in filter(None, self.peers):
                # A rank that is gone is found below, after all others were sent to.
                with contextlib.suppress(OSError):
                    peer.sendall(mine)
            return [
                mine if peer is None else self._received(rank, peer, len(mine))
                for rank, peer in enumerate(self.peers)
            ]
        except BaseException:
            # Bytes still to come would be taken for the next call's.
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
        """Make any later call an error, here and on other ranks, which still read what was sent.

        The sockets are not closed: closing one that has unread bytes discards those of the other
        side as well, and ranks would name one another instead of the rank that failed first.
        """
        self.broken = True
        for peer in filter(None, self.peers):
            with contextlib.suppress(OSError):
                peer.shutdown(socket.SHUT_WR)


def sockets(store: dist.Store, rank: int, size: int, timeout: timedelta) -> SocketChannel | None:
    """A channel between ranks of one machine; None on every rank if one of them cannot be reached.

    Addresses are abstract names (Linux), which need no file and end with the processes.
    """
    if sys.platform != "linux":
        return None
    # A store may outlive a group and hold its ranks' keys, so each group's keys have a number.
    turn = (store.add("arrivals", 1) - 1) // size
    peers: list[socket.socket | None] = [None] * size

    def value_of(what: str, other: int) -> str:
        key = f"{turn} {what} {other}"
        store.wait([key], timeout)
        return store.get(key).decode()

    with socket.socket(socket.AF_UNIX) as listener:
        listener.settimeout(timeout.total_seconds())
        name = f"megabatch-{uuid.uuid4()}"
        listener.bind(f"\0{name}")
        listener.listen(size)
        store.set(f"{turn} name {rank}", name)
        names = [value_of("name", other) for other in range(rank)]
        try:
            for other, its_name in enumerate(names):
                peers[other] = _connected(its_name, rank)
            reached = "yes"
        except OSError:
            reached = "no"
        store.set(f"{turn} reached {rank}", reached)
        if any(value_of("reached", other) != "yes" for other in range(size)):
            for peer in filter(None, peers):
                peer.close()
            return None
        for _ in range(rank + 1, size):  # their connections are waiting already
            peer, _ = listener.accept()
            peers[int.from_bytes(peer.recv(8, socket.MSG_WAITALL), "little")] = peer
    return SocketChannel(peers, timeout)


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
        raise RuntimeError(f"rank {rank} of the group sent nothing for {seconds:g} s") from error
    except OSError as error:
        raise RuntimeError(f"rank {rank} of the group is gone: {error}") from error
