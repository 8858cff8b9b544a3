"""How features are transferred while a check runs, and records of the transfers."""

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
from megabatch.similarity.distributed import comm, layout, schedule
from tests.gathering import gathering_up_to


@contextmanager
def grid_of(columns: int) -> Iterator[None]:
    """Make each group whose size `columns` divides a grid with so many columns; 0: none."""
    before = settings.set_grid(columns)
    try:
        yield
    finally:
        settings.set_grid(before)


@contextmanager
def gathered_in_rounds(size: int | None) -> Iterator[pytest.MonkeyPatch]:
    """Gather rounds of so many bytes of all ranks' features, which may be less than a tile.

    None: the usual way.
    """
    with pytest.MonkeyPatch.context() as patch:
        if size is None:
            yield patch
            return
        patch.setattr(schedule, "TILE", 2)
        patch.setattr(schedule, "ROUND", 1)
        with gathering_up_to(size):
            yield patch


def recorded_transfers(patch: pytest.MonkeyPatch) -> list[str]:
    """A list that receives the name of each collective, in order."""
    done: list[str] = []
    for name in ("all_gather", "all_to_all", "reduce_scatter"):
        patch.setattr(layout, name, recorded(done, name, getattr(layout, name)))
    return done


def received_bytes(patch: pytest.MonkeyPatch) -> list[int]:
    """A list that receives the bytes that this rank gets from others in each collective."""
    received: list[int] = []

    def counting(name: str, shards: Callable[[Tensor, int], int]) -> None:
        function = getattr(layout, name)

        def call(tensor: Tensor, group: Any, *others: Any) -> Any:
            received.append((group.size() - 1) * shards(tensor, group.size()))
            return function(tensor, group, *others)

        patch.setattr(layout, name, call)

    counting("all_gather", lambda own, n: own.nbytes)
    counting("all_to_all", lambda parts, n: parts.nbytes // n)
    counting("reduce_scatter", lambda parts, n: parts.nbytes // n)
    return received


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


def recorded(events: list[str], name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, which writes a name to `events` first."""

    def call(*arguments: Any, **options: Any) -> Any:
        events.append(name)
        return function(*arguments, **options)

    return call
