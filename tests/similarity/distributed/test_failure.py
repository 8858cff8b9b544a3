"""If a process dies or raises during a call, the others soon raise an error that says where."""

from __future__ import annotations

import os
import signal
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megabatch import similarity
from megabatch.errors import CommunicationError
from megabatch.similarity.distributed import control
from megabatch.similarity.eager import SoftmaxTiles
from tests.similarity.distributed.processes import join, start

SIZE = 4
#: The group's timeout in seconds, and within which time the others raise: at once after a death.
TIMEOUT = {"killed": 20, "stays": 2, "hosts": 3}
LIMIT = {"killed": 10, "stays": 7, "hosts": 9}


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


def worker(
    rank: int, size: int, port: int, folder: Path, failing: list[int], where: str, how: str
) -> None:
    """Some ranks fail; the others write their error, its time and its cause.

    where: "call", before which they stay away; "forward" or "backward", in whose computation they
    fail. how: "killed", "stays" or "hosts": as if each rank were on a host of its own.
    """
    join(rank, size, port)
    dist.barrier()
    if how == "hosts":
        control._host = lambda: str(rank)  # type: ignore[assignment]
    group = dist.new_group(timeout=timedelta(seconds=TIMEOUT[how]))
    x, y = (torch.randn(4, 3, requires_grad=True) for _ in range(2))

    def step() -> None:
        similarity.logsumexp(x, y, group=group)[0].sum().backward()

    step()  # opens all connections
    if how == "hosts":
        if rank in failing:
            time.sleep(TIMEOUT[how] / 4)  # the others wait, and say so, and then go on
        step()
    dist.barrier()

    def fail(*_: Any) -> None:
        """Die, or keep the connections open until the others are done."""
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        until = time.monotonic() + 60
        while len(list(folder.iterdir())) < size - len(failing) and time.monotonic() < until:
            time.sleep(0.05)
        os._exit(0)

    if rank in failing and where == "call":
        fail()
    elif rank in failing:
        name = "forward" if where == "forward" else "gradient_block"
        setattr(SoftmaxTiles, name, fail)
    clock = Clock()
    try:
        step()
    except CommunicationError as error:
        cause = type(error.__cause__).__name__
        (folder / f"{rank}.part").write_text(f"{clock.seconds}\n{cause}\n{error}")
        (folder / f"{rank}.part").rename(folder / str(rank))
    os._exit(0)


#: How ranks fail -> where -> which do.
CASES = {
    "killed": {"forward": [1], "backward": [1]},
    "stays": {"call": [1], "forward": [1]},
    "hosts": {"call": [2, 3]},
}
DOING = {
    "call": "logsumexp: before the first transfer",
    "forward": "logsumexp: exchanging all ranks' results",
    "backward": "logsumexp, backward: adding up all ranks' results",
}


@pytest.mark.parametrize("how", CASES)
def test_the_others_raise_in_time(tmp_path: Path, how: str) -> None:
    """Cases of one kind at once, as they wait for timeouts."""
    started = []
    for where, failing in CASES[how].items():
        (tmp_path / where).mkdir()
        started += start(SIZE, worker, tmp_path / where, failing, where, how)
    for process in started:
        process.join(120)
        assert not process.is_alive()
    for where, failing in CASES[how].items():
        for rank in set(range(SIZE)) - set(failing):
            seconds, cause, message = (tmp_path / where / str(rank)).read_text().split("\n", 2)
            assert message.startswith(f"{DOING[where]}, rank {rank}: ")
            assert cause.endswith("Error")
            assert float(seconds) < LIMIT[how]
            if how == "hosts":
                names = f"rank{'s' * (len(failing) > 1)} {', '.join(map(str, failing))}"
                assert message.endswith(f"; missing in this call: {names} of the group")
            elif (how, where) == ("stays", "call"):
                assert "rank 1 of the group sent nothing for 2 s" in message or "gone" in message
