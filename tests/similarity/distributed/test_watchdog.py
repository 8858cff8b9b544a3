"""What becomes of a transfer whose rank is gone; a GPU's events are made up."""

from __future__ import annotations

import gc
import os
import socket
import threading
import time
from collections.abc import Iterator
from datetime import timedelta

import pytest
import torch

from megabatch.similarity.distributed import watchdog
from megabatch.similarity.distributed.control import SocketChannel
from megabatch.similarity.distributed.watchdog import FAREWELL, REMEMBERED
from tests import programs

GRACE = 0.1


class Event:
    """As torch.cuda.Event; what comes to its end does so for all."""

    finished = False

    def record(self) -> None:
        pass

    def query(self) -> bool:
        return Event.finished


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Filled with what would be reported."""
    why: list[str] = []
    monkeypatch.setattr(watchdog, "GRACE", GRACE)
    monkeypatch.setattr(watchdog, "report", why.append)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(Event, "finished", False)
    before = set(threading.enumerate())
    yield why
    gc.collect()
    until = time.monotonic() + 20
    while set(threading.enumerate()) - before and time.monotonic() < until:
        time.sleep(0.01)
    assert not set(threading.enumerate()) - before  # a watch ends with its line


def pair() -> tuple[SocketChannel, socket.socket]:
    """Rank 0's line to rank 1, and rank 1's end of it."""
    mine, theirs = socket.socketpair()
    return SocketChannel([None, mine], timedelta(seconds=5)), theirs


def wait_for(told: list[str]) -> list[str]:
    until = time.monotonic() + 20
    while not told and time.monotonic() < until:
        time.sleep(0.01)
    return told


def stays(told: list[str]) -> bool:
    time.sleep(5 * GRACE)
    return not told


def test_a_transfer_that_waits_for_a_rank_that_is_gone(told: list[str]) -> None:
    line, theirs = pair()
    line.watch.note("logsumexp: gathering, rank 0")
    line.watch.note("logsumexp: later, rank 0")
    assert stays(told)  # while it is there
    theirs.close()
    expected = "logsumexp: gathering, rank 0: this GPU waits for rank 1 of the group, which is gone"
    assert wait_for(told) == [expected]


def test_a_transfer_that_is_given_out_after_a_rank_went(told: list[str]) -> None:
    line, theirs = pair()
    Event.finished = True
    line.watch.note("one")
    theirs.close()
    assert stays(told)  # what is over needs nobody
    Event.finished = False
    line.watch.note("two")
    assert wait_for(told)


def test_a_rank_that_takes_its_leave(told: list[str]) -> None:
    line, theirs = pair()
    line.watch.note("one")
    theirs.sendall(b"the last call's words" + FAREWELL)
    theirs.close()
    assert stays(told)


def test_a_line_takes_its_leave_with_its_group(told: list[str]) -> None:
    line, theirs = pair()
    line.watch.note("one")
    del line
    gc.collect()
    assert theirs.recv(100) == FAREWELL
    assert theirs.recv(100) == b""
    assert stays(told)


def test_no_farewell_where_an_error_is_on_its_way(told: list[str]) -> None:
    line, theirs = pair()
    try:
        raise KeyError
    except KeyError:
        line.watch.end()
    assert theirs.recv(100) == b""


def test_a_copy_of_the_process_leaves_the_line_alone(told: list[str]) -> None:
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


def test_not_of_a_graph_that_is_captured(told: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    line, theirs = pair()
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    line.watch.note("one")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    theirs.close()
    assert stays(told)


def test_the_latest_are_remembered(told: list[str]) -> None:
    line, theirs = pair()
    for number in range(REMEMBERED + 3):
        line.watch.note(str(number))
    theirs.close()
    assert wait_for(told)[0].startswith("3: ")


def test_one_report_however_many_ranks_are_gone(told: list[str]) -> None:
    pairs = [socket.socketpair() for _ in range(2)]
    line = SocketChannel([None, *(mine for mine, _ in pairs)], timedelta(seconds=5))
    line.watch.note("one")
    for _, theirs in pairs:
        theirs.close()
    assert wait_for(told)
    assert stays(told[1:])


def run(program: str, **environ: str) -> tuple[int, str]:
    """Exit code and words of a process of its own."""
    words = ["-c", f"from megabatch.similarity.distributed import watchdog\n{program}"]
    done = programs.run(words, os.environ | environ)
    assert "Traceback" not in done.stderr, done.stderr
    words = [line for line in done.stderr.splitlines() if line.startswith("megabatch")]
    return done.returncode, "".join(words).removeprefix("megabatch: CommunicationError: ")


def test_the_process_is_left_alone_unless_it_was_asked_to_end() -> None:
    later = "torch's watchdog acts when the group's timeout is over"
    assert run("watchdog.report('why')\nexit(7)") == (7, f"why; {later}")
    switched = "assert watchdog.set_abort_on_lost_rank(True) is False\n"
    assert run(f"{switched}watchdog.report('why')\nexit(7)") == (1, "why; the process ends")
    back = f"{switched}assert watchdog.set_abort_on_lost_rank(False)\n"
    assert run(f"{back}watchdog.report('why')\nexit(7)") == (7, f"why; {later}")


@pytest.mark.parametrize("how", ["0", "2"])
def test_the_process_stays_where_torch_s_watchdog_is_told_so(how: str) -> None:
    program = "watchdog.set_abort_on_lost_rank(True)\nwatchdog.report('why')\nexit(7)"
    code, words = run(program, TORCH_NCCL_ASYNC_ERROR_HANDLING=how)
    assert code == 7
    assert words == "why; TORCH_NCCL_ASYNC_ERROR_HANDLING says that the process stays"
    assert run(program, TORCH_NCCL_ASYNC_ERROR_HANDLING="3")[0] == 1
