"""The watchdog reports transfers from a lost rank; a GPU's events are simulated."""

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
from megabatch.similarity.distributed.watchdog import GOODBYE, REMEMBERED
from tests import programs

GRACE = 0.1


class Event:
    """A stand-in for torch.cuda.Event; all events finish together."""

    finished = False

    def record(self) -> None:
        pass

    def query(self) -> bool:
        return Event.finished


@pytest.fixture
def reports(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """A list that receives the reports."""
    found: list[str] = []
    monkeypatch.setattr(watchdog, "GRACE", GRACE)
    monkeypatch.setattr(watchdog, "report", found.append)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(Event, "finished", False)
    before = set(threading.enumerate())
    yield found
    gc.collect()
    until = time.monotonic() + 20
    while set(threading.enumerate()) - before and time.monotonic() < until:
        time.sleep(0.01)
    assert not set(threading.enumerate()) - before  # a watchdog ends with its channel


def pair() -> tuple[SocketChannel, socket.socket]:
    """Rank 0's channel to rank 1, and rank 1's socket."""
    mine, theirs = socket.socketpair()
    return SocketChannel({1: mine}, timedelta(seconds=5)), theirs


def told(reports: list[str]) -> list[str]:
    """The reports, of which one is expected."""
    until = time.monotonic() + 20
    while not reports and time.monotonic() < until:
        time.sleep(0.01)
    return reports


def stay(reports: list[str], number: int = 0) -> bool:
    """Whether there are still so many reports after a while."""
    time.sleep(5 * GRACE)
    return len(reports) == number


def test_a_transfer_that_waits_for_a_rank_that_is_gone(reports: list[str]) -> None:
    """One report, of the first of the latest transfers, though several ranks are lost."""
    pairs = [socket.socketpair() for _ in range(2)]
    peers = {rank: mine for rank, (mine, _) in enumerate(pairs, start=1)}
    channel = SocketChannel(peers, timedelta(seconds=5))
    for number in range(REMEMBERED + 3):
        channel.watch.track(f"transfer {number}")
    assert stay(reports)  # while the others are alive
    for _, theirs in pairs:
        theirs.close()
    (report,) = told(reports)
    assert report.startswith("transfer 3: this GPU waits for rank ")
    assert report.endswith(" of the group, which is gone")
    assert stay(reports, 1)


def test_a_transfer_launched_after_a_rank_is_lost(reports: list[str]) -> None:
    channel, theirs = pair()
    Event.finished = True
    channel.watch.track("one")
    theirs.close()
    assert stay(reports)  # a finished transfer needs no other rank
    Event.finished = False
    channel.watch.track("two")
    assert told(reports)


def test_a_rank_that_says_goodbye(reports: list[str]) -> None:
    """Or this one does, when its group ends; a captured transfer is not watched."""
    channel, theirs = pair()
    channel.watch.track("one")
    theirs.sendall(b"the last call's words" + GOODBYE)
    theirs.close()
    ending, left = pair()
    ending.watch.track("one")
    del ending
    gc.collect()
    assert left.recv(100) == GOODBYE
    assert left.recv(100) == b""
    capturing, gone = pair()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        capturing.watch.track("one")
    gone.close()
    assert stay(reports)


def test_no_goodbye_while_an_error_propagates(reports: list[str]) -> None:
    channel, theirs = pair()
    try:
        raise KeyError
    except KeyError:
        channel.watch.end()
    assert theirs.recv(100) == b""


def test_a_forked_process_leaves_the_channel_open(reports: list[str]) -> None:
    channel, theirs = pair()
    if (child := os.fork()) == 0:
        channel.watch.end()
        os._exit(0)
    os.waitpid(child, 0)
    theirs.sendall(b"words")
    assert channel.peers[1].recv(100) == b"words"


def run(program: str, **environ: str) -> tuple[int, str]:
    """Run a program in a process of its own; return its exit code and megabatch's message."""
    words = ["-c", f"from megabatch.similarity.distributed import watchdog\n{program}"]
    done = programs.run(words, os.environ | environ)
    assert "Traceback" not in done.stderr, done.stderr
    words = [channel for channel in done.stderr.splitlines() if channel.startswith("megabatch")]
    return done.returncode, "".join(words).removeprefix("megabatch: CommunicationError: ")


def test_whether_the_process_ends() -> None:
    """It goes on unless it was asked to end, and where torch's own watchdog lets it."""
    later = "torch's watchdog acts when the group's timeout is over"
    stays = "TORCH_NCCL_ASYNC_ERROR_HANDLING says that the process stays"
    on = "assert watchdog.set_abort_on_lost_rank(True) is False\n"
    off = "assert watchdog.set_abort_on_lost_rank(False)\n"
    for switches, handling, code, then in (
        ("", "3", 7, later),
        (on, "3", 1, "the process ends"),
        (on + off, "3", 7, later),
        (on, "0", 7, stays),
        (on, "2", 7, stays),
    ):
        program = f"{switches}watchdog.report('why')\nexit(7)"
        found = run(program, TORCH_NCCL_ASYNC_ERROR_HANDLING=handling)
        assert found == (code, f"why; {then}")
