"""The control channel of a group: its ranks' hosts exchange a few bytes before each transfer.

On one machine it is a socket to each other rank, read in the calling thread: 17 us, where Gloo's
all-gather, with threads of its own and TCP, takes 690 (2 processes on 2 cores; 100 and 3,750 us
with 4: benchmarks/handshake.py). Between machines it is Gloo. Either names the ranks that are gone
or do not come.
"""

from __future__ import annotations

import contextlib
import queue
import socket
import sys
import threading
import time
import uuid
from collections.abc import Iterable
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary, finalize

import torch
import torch.distributed as dist
from torch import Tensor

from megabatch import torch_internals
from megabatch.similarity.distributed.watchdog import Watch

_channels: WeakKeyDictionary[dist.ProcessGroup, Channel] = WeakKeyDictionary()
#: Groups without a channel of their own, and the larger group whose channel watches them.
_watched_with: WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup] = WeakKeyDictionary()


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


def watch_with(part: dist.ProcessGroup, whole: dist.ProcessGroup) -> None:
    """Let the channel of a group watch the transfers of a part of it, which has none."""
    _watched_with[part] = whole


def wait(work: dist.Work | None, group: dist.ProcessGroup, like: Tensor, what: str) -> None:
    """Wait for a collective of tensors like `like`: on the CPU here, on a GPU in its stream.

    Args:
        work: None: the stream waits already. what: its name in the watchdog's report.

    Raises:
        RuntimeError: it failed; between machines, on the CPU, a timeout names the missing ranks.
    """
    known = _channels.get(_watched_with.get(group, group))
    if work is not None and isinstance(known, GlooChannel) and not like.is_cuda:
        known.wait(work)
    elif work is not None:
        work.wait()
    if like.is_cuda and isinstance(known, SocketChannel):
        known.watch.track(what)


# --- between machines -----------------------------------------------------------------------------

#: Seconds after which a rank that waits says so, or an eighth of the group's timeout.
NOTICE = 1.0
#: Seconds that the store may take to answer.
ANSWER = 2.0


class GlooChannel:
    """A channel over the group's collectives on the CPU.

    Gloo's timeout names no rank: in a collective each rank waits for its neighbour, which may
    itself be waiting. A rank that has waited for a while therefore writes its number into the
    group's store. If its wait fails later, it looks up who else waits in the same call: the others
    did not come.
    """

    def __init__(
        self, backend: Any, store: dist.Store, rank: int, size: int, timeout: timedelta
    ) -> None:
        self.backend, self._rank, self._size = backend, rank, size
        self._store = dist.PrefixStore("megabatch waiting", store)
        self._notice = min(NOTICE, timeout.total_seconds() / 8)
        self._call = 0  #: the ranks' calls are numbered, as each begins with a `gather`

    def gather(self, mine: bytes) -> list[bytes]:
        """Return every rank's bytes, by rank; all send the same number. Waits for the other ranks.

        Raises:
            RuntimeError: a rank is gone, or sends nothing within the group's timeout.
        """
        own = torch.frombuffer(bytearray(mine), dtype=torch.uint8)
        table = [torch.empty_like(own) for _ in range(self._size)]
        self._call += 1
        self.wait(self.backend.allgather([table], [own]))
        return [bytes(row.numpy()) for row in table]

    def wait(self, work: dist.Work) -> None:
        """Wait for a collective of some ranks of the group.

        Raises:
            RuntimeError: it failed; if that took a while, with the ranks that do not wait.
        """
        try:
            work.wait(timedelta(seconds=self._notice))
            return
        except RuntimeError:
            if work.is_completed():  # by now, or it failed at once, and Gloo says why
                work.wait()
                return
        failed, waiting = queue.SimpleQueue[bool](), queue.SimpleQueue["set[int] | None"]()
        # In a thread, as a store out of reach may never answer.
        task = threading.Thread(target=self._say_so, args=(failed, waiting), daemon=True)
        task.start()
        try:
            work.wait()
        except RuntimeError as error:
            failed.put(True)
            raise RuntimeError(f"{error}; {self._missing(waiting)}") from error
        failed.put(False)

    def _say_so(
        self, failed: queue.SimpleQueue[bool], waiting: queue.SimpleQueue[set[int] | None]
    ) -> None:
        """Enter this rank in the list of those that wait; find the others if the wait fails."""
        key, found = f"waiting in call {self._call}", None
        # The store may be out of reach, or of a kind that cannot append.
        with contextlib.suppress(RuntimeError, AttributeError):
            store: Any = self._store.clone()  # a connection of its own
            store.append(key, f"{self._rank} ")
            if failed.get():
                time.sleep(2 * self._notice)  # ranks that began to wait last have not yet said so
                found = {int(rank) for rank in store.get(key).split()}
            else:
                store.delete_key(key)
        waiting.put(found)

    def _missing(self, waiting: queue.SimpleQueue[set[int] | None]) -> str:
        found = None
        with contextlib.suppress(queue.Empty):
            found = waiting.get(timeout=2 * self._notice + ANSWER)
        if found is None:
            return "the group's store, which knows the ranks that wait, does not answer"
        missing = [str(rank) for rank in range(self._size) if rank not in found]
        if not missing:
            return "all ranks of the group wait: the network between them may have failed"
        several = "s" if len(missing) > 1 else ""
        return f"missing in this call: rank{several} {', '.join(missing)} of the group"


# --- on one machine -------------------------------------------------------------------------------


class SocketChannel:
    """A channel of sockets, one to each other rank."""

    def __init__(self, peers: dict[int, socket.socket], timeout: timedelta) -> None:
        """`peers`: by rank, without this one."""
        self.peers = peers
        self.seconds = timeout.total_seconds()
        self.broken = False
        self.watch = Watch(peers)
        # When the group ends, not the program: one that leaves its group may have failed.
        finalize(self, self.watch.end).atexit = False
        for peer in peers.values():
            peer.settimeout(self.seconds)

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
            self.end()
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

    def end(self) -> None:
        """Make any later call an error, here and on other ranks, which still read what was sent.

        The sockets are not closed: closing one that has unread bytes discards those of the other
        side as well, and ranks would name one another instead of the rank that failed first.
        """
        self.broken = True
        for peer in self.peers.values():
            with contextlib.suppress(OSError):
                peer.shutdown(socket.SHUT_WR)


Channel = GlooChannel | SocketChannel


def sockets(store: dist.Store, rank: int, size: int, timeout: timedelta) -> SocketChannel | None:
    """A channel between ranks of one machine; None on every rank if one of them cannot be reached.

    Addresses are abstract names (Linux), which need no file and end with the processes.
    """
    if sys.platform != "linux":
        return None
    # A store may outlive a group and hold its ranks' keys, so each group's keys have a number.
    turn = (store.add("arrivals", 1) - 1) // size
    peers: dict[int, socket.socket] = {}

    def told(what: str, ranks: Iterable[int]) -> list[str]:
        keys = [f"{turn} {what} {other}" for other in ranks]
        store.wait(keys, timeout)
        return [store.get(key).decode() for key in keys]

    with socket.socket(socket.AF_UNIX) as listener:
        listener.settimeout(timeout.total_seconds())
        name = f"megabatch-{uuid.uuid4()}"
        listener.bind(f"\0{name}")
        listener.listen(size)
        store.set(f"{turn} name {rank}", name)
        names = told("name", range(rank))
        try:
            for other, its_name in enumerate(names):
                peers[other] = socket.socket(socket.AF_UNIX)
                peers[other].connect(f"\0{its_name}")
                peers[other].sendall(rank.to_bytes(8, "little"))
            reached = "yes"
        except OSError:
            reached = "no"
        store.set(f"{turn} reached {rank}", reached)
        if "no" in told("reached", range(size)):
            for peer in peers.values():
                peer.close()
            return None
        for _ in range(rank + 1, size):  # their connections are waiting already
            peer, _ = listener.accept()
            peers[int.from_bytes(peer.recv(8, socket.MSG_WAITALL), "little")] = peer
    return SocketChannel(peers, timeout)
