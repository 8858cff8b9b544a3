"""What becomes of a transfer whose rank is gone; a GPU's events are made up."""

from __future__ import annotations

import gc
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from datetime import timedelta

import pytest
import torch

from megabatch.similarity import watch
from megabatch.similarity.hosts import SocketLine
from megabatch.similarity.watch import FAREWELL, REMEMBERED

GRACE = 0.1


class Event:
    """As torch.cuda.Event; what comes to its end does so for all."""

    finished = False

    def record(self) -> None:
        pass

    def query(self) -> bool:
        return Event.finished


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Filled with why the process would have ended."""
    why: list[str] = []
    monkeypatch.setattr(watch, "GRACE", GRACE)
    monkeypatch.setattr(watch, "end_process", why.append)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(Event, "finished", False)
    before = threading.active_count()
    yield why
    gc.collect()
    until = time.monotonic() + 5
    while threading.active_count() > before and time.monotonic() < until:
        time.sleep(0.01)
    assert threading.active_count() == before  # a watch ends with its line


def pair() -> tuple[SocketLine, socket.socket]:
    """Rank 0's line to rank 1, and rank 1's end of it."""
    mine, theirs = socket.socketpair()
    return SocketLine([None, mine], timedelta(seconds=5)), theirs


def wait_for(ended: list[str]) -> list[str]:
    until = time.monotonic() + 20
    while not ended and time.monotonic() < until:
        time.sleep(0.01)
    return ended


def stays(ended: list[str]) -> bool:
    time.sleep(5 * GRACE)
    return not ended


def test_a_transfer_that_waits_for_a_rank_that_is_gone(ended: list[str]) -> None:
    line, theirs = pair()
    line.watch.note("logsumexp: gathering, rank 0")
    line.watch.note("logsumexp: later, rank 0")
    assert stays(ended)  # while it is there
    theirs.close()
    expected = "logsumexp: gathering, rank 0: this GPU waits for rank 1 of the group, which is gone"
    assert wait_for(ended) == [expected]


def test_a_transfer_that_is_given_out_after_a_rank_went(ended: list[str]) -> None:
    line, theirs = pair()
    Event.finished = True
    line.watch.note("one")
    theirs.close()
    assert stays(ended)  # what is over needs nobody
    Event.finished = False
    line.watch.note("two")
    assert wait_for(ended)


def test_a_rank_that_takes_its_leave(ended: list[str]) -> None:
    line, theirs = pair()
    line.watch.note("one")
    theirs.sendall(b"the last call's words" + FAREWELL)
    theirs.close()
    assert stays(ended)


def test_a_line_takes_its_leave_with_its_group(ended: list[str]) -> None:
    line, theirs = pair()
    line.watch.note("one")
    del line
    gc.collect()
    assert theirs.recv(100) == FAREWELL
    assert theirs.recv(100) == b""
    assert stays(ended)


def test_no_farewell_where_an_error_is_on_its_way(ended: list[str]) -> None:
    line, theirs = pair()
    try:
        raise KeyError
    except KeyError:
        line.watch.end()
    assert theirs.recv(100) == b""


def test_a_copy_of_the_process_leaves_the_line_alone(ended: list[str]) -> None:
    line, theirs = pair()
    if (child := os.fork()) == 0:
        line.watch.end()
        os._exit(0)
    os.waitpid(child, 0)
    theirs.sendall(b"words")
    peer = line.peers[1]
    assert peer is not None
    assert peer.recv(100) == b"words"
    peer.sendall(b"answer")
    assert theirs.recv(100) == b"answer"


def test_not_of_a_graph_that_is_captured(ended: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    line, theirs = pair()
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    line.watch.note("one")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    theirs.close()
    assert stays(ended)


def test_the_latest_are_remembered(ended: list[str]) -> None:
    line, theirs = pair()
    for number in range(REMEMBERED + 3):
        line.watch.note(str(number))
    theirs.close()
    assert wait_for(ended)[0].startswith("3: ")


def test_the_process_ends_as_by_torch_s_watchdog() -> None:
    program = """
import os
from megabatch.similarity.watch import end_process
for how in ("0", "2", "3"):
    os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = how
    end_process(how)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    words = [line for line in done.stderr.splitlines() if line.startswith("megabatch")]
    why = [line.removeprefix("megabatch: CommunicationError: ") for line in words]
    assert why == ["0", "2", "3; the process ends"]
    assert done.returncode == 1
