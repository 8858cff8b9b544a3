"""Ends a process whose GPU waits for a rank that is gone.

NCCL waits on the GPU, where no Python code sees another rank die. torch's watchdog notices when the
group's timeout is over, names a collective of its own, and ends the process a minute later (torch
2.11: `TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC`, four times). Ranks of one machine have sockets between
their hosts (`hosts`), which the system closes with the process that dies: so here it takes seconds.
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
from collections.abc import Sequence

import torch

#: Seconds that a transfer may still take when a rank of its group is gone.
GRACE = 5.0
#: Transfers that are remembered, the latest.
REMEMBERED = 64
#: The last that a rank says which ends in order.
FAREWELL = b"megabatch: farewell"


class Watch:
    """What this process's GPU waits for, and whether the ranks of a group are still there."""

    def __init__(self, peers: Sequence[socket.socket | None]) -> None:
        """`peers`: a socket to each other rank, None in this rank's own place."""
        self._peers = list(peers)
        self._waits: deque[tuple[str, torch.cuda.Event]] = deque()
        self._process = os.getpid()
        self._begun = self._done = False

    def note(self, what: str) -> None:
        """The current stream of the GPU waits for other ranks from here on, in `what`.

        Not of a CUDA graph that is captured: what it waits for later is not seen.
        """
        if torch.cuda.is_current_stream_capturing():
            return
        # One of its own: the latest of a torch.distributed.Work would keep its tensors alive.
        full = len(self._waits) == REMEMBERED
        event = self._waits.popleft()[1] if full else torch.cuda.Event()
        event.record()
        self._waits.append((what, event))
        if not self._begun:
            self._begun = True
            threading.Thread(target=self._run, name="megabatch watch", daemon=True).start()

    def end(self) -> None:
        """Take leave of the other ranks and close the sockets; no word where an error is on."""
        self._done = True
        if os.getpid() != self._process:  # a copy, whose sockets are its parent's
            return
        for peer in filter(None, self._peers):
            with contextlib.suppress(OSError):
                if sys.exc_info()[0] is None:
                    peer.send(FAREWELL, socket.MSG_DONTWAIT)
                peer.shutdown(socket.SHUT_RDWR)
            peer.close()

    def _run(self) -> None:
        """Wait until a rank is gone; then see whether a transfer is stuck."""
        poll = select.poll()
        ranks = {}
        with contextlib.suppress(OSError, ValueError):  # the line is closed, and with it its files
            for rank, peer in enumerate(self._peers):
                if peer is not None:
                    ranks[peer.fileno()] = rank
                    poll.register(peer, select.POLLRDHUP)
        while ranks and not self._done:
            for file, _ in poll.poll():
                rank = ranks.pop(file)
                poll.unregister(file)
                if not self._done and not self._took_leave(rank):
                    self._see_whether_stuck(rank)

    def _took_leave(self, rank: int) -> bool:
        peer = self._peers[rank]
        assert peer is not None
        with contextlib.suppress(OSError):
            # What it said before may not be read yet.
            return peer.recv(1 << 16, socket.MSG_PEEK | socket.MSG_DONTWAIT).endswith(FAREWELL)
        return False

    def _see_whether_stuck(self, rank: int) -> None:
        """Until the line is closed: another transfer may be given out, and get stuck."""
        stuck, since = None, time.monotonic()
        while not self._done:
            now = self._first_wait()
            if now is None or now is not stuck:
                stuck, since = now, time.monotonic()
            elif time.monotonic() - since > GRACE:
                end_process(f"{now[0]}: this GPU waits for rank {rank} of the group, which is gone")
                return
            time.sleep(GRACE / 20)

    def _first_wait(self) -> tuple[str, torch.cuda.Event] | None:
        for wait in tuple(self._waits):
            if not wait[1].query():
                return wait
        return None


def end_process(why: str) -> None:
    """Say so and end this process, as torch's watchdog does; or say so, where that is told not to.

    A transfer that cannot end leaves no other way: the host may wait for the GPU at any place, and
    what the GPU has after an aborted transfer must not be used.
    """
    stays = os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING") in ("0", "2")
    end = "" if stays else "; the process ends"
    os.write(2, f"megabatch: CommunicationError: {why}{end}\n".encode())
    if not stays:
        os._exit(1)
