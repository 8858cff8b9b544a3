"""A process that dies or raises mid-ring: the others end in time, with an error that says where."""

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
from megabatch.similarity import settings
from megabatch.similarity.reductions.softmax import SoftmaxTiles
from tests.similarity.distributed.processes import join, start

#: seconds until the group gives up on a process that does not come; of one that died the others
#: know at once, and do not wait so long
TIMEOUTS = {"killed": 20, "raised and stays": 3}


class Clock(threading.Thread):
    """Seconds as this process is given them: where others have its core, they are longer."""

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
    """A group of all processes, once they are all here, that gives up after so many seconds."""
    join(rank, size, port)
    dist.barrier()
    group = dist.new_group(timeout=timedelta(seconds=seconds))
    assert isinstance(group, dist.ProcessGroup)
    return group


def fail(how: str) -> None:
    if how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    raise KeyError("an error of its own")


def worker(
    rank: int, size: int, port: int, folder: Path, how: str, where: str, around: bool
) -> None:
    """Rank 1 fails at its second visit; the others write down what they got, and when.

    Where shards are gathered and do not go around the ring, there is one visit only.
    """
    group = group_of(rank, size, port, TIMEOUTS[how])
    if around:
        settings.set_gather(0)
    x, y = (torch.randn(4, 3, requires_grad=True) for _ in range(2))
    similarity.logsumexp(x, y, group=group)[0].sum().backward()  # all connections are made
    dist.barrier()
    visits = 0
    holder, name = (
        (SoftmaxTiles, "forward") if where == "forward" else (SoftmaxTiles, "gradient_block")
    )
    original = getattr(holder, name)

    def visit(self, *arguments):  # type: ignore[no-untyped-def]
        nonlocal visits
        visits += 1
        if rank == 1 and visits == (2 if around else 1):
            fail(how)
        return original(self, *arguments)

    setattr(holder, name, visit)
    clock = Clock()
    try:
        similarity.logsumexp(x, y, group=group)[0].sum().backward()
    except CommunicationError as error:
        cause = type(error.__cause__).__name__
        (folder / str(rank)).write_text(f"{clock.seconds}\n{cause}\n{error}")
    except KeyError:
        if how == "raised and stays":  # no connection is closed until the others are done
            until = time.monotonic() + 60
            while len(list(folder.iterdir())) < size - 1 and time.monotonic() < until:
                time.sleep(0.1)
    os._exit(0)


@pytest.mark.parametrize(
    ("how", "where", "around"),
    [
        ("killed", "forward", True),
        ("killed", "backward", True),
        ("raised and stays", "forward", True),
        ("killed", "forward", False),
        ("killed", "backward", False),
    ],
)
def test_the_others_end_in_time(tmp_path: Path, how: str, where: str, around: bool) -> None:
    size = 4
    processes = start(size, worker, tmp_path, how, where, around)
    for process in processes:
        process.join(120)
        assert not process.is_alive()
    call = "logsumexp" if where == "forward" else "logsumexp, backward"
    for rank in (0, 2, 3):
        seconds, cause, message = (tmp_path / str(rank)).read_text().split("\n", 2)
        assert cause.endswith("Error")
        assert float(seconds) < (2 if how == "killed" else TIMEOUTS[how] + 2)
        if not around:
            what = "exchanging" if where == "forward" else "adding up"
            assert message.startswith(f"{call}: {what} what all ranks found, rank {rank}: ")
            continue
        left, right = (rank - 1) % size, (rank + 1) % size
        assert message.startswith(f"{call}: ring step ")
        assert f"of {size}, rank {rank} (to rank {right}, from rank {left})" in message
    # A neighbour knows which of its peers it was.
    assert not around or "receiving from rank 1: " in (tmp_path / "2").read_text()


def absent_worker(rank: int, size: int, port: int, folder: Path) -> None:
    """Rank 1 does not come at all."""
    group = group_of(rank, size, port, 2)
    if rank == 1:
        while not (folder / "0").exists():
            time.sleep(0.1)
        os._exit(0)
    x = torch.randn(4, 3)
    told = "nothing"
    try:
        similarity.logsumexp(x, x, group=group)
    except CommunicationError as error:
        told = str(error)
    (folder / "0").write_text(told)
    os._exit(0)


def test_a_process_that_does_not_come(tmp_path: Path) -> None:
    for process in start(2, absent_worker, tmp_path):
        process.join(120)
    message = (tmp_path / "0").read_text()
    assert message.startswith("logsumexp: before the first transfer, rank 0: ")
