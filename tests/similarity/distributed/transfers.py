"""Contexts that choose how features are transferred, and records of the transfers."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megabatch.similarity import settings
from megabatch.similarity.distributed import comm, gathered
from megabatch.similarity.distributed.comm import P2PExchange
from tests.gathering import gathering_up_to


@contextmanager
def ring_in_chunks_of(size: int | None) -> Iterator[None]:
    """Use the ring, with chunks of that many bytes; None: the usual way."""
    before = settings.set_chunk(size), settings.set_gather(0 if size else None)
    yield
    settings.set_chunk(before[0])
    settings.set_gather(before[1])


@contextmanager
def grid_of(columns: int) -> Iterator[None]:
    """Make each group whose size `columns` divides a grid with so many columns; 0: none."""
    before = settings.set_grid(columns)
    try:
        yield
    finally:
        settings.set_grid(before)


@contextmanager
def gathered_in_rounds(size: int) -> Iterator[pytest.MonkeyPatch]:
    """Gather rounds of so many bytes of all ranks' features, which may be less than a tile."""
    with gathering_up_to(size), pytest.MonkeyPatch.context() as patch:
        patch.setattr(gathered, "TILE", 2)
        patch.setattr(gathered, "ROUND", 1)
        yield patch


def bytes_sent(patch: pytest.MonkeyPatch) -> list[int]:
    """A list that receives the number of bytes that each exchange sends."""
    sent: list[int] = []
    add, start = P2PExchange.add, P2PExchange.start

    def count(self: P2PExchange, outgoing: Tensor, *arguments: Any) -> Tensor:
        self.bytes = getattr(self, "bytes", 0) + outgoing.nbytes
        return add(self, outgoing, *arguments)

    def record(self: P2PExchange) -> None:
        if hasattr(self, "bytes"):
            sent.append(self.bytes)
        start(self)

    patch.setattr(P2PExchange, "add", count)
    patch.setattr(P2PExchange, "start", record)
    return sent


def recorded_transfers(patch: pytest.MonkeyPatch) -> list[str]:
    """A list that receives the name of each collective and exchange, in order."""
    done: list[str] = []
    for name in ("all_gather", "all_to_all", "reduce_scatter"):
        function = getattr(gathered, name)

        def record(*arguments, name=name, function=function):  # type: ignore[no-untyped-def]
            done.append(name)
            return function(*arguments)

        patch.setattr(gathered, name, record)
    patch.setattr(P2PExchange, "start", lambda self: done.append("exchange"))
    return done


class Copied:
    """A collective of copies, so that none of its threads holds the tensors themselves.

    Gloo's threads hold a transferred tensor for a moment after it has arrived. Like torch's own
    `Work`, this one holds both tensors as long as it exists.
    """

    def __init__(
        self, collective: Callable[..., dist.Work], out: Tensor, given: Tensor, **options: Any
    ) -> None:
        self._out, self._given = out, given
        self._arriving = torch.empty_like(out)
        self._work = collective(self._arriving, given.clone(), **options)

    def wait(self) -> None:
        self._work.wait()
        self._out.copy_(self._arriving)


def transfer_copies(patch: pytest.MonkeyPatch) -> None:
    """Make the asynchronous transfers of rounds transfer copies."""
    for name in ("_all_gather", "_reduce_scatter"):
        patch.setattr(comm, name, functools.partial(Copied, getattr(comm, name)))


def recorded(events, name, function):  # type: ignore[no-untyped-def]
    def call(self, *arguments, **options):  # type: ignore[no-untyped-def]
        events.append(name)
        return function(self, *arguments, **options)

    return call
