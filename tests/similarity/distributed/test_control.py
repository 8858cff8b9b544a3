"""The control channel: sockets on one host, Gloo between hosts, and the ranks that either names."""

from __future__ import annotations

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


def board_of(name: str, seconds: float = 20) -> control.Board:
    store = dist.PrefixStore(name, torch_internals.group_store(dist.group.WORLD))
    place = dist.get_rank(), dist.get_world_size()
    return control.Board(store, *place, timedelta(seconds=seconds))


def sockets_of(name: str, seconds: float = 20) -> control.SocketChannel:
    return control.sockets(board_of(name, seconds))


def channel_of(name: str, device: str = "cuda") -> control.Channel:
    """The channel of a stand-in for a new NCCL group of all processes."""
    whole = dist.group.WORLD

    class Group:
        rank, size = whole.rank, whole.size
        _get_backend = staticmethod(lambda device: whole._get_backend(CPU))

    group: Any = Group()
    store = dist.PrefixStore(name, torch_internals.group_store(whole))
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
        channel = sockets_of("reused")
        exchange(channel, world, 3)
        if world.rank == 0:
            channel.break_off()


@on_processes(3)
def test_gloo_is_used_between_hosts_and_on_other_systems(world: World) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(control, "_host", lambda: f"host {world.rank}")
        on_hosts = channel_of("hosts")
        assert on_hosts.hosts == ["host 0", "host 1", "host 2"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(control.sys, "platform", "darwin")
        elsewhere = channel_of("other", "cpu")
    for channel in (on_hosts, elsewhere):
        assert isinstance(channel, control.GlooChannel)
        assert (channel.backend is dist.group.WORLD._get_backend(CPU)) == (channel is elsewhere)
        exchange(channel, world, 3)


@on_processes(3)
def test_a_lost_rank_is_named_and_breaks_the_channel(world: World) -> None:
    channel = sockets_of("gone")
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
    channel = sockets_of("interrupted")
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
    channel = sockets_of("silent", 0.3)
    if world.rank == 0:
        with pytest.raises(RuntimeError, match=r"rank 1 of the group sent nothing for 0\.3 s"):
            channel.gather(b"x")
    dist.barrier()


# --- the ranks that do not come, between machines -----------------------------------------------


class Stuck:
    """A backend whose collectives fail after a while."""

    def allgather(self, *tensors: object) -> Stuck:
        return self

    def wait(self) -> None:
        time.sleep(0.1)
        raise RuntimeError("timed out")


class Silent:
    """A store out of reach."""

    def set(self, key: str, value: str) -> None:
        raise RuntimeError("no connection")

    def get(self, key: str) -> bytes:
        time.sleep(60)
        return b""


@pytest.mark.parametrize(
    ("size", "here", "words"),
    [
        (2, [0], "missing in this call: rank 1 of the group"),
        (4, [0, 2], "missing in this call: ranks 1, 3 of the group"),
        (2, [0, 1], "all ranks of the group came: the network between them may have failed"),
        (2, [], "the group's store, which knows the ranks that came, does not answer"),
    ],
)
def test_a_rank_that_waits_names_those_that_do_not_come(
    monkeypatch: pytest.MonkeyPatch, size: int, here: list[int], words: str
) -> None:
    monkeypatch.setattr(control, "ANSWER", 0.2)
    store = new_store()
    boards = [control.Board(store, rank, size, timedelta(seconds=0.1)) for rank in range(size)]
    channels = [control.GlooChannel(Stuck(), board) for board in boards]
    for rank in here[1:]:
        boards[rank].store.set(f"came {rank}", "1")
    if not here:
        channels[0]._store = Silent()  # type: ignore[assignment]
    with pytest.raises(RuntimeError, match=f"^timed out; {words}$"):
        channels[0].gather(b"x")
