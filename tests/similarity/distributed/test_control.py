from __future__ import annotations

import os
import socket
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megabatch import similarity, torch_internals
from megabatch.errors import CommunicationError
from megabatch.similarity.distributed import control
from tests.similarity.distributed.processes import World, join, on_processes, start

CPU = torch.device("cpu")


def group_like(store: dist.Store, device: str = "cuda") -> Any:
    """A stand-in for a new NCCL group of all processes."""
    whole = dist.group.WORLD

    class Group:
        _device_types = (torch.device(device),)
        rank, size = whole.rank, whole.size
        _get_backend = staticmethod(lambda device: whole._get_backend(CPU))

    group = Group()
    group.store = store  # type: ignore[attr-defined]
    return group


def new_store(name: str) -> dist.Store:
    return dist.PrefixStore(name, torch_internals.group_store(dist.group.WORLD))


def channel_of(group: Any) -> control.Channel:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch_internals, "group_store", lambda group: group.store)
        patch.setattr(control, "has_cpu_backend", lambda group: CPU in group._device_types)
        made = control.channel(group, torch.device("cuda"))
        assert control.channel(group, torch.device("cuda")) is made
    return made


def words(rank: int, turn: int) -> bytes:
    return f"rank {rank}, turn {turn}".encode().ljust(1088)


@on_processes(2, 3, 4)
def test_every_rank_receives_every_message(world: World) -> None:
    group = group_like(new_store("all"))
    channel = channel_of(group)
    assert isinstance(channel, control.SocketChannel)
    for turn in range(50):
        if turn % 7 == world.rank:
            time.sleep(0.002)  # ranks arrive at different times
        expected = [words(rank, turn) for rank in range(world.size)]
        assert channel.gather(words(world.rank, turn)) == expected
    seconds = dist.group.WORLD._get_backend(CPU).options._timeout.total_seconds()
    assert channel.seconds == seconds


@on_processes(2, 3)
def test_a_store_that_outlives_a_group(world: World) -> None:
    store = new_store("reused")
    for turn in range(3):
        channel = control.sockets(store, world.rank, world.size, timedelta(seconds=20))
        assert isinstance(channel, control.SocketChannel)
        assert channel.gather(words(world.rank, turn))[-1] == words(world.size - 1, turn)
        if world.rank == 0:
            channel.end()


@on_processes(3)
def test_gloo_is_used_if_a_rank_cannot_connect(world: World) -> None:
    class Unreachable(socket.socket):
        def connect(self, address: Any) -> None:
            raise ConnectionRefusedError

    group = group_like(new_store("unreachable"))
    with pytest.MonkeyPatch.context() as patch:
        if world.rank == 1:
            patch.setattr(control.socket, "socket", Unreachable)
        channel = channel_of(group)
    assert isinstance(channel, control.GlooChannel)
    for turn in range(3):
        expected = [words(rank, turn) for rank in range(3)]
        assert channel.gather(words(world.rank, turn)) == expected


@on_processes(2)
def test_gloo_is_used_on_other_systems(world: World) -> None:
    group = group_like(new_store("other"), "cpu")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(control.sys, "platform", "darwin")
        channel = channel_of(group)
    assert isinstance(channel, control.GlooChannel)
    assert channel.backend is dist.group.WORLD._get_backend(CPU)
    assert channel.gather(b"ab")[world.rank] == b"ab"


@on_processes(3)
def test_a_lost_rank_is_named_and_breaks_the_channel(world: World) -> None:
    channel = control.sockets(new_store("gone"), world.rank, 3, timedelta(seconds=20))
    assert channel is not None
    dist.barrier()
    if world.rank == 1:
        for peer in filter(None, channel.peers):
            peer.close()  # as the system does for a process that dies
        return
    began = time.monotonic()
    with pytest.raises(RuntimeError, match="rank 1 of the group is gone"):
        channel.gather(b"x" * 1088)
    assert time.monotonic() - began < 5
    with pytest.raises(RuntimeError, match="broken off"):
        channel.gather(b"x" * 1088)


@on_processes(2)
def test_a_silent_rank_is_named(world: World) -> None:
    channel = control.sockets(new_store("silent"), world.rank, 2, timedelta(seconds=0.3))
    assert channel is not None
    if world.rank == 0:
        with pytest.raises(RuntimeError, match=r"rank 1 of the group sent nothing for 0\.3 s"):
            channel.gather(b"x")
    dist.barrier()


def interrupted_worker(rank: int, size: int, port: int, folder: Path) -> None:
    """Rank 0 is interrupted while it waits and calls again; no answer must be taken for another."""
    join(rank, size, port, seconds=20)
    x = torch.randn(4, 3)
    similarity.logsumexp(x, x)
    if rank == 1:
        time.sleep(1)
    else:

        def interrupt(*_: object) -> bytes:
            raise KeyboardInterrupt

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(control.SocketChannel, "_received", interrupt)
            with pytest.raises(KeyboardInterrupt):
                similarity.logsumexp(x, x)
    try:
        similarity.logsumexp(x, x)
    except CommunicationError as error:
        (folder / str(rank)).write_text(str(error))
    os._exit(0)


def test_an_interrupted_exchange_is_an_error_on_all_ranks(tmp_path: Path) -> None:
    for process in start(2, interrupted_worker, tmp_path):
        process.join(30)
    assert "broken off" in (tmp_path / "0").read_text()
    assert (tmp_path / "1").read_text()  # an error, and not the result of another exchange
