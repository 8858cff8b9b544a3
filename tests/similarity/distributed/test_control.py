from __future__ import annotations

import socket
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megabatch import torch_internals
from megabatch.similarity.distributed import control
from tests.similarity.distributed.processes import World, new_store, on_processes

CPU = torch.device("cpu")


def store_of(name: str) -> dist.Store:
    return dist.PrefixStore(name, torch_internals.group_store(dist.group.WORLD))


def channel_of(name: str, device: str = "cuda") -> control.Channel:
    """The channel of a stand-in for a new NCCL group of all processes."""
    whole = dist.group.WORLD

    class Group:
        rank, size = whole.rank, whole.size
        _get_backend = staticmethod(lambda device: whole._get_backend(CPU))

    group: Any = Group()
    store = store_of(name)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch_internals, "group_store", lambda group: store)
        patch.setattr(control, "has_cpu_backend", lambda group: device == "cpu")
        made = control.channel(group, torch.device("cuda"))
        assert control.channel(group, torch.device("cuda")) is made
    return made


def words(rank: int, turn: int) -> bytes:
    return f"rank {rank}, turn {turn}".encode().ljust(1088)


def exchange(channel: control.Channel, world: World, turns: int) -> None:
    for turn in range(turns):
        if turn % 7 == world.rank:
            time.sleep(0.002)  # ranks arrive at different times
        expected = [words(rank, turn) for rank in range(world.size)]
        assert channel.gather(words(world.rank, turn)) == expected


@on_processes(2, 3)
def test_every_rank_receives_every_message(world: World) -> None:
    channel = channel_of("all")
    assert isinstance(channel, control.SocketChannel)
    exchange(channel, world, 50)
    seconds = dist.group.WORLD._get_backend(CPU).options._timeout.total_seconds()
    assert channel.seconds == seconds


@on_processes(2)
def test_a_store_that_outlives_a_group(world: World) -> None:
    for _ in range(3):
        channel = control.sockets(store_of("reused"), world.rank, 2, timedelta(seconds=20))
        assert isinstance(channel, control.SocketChannel)
        exchange(channel, world, 3)
        if world.rank == 0:
            channel.end()


@on_processes(3)
def test_gloo_is_used_if_a_rank_cannot_connect_and_on_other_systems(world: World) -> None:
    class Unreachable(socket.socket):
        def connect(self, address: Any) -> None:
            raise ConnectionRefusedError

    with pytest.MonkeyPatch.context() as patch:
        if world.rank == 1:
            patch.setattr(control.socket, "socket", Unreachable)
        unreachable = channel_of("unreachable")
        patch.setattr(control.sys, "platform", "darwin")
        elsewhere = channel_of("other", "cpu")
    for channel in (unreachable, elsewhere):
        assert isinstance(channel, control.GlooChannel)
        assert (channel.backend is dist.group.WORLD._get_backend(CPU)) == (channel is elsewhere)
        exchange(channel, world, 3)


@on_processes(3)
def test_a_lost_rank_is_named_and_breaks_the_channel(world: World) -> None:
    channel = control.sockets(store_of("gone"), world.rank, 3, timedelta(seconds=20))
    assert channel is not None
    dist.barrier()
    if world.rank == 1:
        for peer in channel.peers.values():
            peer.close()  # as the system does for a process that dies
        return
    began = time.monotonic()
    with pytest.raises(RuntimeError, match="rank 1 of the group is gone"):
        channel.gather(b"x" * 1088)
    assert time.monotonic() - began < 5
    with pytest.raises(RuntimeError, match="broken off"):
        channel.gather(b"x" * 1088)


@on_processes(2)
def test_an_interrupted_exchange_is_an_error_on_all_ranks(world: World) -> None:
    """No answer must be taken for that of another exchange; a silent rank is named."""
    channel = control.sockets(store_of("interrupted"), world.rank, 2, timedelta(seconds=20))
    assert channel is not None
    exchange(channel, world, 1)
    if world.rank == 0:

        def interrupt(*_: object) -> bytes:
            raise KeyboardInterrupt

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(channel, "_received", interrupt)
            with pytest.raises(KeyboardInterrupt):
                channel.gather(words(0, 1))
    else:
        channel.gather(words(1, 1))  # its words had been sent
    with pytest.raises(RuntimeError, match=r"is gone|broken off"):
        channel.gather(words(world.rank, 2))
    channel = control.sockets(store_of("silent"), world.rank, 2, timedelta(seconds=0.3))
    assert channel is not None
    if world.rank == 0:
        with pytest.raises(RuntimeError, match=r"rank 1 of the group sent nothing for 0\.3 s"):
            channel.gather(b"x")
    dist.barrier()


# --- the list of the ranks that wait between machines ---------------------------------------------


class Stuck:
    """A collective that fails after a while."""

    def is_completed(self) -> bool:
        return False

    def wait(self, timeout: timedelta | None = None) -> None:
        raise RuntimeError("timed out")


class Gone:
    """A store out of reach."""

    def clone(self) -> dist.Store:
        raise RuntimeError("no connection")


@pytest.mark.parametrize(
    ("size", "reached", "words"),
    [
        (2, True, "missing in this call: rank 1 of the group"),
        (4, True, "missing in this call: ranks 1, 2, 3 of the group"),
        (1, True, "all ranks of the group wait: the network between them may have failed"),
        (2, False, "the group's store, which knows the ranks that wait, does not answer"),
    ],
)
def test_a_rank_that_waits_names_the_others(size: int, reached: bool, words: str) -> None:
    channel = control.GlooChannel(None, new_store(), 0, size, timedelta(seconds=0.1))
    if not reached:
        channel._store = Gone()  # type: ignore[assignment]
    with pytest.raises(RuntimeError, match=f"^timed out; {words}$"):
        channel.wait(Stuck())  # type: ignore[arg-type]
