"""If a process dies or raises during a call, the others soon raise an error that says where."""

from __future__ import annotations

import os
import signal
import threading
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megabatch import similarity
from megabatch.errors import CommunicationError
from megabatch.similarity.eager_softmax import SoftmaxTiles
from tests.similarity.distributed.processes import join, start

#: the group's timeout in seconds; a process that died is noticed at once
TIMEOUTS = {"killed": 20, "raised and stays": 3}


class Clock(threading.Thread):
    """Counts the seconds of this process: they are longer if other processes use its core."""

    TICK = 0.01

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.seconds = 0.0
        self.start()

    def run(self) -> None:
        while True:
            time.sleep(self.TICK)
            self.seconds += self.TICK


def group_of(rank: int, size: int, port: int, seconds: float) -> dist.ProcessGroup:
    """A group of all processes with this timeout, once all have started."""
    join(rank, size, port)
    dist.barrier()
    group = dist.new_group(timeout=timedelta(seconds=seconds))
    assert isinstance(group, dist.ProcessGroup)
    return group


def fail(how: str) -> None:
    if how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    raise KeyError("an error of its own")


def worker(rank: int, size: int, port: int, folder: Path, how: str, where: str) -> None:
    """Rank 1 fails in its computation; the others write their error and its time."""
    group = group_of(rank, size, port, TIMEOUTS[how])
    x, y = (torch.randn(4, 3, requires_grad=True) for _ in range(2))
    similarity.logsumexp(x, y, group=group)[0].sum().backward()  # opens all connections
    dist.barrier()
    holder, name = (
        (SoftmaxTiles, "forward") if where == "forward" else (SoftmaxTiles, "gradient_block")
    )
    original = getattr(holder, name)

    def failing(self, *arguments):  # type: ignore[no-untyped-def]
        if rank == 1:
            fail(how)
        return original(self, *arguments)

    setattr(holder, name, failing)
    clock = Clock()
    try:
        similarity.logsumexp(x, y, group=group)[0].sum().backward()
    except CommunicationError as error:
        cause = type(error.__cause__).__name__
        (folder / str(rank)).write_text(f"{clock.seconds}\n{cause}\n{error}")
    except KeyError:
        if how == "raised and stays":  # keeps its connections open until the others are done
            until = time.monotonic() + 60
            while len(list(folder.iterdir())) < size - 1 and time.monotonic() < until:
                time.sleep(0.1)
    os._exit(0)


@pytest.mark.parametrize(
    ("how", "where"),
    [("killed", "forward"), ("killed", "backward"), ("raised and stays", "forward")],
)
def test_the_others_raise_in_time(tmp_path: Path, how: str, where: str) -> None:
    size = 4
    processes = start(size, worker, tmp_path, how, where)
    for process in processes:
        process.join(120)
        assert not process.is_alive()
    call = "logsumexp" if where == "forward" else "logsumexp, backward"
    for rank in (0, 2, 3):
        seconds, cause, message = (tmp_path / str(rank)).read_text().split("\n", 2)
        assert cause.endswith("Error")
        assert float(seconds) < (2 if how == "killed" else TIMEOUTS[how] + 2)
        doing = "exchanging" if where == "forward" else "adding up"
        assert message.startswith(f"{call}: {doing} all ranks' results, rank {rank}: ")


def absent_worker(rank: int, size: int, port: int, folder: Path) -> None:
    """Rank 1 makes no call."""
    group = group_of(rank, size, port, 2)
    if rank == 1:
        while not (folder / "0").exists():
            time.sleep(0.1)
        os._exit(0)
    x = torch.randn(4, 3)
    message = "no error"
    try:
        similarity.logsumexp(x, x, group=group)
    except CommunicationError as error:
        message = str(error)
    (folder / "0").write_text(message)
    os._exit(0)


def test_a_process_that_makes_no_call(tmp_path: Path) -> None:
    for process in start(2, absent_worker, tmp_path):
        process.join(120)
    message = (tmp_path / "0").read_text()
    assert message.startswith("logsumexp: before the first transfer, rank 0: ")
