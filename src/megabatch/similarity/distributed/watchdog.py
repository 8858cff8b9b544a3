"""A watchdog that reports a transfer stuck on a lost rank, and can end the process.

NCCL waits on the GPU, where no Python code sees another rank die, and torch's own watchdog acts
only after the group's timeout. The system closes the sockets of a process that dies (`control`), so
this one notices it within seconds.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import sys
import threading
import time
from collections import deque

import torch

#: Seconds that a pending transfer gets to finish after a rank of its group was lost.
GRACE = 5.0
#: Number of recent transfers that are tracked.
REMEMBERED = 64
#: Last message of a rank that exits normally.
GOODBYE = b"megabatch: goodbye"

_abort = False


def set_abort_on_lost_rank(on: bool) -> bool:
    """Set whether a lost rank ends this process (default: no); returns the previous setting.

    Meant for programs that a launcher restarts, such as `megabatch train`. If a GPU waits for a
    rank on the same machine whose process died, this process exits with `os._exit(1)` after 5 s,
    without any cleanup. If off, the watchdog writes to standard error, once, which transfer waits
    for which rank, and leaves the rest to torch's watchdog, which acts when the group's timeout
    expires.
    """
    global _abort
    before, _abort = _abort, bool(on)
    return before


class Watch:
    """Tracks the transfers that this process's GPU waits for, and the liveness of their ranks."""

    def __init__(self, peers: dict[int, socket.socket]) -> None:
        """`peers`: a socket to each other rank."""
        self._peers = peers
        #: Recent transfers; each event is reached when its transfer has ended.
        self._waits: deque[tuple[str, torch.cuda.Event]] = deque()
        self._process = os.getpid()
        self._begun = self._done = False

    def track(self, what: str) -> None:
        """Record that the current CUDA stream waits for other ranks from here on, in `what`.

        Does nothing while a CUDA graph is captured: transfers of a replay cannot be tracked.
        """
        if torch.cuda.is_current_stream_capturing():
            return
        # An event of our own: holding a torch.distributed.Work would keep its tensors alive.
        full = len(self._waits) == REMEMBERED
        event = self._waits.popleft()[1] if full else torch.cuda.Event()
        event.record()
        self._waits.append((what, event))
        if not self._begun:
            self._begun = True
            threading.Thread(target=self._run, name="megabatch watch", daemon=True).start()

    def end(self) -> None:
        """Close the sockets. Unless an exception is being handled, say goodbye first."""
        self._done = True
        if os.getpid() != self._process:  # a forked child: the sockets belong to its parent
            return
        for peer in self._peers.values():
            with contextlib.suppress(OSError):
                if sys.exc_info()[0] is None:
                    peer.send(GOODBYE, socket.MSG_DONTWAIT)
                peer.shutdown(socket.SHUT_RDWR)
            peer.close()

    def _run(self) -> None:
        """Report, once, a transfer that is stuck after a rank was lost."""
        poll, ranks = select.poll(), {peer.fileno(): rank for rank, peer in self._peers.items()}
        for file in ranks.keys() - {-1}:  # -1: of a channel that has ended meanwhile
            poll.register(file, select.POLLRDHUP)
        while ranks and not self._done:
            for file, _ in poll.poll():
                rank = ranks.pop(file)
                poll.unregister(file)
                if not self._said_goodbye(rank) and (stuck := self._stuck()):
                    report(f"{stuck}: this GPU waits for rank {rank} of the group, which is gone")
                    return  # other ranks may be lost for the same reason

    def _said_goodbye(self, rank: int) -> bool:
        with contextlib.suppress(OSError):
            # Earlier messages may still be unread in front of it.
            unread = self._peers[rank].recv(1 << 16, socket.MSG_PEEK | socket.MSG_DONTWAIT)
            return unread.endswith(GOODBYE)
        return False

    def _stuck(self) -> str:
        """Wait for a transfer that does not end in time; "" if the group ends first.

        The host may still launch others meanwhile.
        """
        first, since = None, time.monotonic()
        while not self._done:
            now = next((wait for wait in tuple(self._waits) if not wait[1].query()), None)
            if now is None or now is not first:
                first, since = now, time.monotonic()
            elif time.monotonic() - since > GRACE:
                return now[0]
            time.sleep(GRACE / 20)
        return ""


def report(why: str) -> None:
    """Write the reason to standard error; exit if `set_abort_on_lost_rank` is on.

    Exiting is the only way out of a transfer that cannot end: the host may be waiting for the GPU
    anywhere, and results computed after an aborted transfer must not be used. If torch's watchdog
    is configured not to end the process, neither does this one.
    """
    stays = os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING") in ("0", "2")
    then = (
        "the process ends" if _abort else "torch's watchdog acts when the group's timeout is over"
    )
    if stays:
        then = "TORCH_NCCL_ASYNC_ERROR_HANDLING says that the process stays"
    os.write(2, f"megabatch: CommunicationError: {why}; {then}\n".encode())
    if _abort and not stays:
        os._exit(1)
