"""Tells of a GPU that waits for a rank that is gone, and ends the process if it was asked to.

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

_abort = False


def set_abort_on_lost_rank(on: bool) -> bool:
    """Whether a lost rank ends this process (not at the start); returns how it was before.

    It is for programs that a launcher starts again, as `megabatch train`: where a GPU waits for a
    rank of the same machine whose process died, this process then ends by `os._exit(1)` 5 s later,
    without any clean-up. Off, it says which transfer waits for which rank on standard error, once,
    and leaves the rest to torch's watchdog, which acts when the group's timeout is over.
    """
    global _abort
    before, _abort = _abort, bool(on)
    return before


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
                if not self._done and not self._took_leave(rank) and self._is_stuck(rank):
                    return  # it was told; the others may be gone for the same reason

    def _took_leave(self, rank: int) -> bool:
        peer = self._peers[rank]
        assert peer is not None
        with contextlib.suppress(OSError):
            # What it said before may not be read yet.
            return peer.recv(1 << 16, socket.MSG_PEEK | socket.MSG_DONTWAIT).endswith(FAREWELL)
        return False

    def _is_stuck(self, rank: int) -> bool:
        """Whether a transfer gets stuck, before the line is closed; another may be given out."""
        stuck, since = None, time.monotonic()
        while not self._done:
            now = self._first_wait()
            if now is None or now is not stuck:
                stuck, since = now, time.monotonic()
            elif time.monotonic() - since > GRACE:
                report(f"{now[0]}: this GPU waits for rank {rank} of the group, which is gone")
                return True
            time.sleep(GRACE / 20)
        return False

    def _first_wait(self) -> tuple[str, torch.cuda.Event] | None:
        for wait in tuple(self._waits):
            if not wait[1].query():
                return wait
        return None


def report(why: str) -> None:
    """Say why on standard error; end this process if `set_abort_on_lost_rank` asked for it.

    A transfer that cannot end leaves no other way: the host may wait for the GPU at any place, and
    what the GPU has after an aborted transfer must not be used. Where torch's watchdog is told not
    to end the process, this does not either.
    """
    stays = os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING") in ("0", "2")
    ends = _abort and not stays
    then = "the process ends" if ends else "torch's watchdog acts when the group's timeout is over"
    if stays:
        then = "TORCH_NCCL_ASYNC_ERROR_HANDLING says that the process stays"
    os.write(2, f"megabatch: CommunicationError: {why}; {then}\n".encode())
    if ends:
        os._exit(1)
