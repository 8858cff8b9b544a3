"""How features travel while a check runs, and notes of what does."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megabatch.similarity.distributed import gathered, ring
from megabatch.similarity.distributed.comm import Swap
from tests.gathering import gathering_up_to


@contextmanager
def pieces_of(size: int | None) -> Iterator[None]:
    """Around the ring in pieces of that many bytes; None: as it is."""
    before = ring.set_piece(size), ring.set_gather(0 if size else None)
    yield
    ring.set_piece(before[0])
    ring.set_gather(before[1])


@contextmanager
def in_rounds(size: int) -> Iterator[pytest.MonkeyPatch]:
    """Gathered in rounds of so many bytes of all ranks' features, also of less than a tile each."""
    with gathering_up_to(size), pytest.MonkeyPatch.context() as patch:
        patch.setattr(ring, "TILE", 2)
        patch.setattr(ring, "ROUND", 1)
        yield patch


def bytes_sent(patch: pytest.MonkeyPatch) -> list[int]:
    """Filled with what each exchange sends."""
    sent: list[int] = []
    add, start = Swap.add, Swap.start

    def count(self: Swap, outgoing: torch.Tensor, size: int, dim: int = 0) -> torch.Tensor:
        self.bytes = getattr(self, "bytes", 0) + outgoing.nbytes
        return add(self, outgoing, size, dim)

    def note(self: Swap) -> None:
        if hasattr(self, "bytes"):
            sent.append(self.bytes)
        start(self)

    patch.setattr(Swap, "add", count)
    patch.setattr(Swap, "start", note)
    return sent


def recorded_transfers(patch: pytest.MonkeyPatch) -> list[str]:
    """Filled with what the ranks do together, in order."""
    done: list[str] = []
    for name in ("gather", "deal", "scatter_sum"):
        function = getattr(gathered, name)

        def note(*arguments, name=name, function=function):  # type: ignore[no-untyped-def]
            done.append(name)
            return function(*arguments)

        patch.setattr(gathered, name, note)
    patch.setattr(Swap, "start", lambda self: done.append("swap"))
    return done


class Copied:
    """A collective of copies, so that none of its threads holds the tensors themselves.

    Gloo's keep what they transferred for a moment after it has arrived. As torch's own work, this
    one holds both tensors until it is let go.
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


def by_copies(patch: pytest.MonkeyPatch) -> None:
    """Let rounds' asynchronous transfers be of copies."""
    for name in ("all_gather_into_tensor", "reduce_scatter_tensor"):
        patch.setattr(dist, name, functools.partial(Copied, getattr(dist, name)))


def noting(events, name, function):  # type: ignore[no-untyped-def]
    def call(self, *arguments, **options):  # type: ignore[no-untyped-def]
        events.append(name)
        return function(self, *arguments, **options)

    return call
