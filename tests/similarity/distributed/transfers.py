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


@contextmanager
def transferring(
    *,
    rounds: int | None = None,
    columns: int | None = None,
    own_first: int | None = None,
) -> Iterator[pytest.MonkeyPatch]:
    """Transfer features in a way of its own.

    rounds: bytes of all ranks' features in a round, which may be less than a tile; columns: of a
    grid of ranks; own_first: rows of a rank from which its own columns come first.
    """
    with pytest.MonkeyPatch.context() as patch:
        chosen = settings._chosen
        if rounds is not None:
            patch.setattr(schedule, "TILE", 2)
            patch.setattr(schedule, "ROUND", 1)
            chosen = chosen._replace(gather=rounds)
        if columns is not None:
            chosen = chosen._replace(grid=columns)
            if rounds is not None:
                patch.setattr(schedule, "most_sharing", lambda *_: 99)
        if own_first is not None:
            patch.setattr(schedule, "LARGE", own_first)
        patch.setattr(settings, "_chosen", chosen)
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

    def counting(function: Callable[..., Any], gathers: bool) -> Callable[..., Any]:
        def call(tensor: Tensor, group: dist.ProcessGroup, *others: Any) -> Any:
            shard = tensor.nbytes if gathers else tensor.nbytes // group.size()
            received.append((group.size() - 1) * shard)
            return function(tensor, group, *others)

        return call

    for name in ("all_gather", "all_to_all", "reduce_scatter"):
        patch.setattr(layout, name, counting(getattr(layout, name), name == "all_gather"))
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
