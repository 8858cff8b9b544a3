"""Processes of one machine, a GPU each: rank 0 starts the others, which end with it."""

from __future__ import annotations

import contextlib
import os
import random
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as dist

#: Timeout of collectives; longer than any call takes.
TIMEOUT = timedelta(minutes=10)


def start_others(size: int, command: Sequence[str]) -> None:
    """Called by rank 0: start ranks 1 to `size` - 1 as `command`, and make this one rank 0.

    Where one of them fails this process ends as well, and they end with this process, however it
    ends. Their output goes to this process's standard error.
    """
    common = {"WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    os.environ.update(common, RANK="0")
    others = [
        subprocess.Popen(
            command,
            env=os.environ | {"RANK": str(rank)},
            stdin=subprocess.PIPE,  # closed by the system when this process ends
            stdout=2,
        )
        for rank in range(1, size)
    ]
    threading.Thread(target=_end_if_one_fails, args=(others,), daemon=True).start()


def free_port() -> int:
    """A free port, for rank 0 to listen on seconds later.

    It is below those that systems give to connections and to whoever asks for any, so that none of
    these takes it meanwhile.
    """
    while True:
        port = random.SystemRandom().randrange(10_000, 32_000)
        with socket.socket() as s, contextlib.suppress(OSError):
            s.bind(("127.0.0.1", port))
            return port


def _end_if_one_fails(others: Sequence[subprocess.Popen[bytes]]) -> None:
    running = list(others)
    while running:
        time.sleep(0.2)
        for process in list(running):
            code = process.poll()
            if code:
                os._exit(1)  # this rank may be waiting for that one inside a kernel
            if code is not None:
                running.remove(process)


def _end_with_rank_0() -> None:
    sys.stdin.buffer.read()
    os._exit(1)


@dataclass(frozen=True)
class Team:
    """The first `size` ranks, including this process; or this process alone, as rank 0."""

    rank: int
    size: int
    group: Any  #: for features; "local" for one rank
    control: dist.ProcessGroup | None  #: for messages between hosts, which wait for no device

    def broadcast(self, value: Any) -> Any:
        """Rank 0's value, on every rank."""
        box = [value]
        if self.control is not None:
            dist.broadcast_object_list(box, src=0, group=self.control)
        return box[0]

    def all_gather(self, value: Any) -> list[Any]:
        """Every rank's value, on every rank."""
        if self.control is None:
            return [value]
        box = [None] * self.size
        dist.all_gather_object(box, value, group=self.control)
        return box

    def barrier(self) -> None:
        """Wait until every rank is here."""
        if self.control is not None:
            dist.barrier(group=self.control)


def join(device: str, sizes: Sequence[int]) -> dict[int, Team]:
    """Join the default group as the environment says; returns this process's teams by size.

    A larger team contains a smaller one: so one start of the processes serves all sizes. Every rank
    is in the team of all ranks, and has one of its own if size 1 is asked for.
    """
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if rank:
        threading.Thread(target=_end_with_rank_0, daemon=True).start()
    if device == "cuda":
        # Not bound to its device (device_id): older torch would then have NCCL split its
        # communicator for every group, and ranks outside of one wait, where the group is Gloo's.
        torch.cuda.set_device(rank)
        dist.init_process_group("nccl", timeout=TIMEOUT)
    else:
        torch.set_num_threads(1)
        dist.init_process_group("gloo", timeout=TIMEOUT)
    teams: dict[int, Team] = {}
    for n in sorted({*sizes, size}):
        if n == 1:
            teams[n] = Team(0, n, "local", None)
            continue
        members = list(range(n))
        # All ranks must create all groups, in the same order.
        group = dist.group.WORLD if n == size else dist.new_group(members, timeout=TIMEOUT)
        control = dist.new_group(members, backend="gloo", timeout=TIMEOUT)
        if rank < n:
            assert isinstance(group, dist.ProcessGroup)
            assert isinstance(control, dist.ProcessGroup)
            # A group's first collective establishes its connections.
            dist.all_reduce(torch.zeros(1, device=device), group=group)
            teams[n] = Team(rank, n, group, control)
    return teams


def give_up(error: Exception) -> NoReturn:
    """End this process and with it all others, with the reason in the last line of stderr."""
    traceback.print_exception(error)
    first = str(error).strip().split("\n")[0]
    print(
        f"rank {os.environ['RANK']}: {type(error).__name__}: {first}", file=sys.stderr, flush=True
    )
    os._exit(1)


def leave() -> NoReturn:
    """End this process when all ranks have arrived, without libraries' cleanup, which may hang."""
    dist.barrier()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
